"""The synchronizer's calls that need no cluster: statuses, versions, hand-shake, losses."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.manager import RunningStatus, Synchronizer
from trinity_dask.sync.state import REQUIRE_SYNC, RUNNING, STOPPED

pytestmark = pytest.mark.timeout(120)
WEIGHTS = {"w": torch.arange(4.0)}


def synchronizer(path: Path, style: str = "fixed", method: str = "memory", **keys: Any) -> Any:
    cfg = SynchronizerConfig(sync_method=method, sync_style=style, **keys)
    return Synchronizer(cfg, str(path), f"unit-{path.name}")


def counts(sync: Any) -> dict[str, int]:
    return {status.value: n for status, n in sync.explorer_status_counts.items() if n}


def test_published_versions_grow_and_the_second_content_of_a_path_is_seen(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path)
        assert await sync.get_model_state_dict() == (None, 0)
        assert await sync.get_state_dict_meta() is None
        await sync.set_model_state_dict(WEIGHTS, 3)
        await sync.set_model_state_dict({"w": torch.ones(4)}, 3)
        state, version = await sync.get_model_state_dict()
        assert version == sync.model_version == await sync.get_latest_model_version() == 3
        torch.testing.assert_close(state["w"], torch.ones(4))
        assert await sync.get_state_dict_meta() == [("w", "float32", (4,))]
        with pytest.raises(ValueError, match="version 2 is older than 3"):
            await sync.set_model_state_dict(WEIGHTS, 2)
        await sync.close()

    asyncio.run(body())


def test_a_checkpoint_is_published_with_its_last_shard_and_stays_readable(tmp_path: Path) -> None:
    from trinity_dask.weights.files import read_safetensors, write_safetensors

    export = tmp_path / "global_step_4" / "huggingface"
    write_safetensors(str(export / "model.safetensors"), WEIGHTS.items())

    async def body() -> None:
        sync = synchronizer(tmp_path, method="checkpoint")
        await sync.set_model_state_dict_with_step_num(4, 2)
        assert (sync.model_version, sync.checkpoint_shard_counter[4]) == (0, 1)
        assert await sync.set_model_state_dict_with_step_num(4, 2) == 4
        path, version = await sync.get_model_state_dict()
        shutil.rmtree(export)  # as the trainer does with old checkpoints
        found = dict(read_safetensors(path))
        assert (version, list(found)) == (4, ["w"])
        torch.testing.assert_close(found["w"], WEIGHTS["w"])
        await sync.close()
        assert not Path(path).exists()

    asyncio.run(body())


@pytest.mark.parametrize("end", ["published", "stopped", "nothing new", "late"])
def test_a_wait_for_a_version_leaves_no_status_behind(tmp_path: Path, end: str) -> None:
    async def body() -> None:
        limit = {"sync_timeout_s": 0.05} if end == "late" else {}
        sync = synchronizer(tmp_path, **limit)
        await sync.set_trainer_status("running")
        await sync.set_explorer_status(RUNNING)
        wait = asyncio.ensure_future(sync.wait_new_model_state_dict(0))
        while counts(sync) != {"require_sync": 1} and not wait.done():
            await asyncio.sleep(0)
        if end == "late":
            with pytest.raises(TimeoutError, match="a version above 0"):
                await wait
        else:
            ends = {
                "published": lambda: sync.set_model_state_dict(WEIGHTS, 2),
                "stopped": lambda: sync.set_trainer_status(RunningStatus.STOPPED),
                "nothing new": sync.notify_no_new_model_state_dict,
            }
            await ends[end]()
            assert await wait == (2 if end == "published" else 0)
        assert counts(sync) == {"running": 1}
        await sync.close()

    asyncio.run(body())


def test_statuses_are_those_of_known_explorers(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path)
        assert sync.trainer_status is STOPPED
        assert await sync.trainer_requires_weight_sync() is None
        await sync.set_explorer_status(RUNNING)
        await sync.set_explorer_status(RUNNING)
        await sync.set_explorer_status(REQUIRE_SYNC, RUNNING)
        assert counts(sync) == {"running": 1, "require_sync": 1}
        assert await sync.explorer_requires_sync()
        with pytest.raises(ValueError, match="no explorer is 'stopped'"):
            await sync.set_explorer_status(RUNNING, STOPPED)
        with pytest.raises(ValueError, match="both 'running'"):
            await sync.set_explorer_status(RUNNING, RUNNING)

    asyncio.run(body())


def test_both_sides_of_a_broadcast_meet_or_neither_does(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, method="nccl", sync_timeout_s=30.0)
        await sync.set_trainer_status("running")
        assert await sync.ready_to_nccl_sync("trainer", 1) is None  # nobody is there
        await sync.register_explorer("e")
        both = (sync.ready_to_nccl_sync("trainer", 2), sync.ready_to_nccl_sync("explorer"))
        assert await asyncio.gather(*both) == [2, 2]
        assert (sync.trainer_status, counts(sync)) == (RUNNING, {"running": 1})

        waiting = asyncio.ensure_future(sync.ready_to_nccl_sync("explorer"))
        while counts(sync) != {"require_sync": 1}:
            await asyncio.sleep(0)
        await sync.trainer_stopped(2)
        assert await waiting is None
        assert counts(sync) == {"running": 1}
        with pytest.raises(ValueError, match="module must be one of"):
            await sync.ready_to_nccl_sync("critic")

    asyncio.run(body())


def test_a_late_peer_costs_a_time_out_and_no_status(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, "explorer_driven", "nccl", sync_timeout_s=0.05)
        await sync.set_trainer_status("running")
        await sync.register_explorer("e")
        assert await sync.ready_to_nccl_sync("trainer", 1) is None
        assert sync.trainer_status is RUNNING
        # the trainer does not come to the boundary: the explorer goes on with what it has
        assert await sync.explorer_sync("e", 1) == -1
        assert counts(sync) == {"running": 1}
        assert sync.timeouts == 2
        sync.cfg.sync_style = sync.state.style = "fixed"
        with pytest.raises(TimeoutError, match="explorer 'e' at step 2: the trainer to finish"):
            await sync.explorer_sync("e", 2)
        assert counts(sync) == {"running": 1}

    asyncio.run(body())


class Killed:
    """A module whose process is gone as soon as ``dead`` is set."""

    dead = False

    async def is_alive(self) -> bool:
        return not self.dead


def test_the_dead_are_noticed_and_release_who_waits_for_them(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, method="checkpoint")
        trainer, explorer = Killed(), Killed()
        await sync.set_trainer_status("running")
        await sync.register_explorer("e")
        await sync.add_module(trainer, "trainer")
        await sync.add_module(explorer, "e")
        waiting = asyncio.ensure_future(sync.explorer_sync("e", 1))
        trainer.dead = True
        assert await waiting == -1  # on the weights it has
        assert sync.trainer_status is STOPPED
        explorer.dead = True
        gone = asyncio.Event()

        async def abandoned() -> None:
            gone.set()

        sync.on_abandoned = abandoned
        await asyncio.wait_for(gone.wait(), 60)
        assert counts(sync) == {"stopped": 1}

    asyncio.run(body())


def test_a_cancelled_explorer_does_not_stay_at_its_boundary(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, method="checkpoint")
        await sync.set_trainer_status("running")
        await sync.register_explorer("e")
        waiting = asyncio.ensure_future(sync.explorer_sync("e", 1))
        while counts(sync) != {"require_sync": 1}:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert counts(sync) == {"running": 1}

    asyncio.run(body())


def test_pacing_counts_what_other_explorers_had_begun_before_a_resume(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, "fully_async", max_staleness=4, sync_timeout_s=0.05)
        sync.state.trainer_joined(3, 6)
        await sync.register_explorer("a", 4)
        await sync.register_explorer("b", 3)
        for name in ("a", "b"):
            sync.state.load_ended(name, 3)
        assert await sync.explorer_may_submit("a", 5)  # 5 + 3 <= 3 + 4 + 1
        with pytest.raises(TimeoutError, match="batch 4 to be young enough"):
            await sync.explorer_may_submit("b", 4)  # 4 + 5 is one too many
        await sync.close()

    asyncio.run(body())

"""Trinity-RFT's synchronizer calls that need no cluster: statuses, versions, hand-shake, losses."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_dask.config.schema import Config, SynchronizerConfig
from trinity_dask.manager.synchronizer import Synchronizer
from trinity_dask.sync.state import REQUIRE_SYNC, RUNNING, STOPPED
from trinity_dask.weights.files import read_safetensors, write_safetensors

pytestmark = pytest.mark.timeout(120)
WEIGHTS = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}


def synchronizer(
    path: Path, style: str = "fixed", method: str = "memory", module: Any = None, **keys: Any
) -> Any:
    cfg = Config(name=f"unit-{path.name}", job_dir=str(path))
    cfg.synchronizer = SynchronizerConfig(sync_method=method, sync_style=style, **keys)
    return Synchronizer(config=cfg, module_ref=module)


def counts(sync: Any) -> dict[str, int]:
    return {status.value: n for status, n in sync.explorer_status_counts.items() if n}


async def until(ready: Any) -> None:
    async with asyncio.timeout(60):
        while not ready():
            await asyncio.sleep(0)


def test_attributes_tell_the_state(tmp_path: Path) -> None:
    sync = synchronizer(tmp_path)
    assert sync.trainer_status is sync.get_trainer_status() is STOPPED
    assert {s.value: n for s, n in sync.get_explorer_status_counts().items()} == {
        "running": 0, "require_sync": 0, "stopped": 0,
    }  # fmt: skip
    assert (sync.model_version, sync.model_state_dict, sync.model_path) == (0, None, None)
    assert dict(sync.checkpoint_shard_counter) == {}


@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_a_published_version_can_be_had_in_every_way(tmp_path: Path, method: str) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, method=method)
        assert list(sync.get_model_state_dict_iterator()) == []
        assert await sync.get_latest_model_path() is None
        assert await sync.get_state_dict_meta() is None
        assert sync.get_model_state_dict() == (None, 0)
        await sync.set_model_state_dict(WEIGHTS, trainer_step=2)
        found = dict(sync.get_model_state_dict_iterator())
        assert found.keys() == WEIGHTS.keys()
        assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
        assert sorted(await sync.get_state_dict_meta()) == [
            ("a", "float32", (3,)), ("b", "float32", (2, 2)),
        ]  # fmt: skip
        state, version = sync.get_model_state_dict()
        assert version == sync.model_version == await sync.get_latest_model_version() == 2
        assert await sync.get_latest_model_path() == sync.model_path
        if method == "memory":
            assert torch.equal(state["b"], sync.model_state_dict["b"])
        else:
            assert state == sync.model_state_dict == sync.model_path
        assert await sync.get_latest_model_path(use_huggingface=True) is None
        export = tmp_path / "global_step_2" / "huggingface"
        export.mkdir(parents=True)
        (export / "model.safetensors").touch()
        assert await sync.get_latest_model_path(use_huggingface=True) == str(export)
        await sync.set_model_state_dict(None, 3)  # its weights lie elsewhere
        assert sync.model_version == 3
        with pytest.raises(ValueError, match="version 2 is older than 3"):
            await sync.set_model_state_dict(WEIGHTS, 2)
        await sync.real.close()

    asyncio.run(body())


def test_the_tensors_that_were_handed_out_are_copies(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path)
        await sync.set_model_state_dict(WEIGHTS, 1)
        first, _ = sync.get_model_state_dict()
        await sync.set_model_state_dict({name: t + 1 for name, t in WEIGHTS.items()}, 1)
        assert torch.equal(first["a"], WEIGHTS["a"])
        assert torch.equal(sync.get_model_state_dict()[0]["a"], WEIGHTS["a"] + 1)
        await sync.real.close()

    asyncio.run(body())


def test_a_checkpoint_is_published_with_its_last_shard_and_stays_readable(tmp_path: Path) -> None:
    for step in (2, 4):
        export = tmp_path / f"global_step_{step}" / "huggingface"
        write_safetensors(str(export / "model.safetensors"), WEIGHTS.items())

    async def body() -> None:
        sync = synchronizer(tmp_path, method="checkpoint")
        assert await sync.set_model_state_dict_with_step_num(2) == 2
        assert sync.model_version == 2
        await sync.set_model_state_dict_with_step_num(step_num=4, world_size=2)
        assert (sync.model_version, sync.checkpoint_shard_counter[4]) == (2, 1)
        assert await sync.set_model_state_dict_with_step_num(4, 2) == 4
        path, version = sync.get_model_state_dict()
        assert await sync.set_model_state_dict_with_step_num() == 4  # the newest there is
        shutil.rmtree(export)  # as the trainer does with old checkpoints
        assert (version, sorted(dict(read_safetensors(path)))) == (4, ["a", "b"])
        with pytest.raises(ValueError, match="step_num is needed"):
            await sync.set_model_state_dict_with_step_num(world_size=2)
        await sync.real.close()
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
        await until(lambda: counts(sync) == {"require_sync": 1} or wait.done())
        if end == "late":
            with pytest.raises(TimeoutError, match="a version above 0"):
                await wait
        else:
            ends = {
                "published": lambda: sync.set_model_state_dict(WEIGHTS, 2),
                "stopped": lambda: sync.set_trainer_status(STOPPED),
                "nothing new": sync.notify_no_new_model_state_dict,
            }
            await ends[end]()
            assert await wait == (2 if end == "published" else 0)
        assert counts(sync) == {"running": 1}
        await sync.real.close()

    asyncio.run(body())


def test_no_wait_does_not_wait(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path)
        await sync.set_trainer_status(RUNNING)
        await sync.set_explorer_status(RUNNING)
        assert await sync.wait_new_model_state_dict(-1) == 0  # the start model is version 0
        async with asyncio.timeout(10):
            assert await sync.wait_new_model_state_dict(0, True) == 0
            assert await sync.wait_new_model_state_dict(current_version=0, no_wait=True) == 0
        with pytest.raises(ValueError, match="current_version=1 is above the newest, 0"):
            await sync.wait_new_model_state_dict(1)

    asyncio.run(body())


def test_statuses_are_those_of_known_explorers(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path)
        assert sync.trainer_requires_weight_sync() is None
        await sync.set_trainer_status(status=REQUIRE_SYNC)
        assert sync.trainer_requires_weight_sync() is True
        await sync.set_trainer_status(RUNNING)
        assert sync.trainer_requires_weight_sync() is False
        await sync.set_explorer_status(RUNNING)
        await sync.set_explorer_status(RUNNING)
        assert not sync.explorer_requires_sync()
        await sync.set_explorer_status(REQUIRE_SYNC, old_status=RUNNING)
        assert counts(sync) == {"running": 1, "require_sync": 1}
        assert sync.explorer_requires_sync()
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
        await sync.real.register_explorer("e")
        for step in (2, 3):  # whoever comes first
            sides = [("trainer", step), ("explorer", -1)][:: 1 if step == 2 else -1]
            meet = (sync.ready_to_nccl_sync(module, version) for module, version in sides)
            assert await asyncio.gather(*meet) == [step, step]
            assert (sync.trainer_status, counts(sync)) == (RUNNING, {"running": 1})

        waiting = asyncio.ensure_future(sync.ready_to_nccl_sync("explorer"))
        await until(lambda: counts(sync) == {"require_sync": 1})
        await sync.real.trainer_stopped(3)
        assert await waiting is None
        assert counts(sync) == {"running": 1}
        with pytest.raises(ValueError, match="module must be one of"):
            await sync.ready_to_nccl_sync("critic")

    asyncio.run(body())


def test_a_late_side_costs_a_time_out_and_no_status(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, "explorer_driven", "nccl", sync_timeout_s=0.05)
        await sync.set_trainer_status("running")
        await sync.real.register_explorer("e")
        assert await sync.ready_to_nccl_sync("trainer", 1) is None
        assert sync.trainer_status is RUNNING
        assert await sync.ready_to_nccl_sync("explorer") is None
        assert (sync.real.timeouts, counts(sync)) == (2, {"running": 1})

    asyncio.run(body())


def test_the_ready_condition_wakes_as_one_of_asyncio(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, sync_timeout_s=30.0)

        async def waits() -> int:
            async with sync._ready_condition:
                await sync._ready_condition.wait()
                await sync._ready_condition.wait_for(lambda: sync.model_version >= 2)
                return sync.model_version

        waiting = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        sync._ready_condition.notify_all()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await sync.set_model_state_dict(None, 2)
        assert await waiting == 2

    asyncio.run(body())


class Killed:
    """A module whose process is gone as soon as ``dead`` is set."""

    dead = False

    def __init__(self, name: str) -> None:
        self.name = name

    async def is_alive(self) -> bool:
        return not self.dead


def test_the_dead_are_noticed_and_release_who_waits_for_them(tmp_path: Path) -> None:
    async def body() -> None:
        trainer, explorer = Killed("trainer"), Killed("e")
        sync = synchronizer(tmp_path, method="checkpoint", module=trainer)
        await sync.set_trainer_status("running")
        await sync.real.register_explorer("e")
        await sync.add_module(module_ref=explorer)
        waiting = asyncio.ensure_future(sync.real.explorer_sync("e", 1))
        trainer.dead = True
        assert await waiting == -1  # on the weights it has
        assert sync.trainer_status is STOPPED
        await sync.set_model_state_dict(WEIGHTS, 1)
        path = Path(sync.model_path)
        assert path.exists()
        explorer.dead = True
        async with asyncio.timeout(60):
            while path.exists():  # with the last module the files go
                await asyncio.sleep(0.05)
        assert counts(sync) == {"stopped": 1}

    asyncio.run(body())


def test_a_group_needs_both_sides_and_its_end_passes_over_nobody(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, method="nccl")
        with pytest.raises(RuntimeError, match="no explorer is attached"):
            await sync.coordinate_weight_sync_setup(1.0)
        with pytest.raises(RuntimeError, match="no explorer is attached"):
            await sync.setup_weight_sync_group("127.0.0.1", 1, [])
        await sync.coordinate_weight_sync_teardown()

    asyncio.run(body())

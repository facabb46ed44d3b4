"""The synchronizer's calls that need no cluster: published versions, deadlines, cancelled waits."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.sync.state import RUNNING
from trinity_dask.sync.synchronizer import Synchronizer
from trinity_dask.weights.files import read_safetensors, write_safetensors

pytestmark = pytest.mark.timeout(120)
WEIGHTS = {"w": torch.arange(4.0)}


def synchronizer(path: Path, style: str = "fixed", method: str = "memory", **keys: Any) -> Any:
    cfg = SynchronizerConfig(sync_method=method, sync_style=style, **keys)
    return Synchronizer(cfg, str(path), f"unit-{path.name}")


def counts(sync: Any) -> dict[str, int]:
    return {status.value: n for status, n in sync.state.explorer_status_counts.items() if n}


def test_published_versions_grow_and_the_second_content_of_a_path_is_seen(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path)
        assert sync.published is None
        await sync.put(3, WEIGHTS)
        first = sync.published.receipt.checksum
        await sync.put(3, {"w": torch.ones(4)})
        assert sync.published.version == sync.state.model_version == 3
        assert sync.published.receipt.checksum != first
        state = {name: t.clone() for name, t in read_safetensors(sync.published.path)}
        torch.testing.assert_close(state["w"], torch.ones(4))
        with pytest.raises(ValueError, match="version 2 is older than 3"):
            await sync.put(2, WEIGHTS)
        await sync.close()

    asyncio.run(body())


def test_what_others_wrote_stays_readable_until_it_is_swept(tmp_path: Path) -> None:
    export = tmp_path / "global_step_4" / "huggingface"
    write_safetensors(str(export / "model.safetensors"), WEIGHTS.items())

    async def body() -> None:
        sync = synchronizer(tmp_path, method="checkpoint")
        path = (await sync.put(4, str(export))).path
        shutil.rmtree(export)  # as the trainer does with old checkpoints
        found = dict(read_safetensors(path))
        assert (sync.published.version, list(found)) == (4, ["w"])
        torch.testing.assert_close(found["w"], WEIGHTS["w"])
        await sync.close()
        assert not Path(path).exists()

    asyncio.run(body())


def test_a_late_peer_costs_a_time_out_and_no_status(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, "explorer_driven", "nccl", sync_timeout_s=0.05)
        sync.state.trainer_joined(0)
        await sync.register_explorer("e")
        # the trainer does not come to the boundary: the explorer goes on with what it has
        assert await sync.explorer_sync("e", 1) == -1
        assert counts(sync) == {"running": 1}
        assert sync.timeouts == 1
        sync.cfg.sync_style = sync.state.style = "fixed"
        with pytest.raises(TimeoutError, match="explorer 'e' at step 2: the trainer to finish"):
            await sync.explorer_sync("e", 2)
        assert counts(sync) == {"running": 1}
        with pytest.raises(TimeoutError, match="trainer at step 2: the explorer to take"):
            await sync.trainer_sync(2, 2)
        assert sync.state.trainer is RUNNING

    asyncio.run(body())


def test_the_dead_release_who_waits_for_them(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, method="checkpoint")
        sync.state.trainer_joined(0)
        await sync.register_explorer("e")
        waiting = asyncio.ensure_future(sync.explorer_sync("e", 1))
        while counts(sync) != {"require_sync": 1}:
            await asyncio.sleep(0)
        sync.state.trainer_died()
        sync.notify()
        assert await waiting == -1  # on the weights it has
        await sync.explorer_stopped("e")
        assert counts(sync) == {"stopped": 1}

    asyncio.run(body())


class Gate:
    """Transfers that take as long as the test says, and end as it says."""

    def __init__(self, sync: Any) -> None:
        self.sent: list[tuple[str, int]] = []
        self.open = asyncio.Event()
        self.error: Exception | None = None
        sync.transfers.load = self

    async def __call__(self, name: str, version: int) -> None:
        self.sent.append((name, version))
        await self.open.wait()
        if self.error is not None:
            raise self.error


def test_the_trainer_brings_its_weights_and_a_transfer_is_not_cut_by_who_waits_for_it(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, "fixed", "nccl", sync_timeout_s=0.2)
        gate = Gate(sync)
        sync.state.trainer_joined(0)
        await sync.register_explorer("e")
        explorer = asyncio.ensure_future(sync.explorer_sync("e", 1))
        trainer = asyncio.ensure_future(sync.trainer_sync(1, 1))
        await asyncio.sleep(0.5)  # longer than either side waits for the other
        assert gate.sent == [("e", 1)]
        assert not explorer.done() and not trainer.done()  # noqa: PT018
        gate.open.set()
        assert await asyncio.gather(explorer, trainer) == [1, 1]
        assert counts(sync) == {"running": 1}

    asyncio.run(body())


@pytest.mark.parametrize("stopped", [True, False])
def test_a_transfer_that_breaks_is_the_trainer_s_only_while_the_explorer_is_there(
    tmp_path: Path, stopped: bool
) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, "fully_async", "nccl")
        gate = Gate(sync)
        sync.state.trainer_joined(0)
        await sync.register_explorer("e")
        watch = asyncio.ensure_future(sync.watch("e", 60.0))
        trainer = asyncio.ensure_future(sync.trainer_sync(1, 1))
        while not gate.sent:
            await asyncio.sleep(0)
        gate.error = RuntimeError("the engines are gone")
        if stopped:
            leaving = asyncio.ensure_future(sync.explorer_stopped("e"))
            await asyncio.sleep(0.05)
            assert not leaving.done()  # its engines are still being written to
            gate.open.set()
            await leaving
            assert await asyncio.gather(watch, trainer) == [-1, -1]
        else:
            gate.open.set()
            ends = await asyncio.gather(watch, trainer, return_exceptions=True)
            assert ["the engines are gone" in str(end) for end in ends] == [True, True]
        assert sync.state.trainer is RUNNING

    asyncio.run(body())


def test_a_cancelled_explorer_does_not_stay_at_its_boundary(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, method="checkpoint")
        sync.state.trainer_joined(0)
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


@pytest.mark.parametrize("style", ["fully_async", "trainer_driven", "explorer_driven"])
def test_a_step_that_needs_more_than_the_bound_allows_is_no_endless_turn(
    tmp_path: Path, style: str
) -> None:
    """The answer is that of the moment at which the wait ended."""

    async def body() -> None:
        sync = synchronizer(tmp_path, style, max_staleness=0, sync_timeout_s=5.0)
        sync.attach_trainer()
        sync.state.trainer_joined(0, 0)
        await sync.register_explorer("a")
        await sync.trainer_starved(0)
        assert await sync.explorer_may_submit("a", 1)
        assert await sync.explorer_may_submit("a", 2)
        await sync.close()

    asyncio.run(body())


def test_a_side_that_moves_on_is_waited_for_longer_than_any_limit(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, "fixed", sync_timeout_s=0.2)
        sync.state.trainer_joined(0, 0)
        await sync.register_explorer("a")
        done = asyncio.ensure_future(sync.explorer_sync("a", 1, final=True))
        for step in range(1, 8):  # each within the limit, all of them far beyond it
            await asyncio.sleep(0.1)
            assert not done.done(), step
            sync.state.trainer_at_sync(step, 0)
            sync.state.trainer_running()
        with pytest.raises(TimeoutError, match="nobody has moved on"):
            await done
        await sync.close()

    asyncio.run(body())


def test_a_change_is_waited_for_and_not_asked_about(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, "fully_async")
        change = asyncio.ensure_future(sync.changed())
        await asyncio.sleep(0.05)
        assert not change.done()
        sync.notify()
        await asyncio.wait_for(change, 5.0)
        await sync.close()

    asyncio.run(body())

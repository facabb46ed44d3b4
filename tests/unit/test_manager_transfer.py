"""A broadcast over a real group: trainer rank 0 and two engines of one process."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import torch

from trinity_dask.cluster.rpc import ActorHandle
from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.engines.pool import WeightMismatch
from trinity_dask.models.actor.actor import EngineActor
from trinity_dask.models.protocol import EngineSpec, WeightReceipt, WeightUpdate
from trinity_dask.sync import transfer
from trinity_dask.sync.synchronizer import Synchronizer
from trinity_dask.weights.broadcast import Member, make_group, send, tensor_meta

pytestmark = pytest.mark.timeout(120)
SLOTS = ["engine-0", "engine-1"]


class Rank:
    """Trainer rank 0; its weights are those of its step."""

    step, group, lies = 0, None, 0

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        return [("w", torch.full((64, 3), float(self.step))), ("b", torch.arange(5.0))]

    async def weight_meta(self) -> Any:
        return tensor_meta(self.weights())

    async def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    async def open_weight_group(self, spec: Any) -> float | None:
        self.group = await asyncio.to_thread(make_group, spec, 0, True)
        return self.group.bytes_per_s

    async def close_weight_group(self) -> None:
        if self.group is not None:
            await asyncio.to_thread(self.group.close)

    async def vocab_size(self) -> int:
        return 32

    async def send_weights(self, update: WeightUpdate) -> WeightReceipt:
        digest = await asyncio.to_thread(
            send, self.group, self.weights(), update.meta, update.bucket_bytes
        )
        value = digest.value + self.lies
        return WeightReceipt(update.version, value, digest.n_bytes, 0.0, self.step)


class Pool:
    """Fake engines that stay."""

    losses = 0

    def __init__(self) -> None:
        self.actors = {slot: EngineActor(EngineSpec(slot, "fake", "")) for slot in SLOTS}
        self.on_reborn: Any = None

    def slots(self) -> list[str]:
        return SLOTS

    def handle(self, slot: str) -> ActorHandle:
        return ActorHandle(slot, "tcp://127.0.0.1:1", slot)

    def members(self, slots: list[str]) -> tuple[Member, ...]:
        return tuple(Member(slot, "1") for slot in slots)

    async def wait_present(self, timeout_s: float) -> None:
        assert timeout_s > 0

    async def look_for_lost(self) -> None:
        return None

    def took_weights(self, slots: list[str], version: int) -> None:
        assert set(slots) <= set(SLOTS)

    async def mark_ready(self, slots: list[str]) -> None:
        assert slots == SLOTS


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    rank, pool = Rank(), Pool()
    actors = {"rank": rank, **pool.actors}

    async def rpc(handle: ActorHandle, method: str, *args: Any, timeout: float) -> Any:
        return await asyncio.wait_for(getattr(actors[handle.key], method)(*args), timeout)

    monkeypatch.setattr(transfer, "rpc", rpc)

    def play(body: Any) -> None:
        async def main() -> None:
            for actor in pool.actors.values():
                await actor.prepare()
            cfg = SynchronizerConfig(sync_method="nccl", sync_style="fixed", probe_interval=1)
            sync = Synchronizer(cfg, str(tmp_path))
            sync.attach_trainer()
            sync.attach_explorer("e", pool, "gloo")  # type: ignore[arg-type]
            with pytest.raises(RuntimeError, match="no trainer rank is attached"):
                await sync.transfers.form_group("e")
            sync.set_trainer_rank0(ActorHandle("rank", "tcp://127.0.0.1:1", "trainer-0"))
            try:
                await body(sync, rank, pool)
            finally:
                await sync.detach_explorer("e")
                for actor in pool.actors.values():
                    await actor.close()

        asyncio.run(main())

    return play


@pytest.mark.parametrize(("interval", "due"), [(0, [1]), (1, [1, 2, 3, 4]), (3, [1, 4])])
def test_the_first_update_is_probed_whatever_the_interval(
    tmp_path: Any, interval: int, due: list[int]
) -> None:
    cfg = SynchronizerConfig(probe_interval=interval)
    transfers = Synchronizer(cfg, str(tmp_path)).transfers
    assert [n for n in range(1, 5) if transfers._probe_is_due()] == due


def test_the_trainer_s_call_brings_every_version_over_one_group(run: Any) -> None:
    async def body(sync: Any, rank: Rank, pool: Pool) -> None:
        metrics = await sync.initial_sync(0, 0)
        assert metrics["sync/bytes"] == 4 * (64 * 3 + 5)
        for step in (1, 2):
            rank.step = step
            both = sync.explorer_sync("e", step), sync.trainer_sync(step, step)
            assert await asyncio.gather(*both) == [step, step]
            assert {actor.model_version for actor in pool.actors.values()} == {step}
        assert sync.transfers.group("e").generation == 1
        assert sync.transfers.failed_attempts == 0
        await sync.trainer_stopped(2)
        assert await sync.explorer_sync("e", 3, final=True) == 2

    run(body)


def test_a_reborn_engine_is_labelled_with_the_step_whose_weights_it_got(run: Any) -> None:
    async def body(sync: Any, rank: Rank, pool: Pool) -> None:
        await sync.initial_sync(0, 0)
        rank.step = 3  # it trains on meanwhile
        await pool.on_reborn("engine-1")
        assert pool.actors["engine-1"].model_version == sync.metrics["sync/version"] == 3
        assert pool.actors["engine-0"].model_version == 0
        assert sync.transfers.group("e").generation == 2  # other members, another group

    run(body)


def test_weights_that_differ_are_not_sent_again_and_end_every_wait(run: Any) -> None:
    async def body(sync: Any, rank: Rank, pool: Pool) -> None:
        await sync.initial_sync(0, 0)
        rank.step, rank.lies = 1, 1
        both = sync.explorer_sync("e", 1), sync.trainer_sync(1, 1)
        explorer, trainer = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(trainer, WeightMismatch)
        assert "weight synchronisation failed: engine-0 holds version 1" in str(explorer)
        assert sync.transfers.failed_attempts == 0

    run(body)

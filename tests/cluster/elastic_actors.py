"""A run whose engines come and go while it trains; workers import this module.

The trainer's and the explorer's time passes by the clock; engines, groups, transfers and
versions are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass
from typing import Any, Optional

from sync_actors import TIMEOUT_S, ToyRank

from trinity_dask.cluster.actors import create_actor, release_actor
from trinity_dask.cluster.rpc import ActorHandle, rpc
from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.engines.pool import EnginePool
from trinity_dask.models.protocol import EngineSpec, SamplingParams
from trinity_dask.sync.synchronizer import Synchronizer


@dataclass
class Shape:
    method: str = "nccl"
    style: str = "fully_async"
    n_engines: int = 2
    train_s: float = 0.05
    max_restarts: int = 3


class ElasticHost:
    """An actor in the control slot: one trainer and one explorer that go on until told."""

    async def start(self, shape: Shape, job_dir: str, run_id: str) -> None:
        self.shape, self.run_id = shape, run_id
        self.stack = contextlib.AsyncExitStack()
        cfg = SynchronizerConfig(shape.method, shape.style, in_flight="abort")
        cfg.sync_timeout_s = TIMEOUT_S
        self.sync = Synchronizer(cfg, job_dir, run_id)
        ref = await create_actor(ToyRank, slot="trainer-0", key=f"{run_id}-r", timeout=TIMEOUT_S)
        self.stack.push_async_callback(release_actor, ref)
        self.rank: ActorHandle = ref.handle
        self.sync.attach_trainer()
        self.sync.set_trainer_rank0(self.rank)
        self.pool = EnginePool(
            [self.spec(f"engine-{i}") for i in range(shape.n_engines)],
            run_id,
            TIMEOUT_S,
            shape.max_restarts,
            spec_of=self.spec,
        )
        self.stack.push_async_callback(self.pool.close)
        await self.pool.start()
        self.sync.attach_explorer("explorer", self.pool)
        self.stack.push_async_callback(self.sync.detach_explorer, "explorer")
        await self.sync.initial_sync(0, 0)
        self.step = 0
        self.ending = asyncio.Event()
        self.work = [asyncio.ensure_future(w()) for w in (self.train, self.explore)]

    def spec(self, slot: str) -> Optional[EngineSpec]:
        return EngineSpec(slot, "fake", "", {})

    async def train(self) -> None:
        for step in itertools.count(1):
            if self.ending.is_set():
                break
            seconds = self.shape.train_s
            await rpc(self.rank, "train_step", step, seconds, timeout=TIMEOUT_S)
            self.step = step
            await self.sync.trainer_sync(step, step)
        await self.sync.trainer_stopped(self.step, self.step)

    async def explore(self) -> None:
        watch = asyncio.ensure_future(self.watch())
        ended = asyncio.ensure_future(self.ending.wait())
        await asyncio.wait({watch, ended}, return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await self.sync.explorer_sync("explorer", self.step, final=True)
        await self.sync.explorer_stopped("explorer")

    async def watch(self) -> None:
        while True:
            await self.sync.watch("explorer", 5.0)

    # what the test asks ---------------------------------------------------------------------
    async def facts(self) -> dict[str, Any]:
        for task in self.work:
            if task.done() and not self.ending.is_set():
                task.result()  # raises what ended it
                raise AssertionError("the run has ended")
        group = self.sync.transfers.group("explorer")
        return {
            "step": self.step,
            "version": self.sync.state.engine_version,
            "slots": self.pool.slots(),
            "ready": self.pool.n_ready,
            "restarts": self.pool.restarts,
            "failure": str(self.pool.failure),
            "generation": group.generation,
            "members": [member.slot for member in group.members],
            "failed": self.sync.transfers.failed_attempts,
        }

    async def engine(self, slot: str) -> dict[str, Any]:
        return await rpc(self.pool.handle(slot), "describe", timeout=TIMEOUT_S)

    async def first_token(self, slot: str) -> tuple[int, int]:
        """The version that the engine's first answer came from, and what the others served
        before it was asked. Waits until it serves."""
        async with asyncio.timeout(TIMEOUT_S):
            while slot not in self.pool._engines:
                await asyncio.sleep(0.01)
            handle = self.pool.handle(slot)
            served = self.sync.state.engine_version
            while True:
                try:
                    (answer,) = await rpc(
                        handle, "generate", [1], SamplingParams(), "first", timeout=TIMEOUT_S
                    )
                except RuntimeError:  # not prepared yet
                    await asyncio.sleep(0.01)
                else:
                    return int(answer.versions[0]), served

    async def kill_in_next_broadcast(self, slot: str) -> None:
        pid = (await self.engine(slot))["pid"]
        await rpc(self.rank, "kill_while_sending", pid, timeout=TIMEOUT_S)

    async def kill_reborn_in_their_broadcast(self, times: int) -> None:
        """The next ``times`` engines that are born again die while they get their weights."""
        bring, left = self.pool.on_reborn, itertools.count(times, -1)

        async def killing(slot: str) -> None:
            if next(left) > 0:
                await self.kill_in_next_broadcast(slot)
            await bring(slot)

        self.pool.on_reborn = killing

    async def finish(self) -> dict[str, Any]:
        """End, and say which version every engine holds."""
        self.ending.set()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*self.work)
        slots = self.pool.slots()
        versions = {slot: (await self.engine(slot))["model_version"] for slot in slots}
        return {"step": self.step, "versions": versions}

    async def close(self) -> None:
        await self.stack.aclose()

"""The sides of the synchronizer's cluster tests; workers import this module.

Trainer and explorers follow the protocol but take their time by the clock, as a batch of real
work would; weights, files, groups, engines and checksums are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import torch

from trinity_dask.cluster.actors import create_actor, release_actor
from trinity_dask.cluster.rpc import ActorHandle, rpc
from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.engines.pool import EnginePool
from trinity_dask.models.fake_engine import LOGPROB
from trinity_dask.models.protocol import (
    EngineSpec,
    TensorMeta,
    WeightGroupSpec,
    WeightReceipt,
    WeightUpdate,
)
from trinity_dask.sync.synchronizer import Synchronizer
from trinity_dask.trainer.ranks.rank import TrainerRank
from trinity_dask.weights.broadcast import make_group, send, tensor_meta
from trinity_dask.weights.checksum import checksum
from trinity_dask.weights.files import write_safetensors

TIMEOUT_S = 150.0


def weights_of(step: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    shapes = {"embed.weight": (32, 8), "layer.weight": (64, 8)}
    return [(n, torch.randn(shape, generator=generator)) for n, shape in shapes.items()]


class ToyRank:
    """Rank 0 without a model: its weights are those of its step."""

    def __init__(self) -> None:
        self.step = 0
        self.group: Any = None
        self.sent: list[tuple[int, int]] = []  # (version asked for, step of the weights)
        self.victim = 0  # the process to kill in the next broadcast
        self._thread = ThreadPoolExecutor(1)

    async def _run(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    free_port = TrainerRank.free_port

    async def is_alive(self) -> bool:
        return True

    async def pid(self) -> int:
        return os.getpid()

    async def train_step(self, step: int, seconds: float) -> None:
        def work() -> None:
            import time

            time.sleep(seconds)  # the work itself
            self.step = step

        await self._run(work)

    async def vocab_size(self) -> int:
        return 32

    async def weight_meta(self) -> tuple[TensorMeta, ...]:
        return tensor_meta(weights_of(0))

    async def open_weight_group(self, spec: WeightGroupSpec) -> None:
        await asyncio.to_thread(self._leave)
        self.group = await asyncio.to_thread(make_group, spec, 0, True)

    async def close_weight_group(self) -> None:
        await asyncio.to_thread(self._leave)

    def _leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.close()

    async def send_weights(self, update: WeightUpdate) -> WeightReceipt:
        def work() -> WeightReceipt:
            named = self._killing(weights_of(self.step))
            digest = send(self.group, named, update.meta, update.bucket_bytes)
            self.sent.append((update.version, self.step))
            return WeightReceipt(update.version, digest.value, digest.n_bytes, 0.0, self.step)

        return await self._run(work)

    async def kill_while_sending(self, pid: int) -> None:
        self.victim = pid

    def _killing(self, named: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(named):
            if number == 1 and self.victim:  # everybody waits for these bytes
                os.kill(self.victim, signal.SIGKILL)
                self.victim = 0
            yield pair

    async def write_weights(self, path: str, version: int) -> WeightReceipt:
        def work() -> WeightReceipt:
            digest = write_safetensors(path, weights_of(self.step))
            self.sent.append((version, self.step))
            return WeightReceipt(version, digest.value, digest.n_bytes, 0.0, self.step)

        return await self._run(work)

    async def probe_logprobs(self, sequences: list[list[int]]) -> list[np.ndarray]:
        return [np.full(len(ids) - 1, LOGPROB, dtype=np.float32) for ids in sequences]

    async def story(self) -> list[tuple[int, int]]:
        return self.sent


@dataclass
class Plan:
    """One scenario; seconds are those of one step."""

    style: str = "fixed"
    method: str = "nccl"
    interval: int = 1
    offset: int = 0
    train_steps: int = 8
    train_s: list[float] = field(default_factory=lambda: [0.02])
    explorers: dict[str, tuple[int, float]] = field(default_factory=dict)  # steps, seconds
    engines: dict[str, list[str]] = field(default_factory=dict)  # slots of each explorer
    kill_engine: Optional[str] = None  # as soon as the trainer has begun its third step


class SyncHost:
    """An actor in the control slot that plays a plan and tells how it went."""

    async def play(self, plan: Plan, job_dir: str, run_id: str) -> dict[str, Any]:
        async with contextlib.AsyncExitStack() as stack:
            stage = Stage(plan, job_dir, run_id)
            await stage.build(stack)
            async with asyncio.timeout(TIMEOUT_S):
                await stage.run()
            return await stage.outcome()


class Stage:
    def __init__(self, plan: Plan, job_dir: str, run_id: str) -> None:
        self.plan, self.job_dir, self.run_id = plan, job_dir, run_id
        cfg = SynchronizerConfig(plan.method, plan.style, plan.interval, plan.offset)
        cfg.sync_timeout_s = TIMEOUT_S
        self.cfg = cfg
        self.sync = Synchronizer(cfg, job_dir, run_id)
        self.pools: dict[str, EnginePool] = {}
        self.seen: dict[str, list[int]] = {name: [] for name in plan.explorers}
        self.steps = {"trainer": 0, **dict.fromkeys(plan.explorers, 0)}
        self.done = asyncio.Event()

    async def build(self, stack: contextlib.AsyncExitStack) -> None:
        plan = self.plan
        ref = await create_actor(
            ToyRank, slot="trainer-0", key=f"{self.run_id}-rank", timeout=TIMEOUT_S
        )
        stack.push_async_callback(release_actor, ref)
        self.rank: ActorHandle = ref.handle
        self.sync.attach_trainer()
        self.sync.set_trainer_rank0(self.rank)
        for name, slots in plan.engines.items():
            await self._build_engines(stack, name, slots)
        await self.sync.initial_sync(0, 0)
        for name in plan.engines:
            await self.sync.register_explorer(name)

    async def _build_engines(
        self, stack: contextlib.AsyncExitStack, name: str, slots: list[str]
    ) -> None:
        specs = [EngineSpec(slot, "fake", "", {}) for slot in slots]
        pool = self.pools[name] = EnginePool(specs, f"{self.run_id}-{name}", TIMEOUT_S)
        stack.push_async_callback(pool.close)
        await pool.start()
        self.sync.attach_explorer(name, pool)
        stack.push_async_callback(self.sync.detach_explorer, name)

    async def run(self) -> None:
        sides = [self.explore(name) for name in self.plan.explorers]
        extra = [self.kill()] if self.plan.kill_engine else []
        async with asyncio.TaskGroup() as group:
            for side in (self.train(), *sides, *extra):
                group.create_task(side)

    # the trainer --------------------------------------------------------------------------
    async def train(self) -> None:
        times = self.plan.train_s
        for step in range(1, self.plan.train_steps + 1):
            seconds = times[(step - 1) % len(times)]
            await rpc(self.rank, "train_step", step, seconds, timeout=TIMEOUT_S)
            self.steps["trainer"] = step
            await self.sync.trainer_sync(step, step)
        await self.sync.trainer_stopped(self.plan.train_steps, self.plan.train_steps)

    # the explorers ------------------------------------------------------------------------
    async def explore(self, name: str) -> None:
        side = self.sync
        watcher = asyncio.ensure_future(self.watch(name))
        n_steps, seconds = self.plan.explorers[name]
        for step in range(1, n_steps + 1):
            await asyncio.sleep(seconds)  # the batch
            self.steps[name] = step
            if await side.explorer_should_sync(name, step):
                self.seen[name].append(await side.explorer_sync(name, step))
        self.seen[name].append(await side.explorer_sync(name, n_steps, final=True))
        await side.explorer_stopped(name)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)

    async def watch(self, name: str) -> None:
        while self.plan.style == "fully_async":
            self.seen[name].append(await self.sync.watch(name))

    # a loss -------------------------------------------------------------------------------
    async def kill(self) -> None:
        slot = str(self.plan.kill_engine)
        name = next(n for n, slots in self.plan.engines.items() if slot in slots)
        while self.steps["trainer"] < 2:
            await asyncio.sleep(0.01)
        pool = self.pools[name]
        facts = await rpc(pool.handle(slot), "describe", timeout=TIMEOUT_S)
        os.kill(facts["pid"], signal.SIGKILL)
        while pool.restarts < 1 or pool.n_ready < len(self.plan.engines[name]):
            await asyncio.sleep(0.01)
        self.reborn = await rpc(pool.handle(slot), "describe", timeout=TIMEOUT_S)

    async def outcome(self) -> dict[str, Any]:
        state = self.sync.state
        engines = {
            slot: (await rpc(pool.handle(slot), "describe", timeout=TIMEOUT_S))["model_version"]
            for pool in self.pools.values()
            for slot in pool.slots()
        }
        return {
            "steps": self.steps,
            "seen": self.seen,
            "sent": await rpc(self.rank, "story", timeout=TIMEOUT_S),
            "engines": engines,
            "statuses": {s.value: n for s, n in state.explorer_status_counts.items()},
            "trainer": state.trainer.value,
            "files": list(self.sync.transfers.shelf.versions),
            "reborn": getattr(self, "reborn", None),
            "timeouts": self.sync.timeouts,
        }


def expected_checksum(step: int) -> int:
    return checksum(weights_of(step))


def spread(values: Iterable[int]) -> bool:
    ordered = list(values)
    return ordered == sorted(ordered)

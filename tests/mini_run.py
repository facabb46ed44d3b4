"""A run in one process: real explorer, coordinator, synchronizer, buffer and trainer loop.

Sleeps stand for what Dask, engines and ranks do: a task takes a time, a train step takes one, a
version travels in one. Everything that decides who waits for whom is the real thing.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from trinity_dask.aio import all_or_first_error
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.config.schema import Config, OperatorConfig, TasksetConfig
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import encode
from trinity_dask.explorer.coordinator import Coordinator
from trinity_dask.explorer.loop import ExploreLoop
from trinity_dask.explorer.schedule.tasks import BatchResult, Counts, Status
from trinity_dask.launcher.accounts import Accounts, lineage_accounts
from trinity_dask.launcher.stages import begun_batches
from trinity_dask.monitor.monitor import Monitor
from trinity_dask.sync.synchronizer import Synchronizer
from trinity_dask.trainer.checkpoints.checkpoint import write_checkpoint
from trinity_dask.trainer.ranks.rank import RankPool
from trinity_dask.trainer.trainer import Trainer

HELD_S = 1.0
BEAT_S = 0.02
SIGNAL = signal.SIGUSR1


class LoopHeld(BaseException):
    """A callback has held the loop. Not an ``Exception``: nothing that is tested takes it for its
    own."""


class HoldWatch:
    """Raises :class:`LoopHeld` inside whatever has held the loop for ``HELD_S`` of CPU time.

    CPU time, so it says the same on a busy machine; from a thread, so a loop that spins for ever
    ends the test at once. On the main thread's loop.
    """

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._loop_thread = threading.get_ident()
        self._beat = time.clock_gettime(self._clock)
        self._over = threading.Event()
        self._before = signal.signal(SIGNAL, self._on_signal)
        self._beats = asyncio.ensure_future(self._beating())
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    async def _beating(self) -> None:
        while True:
            self._beat = time.clock_gettime(self._clock)
            await asyncio.sleep(BEAT_S)

    def _held_s(self) -> float:
        return time.clock_gettime(self._clock) - self._beat

    def _look(self) -> None:
        while not self._over.wait(BEAT_S):
            if self._held_s() > HELD_S:
                signal.pthread_kill(self._loop_thread, SIGNAL)

    def _on_signal(self, *_: object) -> None:
        if (held_s := self._held_s()) > HELD_S:
            self._beat = time.clock_gettime(self._clock)  # once for each hold
            raise LoopHeld(f"a callback has held the loop for {held_s:.1f} s of CPU time")

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._beats.cancel()
        signal.signal(SIGNAL, self._before)


@dataclass
class Mini:
    """What a run is made of; seconds are of one task, one step, one version's way."""

    job: Path
    style: str = "fixed"
    method: str = "memory"
    staleness: int | None = None
    train_rows: int | None = None
    explorers: tuple[str, ...] = ("explorer",)
    steps: int = 6  # batches of each explorer
    batch: int = 2
    repeat: int = 2
    task_s: float = 0.002
    eval_s: float = 0.002
    step_s: float = 0.002
    weights_s: float = 0.001
    filtered: bool = False  # groups of equal rewards, which go, and runs that fail
    eval_interval: int = 2
    sinks: list[str] = field(default_factory=lambda: ["jsonl"])

    def config(self, name: str) -> Config:
        """Of the side ``name``."""
        alone = self.explorers == ("explorer",)
        cfg = Config(mode="both" if alone else "explore", job_dir=str(self.job))
        cfg.explorer.name = name
        cfg.algorithm.repeat_times = self.repeat
        cfg.buffer.batch_size, cfg.buffer.total_steps = self.batch, self.steps
        cfg.buffer.train_batch_size = self.train_rows
        source = cfg.buffer.explorer_input
        source.taskset = TasksetConfig(path=self._rows("train"), workflow="simple_workflow")
        source.eval_tasksets = [
            TasksetConfig(name="held_out", path=self._rows("eval"), workflow="simple_workflow")
        ]
        store = cfg.buffer.trainer_input.experience_buffer
        store.path, store.max_read_timeout_s = str(self.job / "store"), 30.0
        cfg.explorer.eval_interval = self.eval_interval
        cfg.explorer.max_inflight_batches = 2
        cfg.trainer.save_interval, cfg.trainer.save_hf_checkpoint = 5, "never"
        cfg.trainer.max_empty_batches = 1000
        cfg.cluster.trainer.n_workers = 1
        sync = cfg.synchronizer
        sync.sync_method, sync.sync_style, sync.max_staleness = (
            self.method,
            self.style,
            self.staleness,
        )
        sync.probe_interval, sync.meet_timeout_s = 0, 30.0
        cfg.monitor.sinks = self.sinks
        if self.filtered:
            cfg.buffer.operators = [
                OperatorConfig(name="reward_std_filter", args={"threshold": 0.0})
            ]
        return cfg

    def _rows(self, name: str) -> str:
        path = self.job / f"{name}.jsonl"
        if not path.exists():
            self.job.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps({"prompt": f"{name}{i}"}) + "\n" for i in range(7)))
        return str(path)


class SleepingScheduler:
    """In place of Dask: every task of a batch is done after a time."""

    watch = None

    def __init__(self, mini: Mini, sync: Synchronizer, name: str) -> None:
        self._mini, self._sync, self._name = mini, sync, name
        self._batches: dict[Any, asyncio.Task[BatchResult]] = {}
        self.state = SimpleNamespace(workers=(), pending=())

    def schedule(self, tasks: Sequence[Any], batch_id: Any) -> None:
        self._batches[batch_id] = asyncio.ensure_future(self._run(list(tasks), batch_id))

    async def _run(self, tasks: list[Any], batch_id: Any) -> BatchResult:
        mini = self._mini
        version = self._sync.state.explorers[self._name].version
        is_eval = "/" in str(batch_id)
        await asyncio.sleep(mini.eval_s if is_eval else mini.task_s)
        statuses, payloads, failed = [], [], 0
        for number, _ in enumerate(tasks):
            flat = mini.filtered and number % 2 == 1
            runs = range(mini.repeat - (mini.filtered and number == 0))
            failed += mini.repeat - len(runs)
            made = [
                Experience(
                    tokens=np.array([1, 2, 3]),
                    prompt_length=1,
                    logprobs=np.zeros(2, np.float32),
                    versions=np.full(2, max(version, 0)),
                    reward=float(0 if flat else r),
                    eid=EID(batch_id, number, r),
                )
                for r in runs
            ]
            payloads.append(encode(made, {}))
            statuses.append(Status(len(runs), mini.repeat, [{"reward": 0.5}]))
        total = len(tasks) * mini.repeat
        return BatchResult(batch_id, statuses, payloads, Counts(total, total - failed, failed), {})

    async def get_results(self, batch_id: Any, **_: Any) -> BatchResult:
        if (work := self._batches.get(batch_id)) is None:
            return BatchResult(batch_id, [], [], Counts(), {})
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled():
                return BatchResult(batch_id, [], [], Counts(), {})
            raise
        finally:
            if work.done():
                self._batches.pop(batch_id, None)

    async def abort_batch(self, batch_id: Any, *_: Any, **__: Any) -> Counts:
        if (work := self._batches.pop(batch_id, None)) is not None:
            work.cancel()
        return Counts()

    async def stop(self) -> None:
        for work in self._batches.values():
            work.cancel()

    def status(self) -> dict[str, Any]:
        return {"in_flight": len(self._batches)}


class SleepingRank(RankPool):
    """In place of the ranks: a step takes a time, a checkpoint holds the trainer's state only."""

    def __init__(self, cfg: Config, mini: Mini) -> None:
        super().__init__(cfg, "mini")
        self._mini = mini

    handles = ()  # type: ignore[assignment]
    lost = ()  # type: ignore[assignment]

    async def start(self, model_path: str, checkpoint: str | None) -> dict[str, Any]:
        return {}

    async def call_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        await asyncio.sleep(self._mini.step_s)
        return [{"tokens": 4.0, "actor/grad_norm": 1.0, "actor/updates": 1.0}]

    async def call(self, rank: int, method: str, *args: Any, timeout_s: float) -> Any:
        job, step, state, _ = args
        return str(
            await asyncio.to_thread(write_checkpoint, job, step, state, lambda _: None, keep=2)
        )

    async def close(self) -> None:
        pass


class SleepingPool:
    """In place of the engines."""

    on_reborn = None

    def slots(self) -> list[str]:
        return []

    async def mark_ready(self, slots: list[str]) -> None:
        pass


@dataclass
class Side:
    mini: Mini
    explorer: ExploreLoop
    coordinator: Coordinator
    monitor: Monitor


class MiniRun:
    """One incarnation: ``async with MiniRun(mini) as run: await run.work()``."""

    def __init__(self, mini: Mini, present: Sequence[str] | None = None) -> None:
        self.mini, self.present = mini, tuple(present or mini.explorers)
        self.sides: list[Side] = []
        self._writing = set(self.present)
        self.watch: HoldWatch | None = None

    async def __aenter__(self) -> MiniRun:
        self.watch = HoldWatch()
        try:
            return await self._start()
        except BaseException:
            self.watch.stop()
            raise

    async def _start(self) -> MiniRun:
        mini, cfg = self.mini, self.mini.config(self.present[0])
        self.buffer = ExperienceBuffer(cfg.buffer.trainer_input.experience_buffer)
        self.sync = sync = Synchronizer(cfg.synchronizer, str(mini.job), f"mini-{id(self)}")
        self._replace_weights()
        self.monitor = Monitor(cfg.monitor, str(mini.job), "trainer")
        rank = SleepingRank(cfg, mini)
        self.trainer = Trainer(cfg, "mini", self.buffer, sync, self.monitor, rank)
        self.trainer._announce_rank0 = lambda: None  # type: ignore[method-assign]
        await self.trainer.prepare()
        rows = cfg.buffer.train_batch_size
        sync.attach_trainer(
            lambda: self.buffer.has_lease(rows), None, lambda: self.buffer.writes_blocked
        )
        for name in self.present:
            sync.attach_explorer(name, SleepingPool())  # type: ignore[arg-type]
        begun = begun_batches(await self.buffer.manifests())
        await sync.initial_sync(self.trainer.step, self.trainer.progress, begun)
        for name in self.present:
            self.sides.append(await self._side(name))
        return self

    def _replace_weights(self) -> None:
        transfers = self.sync.transfers

        async def publish(version: int) -> Any:
            import torch

            await asyncio.sleep(self.mini.weights_s)
            found = transfers.shelf.get(version)
            return found or await transfers.put(version, {"w": torch.full((4,), float(version))})

        async def load(name: str, version: int) -> None:
            await asyncio.sleep(self.mini.weights_s)

        transfers.publish = publish  # type: ignore[method-assign]
        transfers.load = load  # type: ignore[method-assign]

    async def _side(self, name: str) -> Side:
        cfg = self.mini.config(name)
        coordinator = Coordinator(cfg, self.buffer)
        scheduler: Any = SleepingScheduler(self.mini, self.sync, name)
        coordinator._scheduler = scheduler
        await coordinator.prepare()

        async def end_writes() -> None:
            self._writing.discard(name)
            if not self._writing:
                await self.buffer.close_writes()

        monitor = Monitor(cfg.monitor, str(self.mini.job), name)
        explorer = ExploreLoop(
            cfg, coordinator, self.sync, self.buffer, monitor, end_writes=end_writes
        )
        await explorer.prepare()
        return Side(self.mini, explorer, coordinator, monitor)

    async def work(self) -> None:
        """Both sides to their ends, as a stage does it."""

        async def train() -> None:
            await self.trainer.train()
            for side in self.sides:
                await side.explorer.finish()

        await all_or_first_error(train(), *(side.explorer.explore() for side in self.sides))

    async def stop(self) -> None:
        for side in self.sides:
            await side.explorer.stop()
        await self.trainer.stop()

    async def accounts(self) -> Accounts:
        stats = await self.buffer.stats()
        return lineage_accounts(stats, self.trainer.trained_rows, self.trainer.skipped_rows)

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._close()
        finally:
            assert self.watch is not None
            self.watch.stop()

    async def _close(self) -> None:
        for side in self.sides:
            await side.coordinator.shutdown()
            await asyncio.to_thread(side.monitor.close)
        await self.trainer.close()
        await asyncio.to_thread(self.monitor.close)
        await self.sync.close()

"""One stage of a job: build its parts, run them, check the accounts, take them down.

Invariant: parts are taken down in the reverse order in which they were built, each within a
deadline, whatever happened before; the first error of any part ends the stage with that
error; a stage that ends without one has balanced accounts. Which parts there are depends on
the mode; every mode that validation lets through is in :data:`STAGES`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

from trinity_dask.aio import Spans, all_or_first_error, ended, unless_set
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.buffer.store.manifest import Manifest
from trinity_dask.cluster.actors import release_actor
from trinity_dask.cluster.context import freeze_loaded
from trinity_dask.cluster.specs import away_s
from trinity_dask.config import save as save_config
from trinity_dask.config.schema import Config
from trinity_dask.engines.pool import CREATE_TIMEOUT_S, EnginePool
from trinity_dask.explorer.batches import DEFAULT_EXPLORER
from trinity_dask.explorer.coordinator import Coordinator
from trinity_dask.explorer.engine_weights import EngineWeights
from trinity_dask.explorer.loop import ExploreLoop
from trinity_dask.launcher.accounts import lineage_accounts, require_balanced
from trinity_dask.launcher.job_files import config_file
from trinity_dask.launcher.meeting import TRAINER, Meeting, PeerLost, join, local_part
from trinity_dask.launcher.specs import (
    engine_specs,
    joining_spec,
    stage_model_path,
)
from trinity_dask.launcher.status import End, Reporter, StatusBoard, end_of
from trinity_dask.monitor.events import EventSink, RunEvents
from trinity_dask.monitor.monitor import Monitor
from trinity_dask.sync.synchronizer import Synchronizer
from trinity_dask.trainer.trainer import Trainer

log = logging.getLogger("trinity_dask.stage")

CLOSE_TIMEOUT_S = 60.0
GONE_GRACE_S = 60.0
BENCHMARK = "benchmark"  # a role
Work = Sequence[Callable[[], Coroutine[Any, Any, Any]]]
SETTLE_S = 10.0  # accounts of a job whose other side is at work


class StageRunner:
    """Runs one validated stage config on the control worker's event loop.

    Subclasses say which parts a mode has. ``request_stop(reason)`` asks the launcher to end
    the job as interrupted; ``guard()`` raises where this launch may not write any more.
    """

    def __init__(
        self,
        cfg: Config,
        board: StatusBoard,
        run_id: str,
        previous: Optional[Config] = None,
        request_stop: Optional[Callable[[str], Awaitable[None]]] = None,
        events: Optional[RunEvents] = None,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.cfg = cfg
        self.guard = guard
        self.board = board
        self.run_id = f"{run_id}-{cfg.stage_name}" if cfg.stage_name else run_id
        self.previous = previous
        self.request_stop = request_stop
        self.events = events or RunEvents(run_id)
        self.job_dir = Path(str(cfg.job_dir))
        self.explorer: Optional[ExploreLoop] = None
        self.trainer: Optional[Trainer] = None
        self.buffer: Optional[ExperienceBuffer] = None
        self.synchronizer: Optional[Synchronizer] = None
        self.pool: Optional[EnginePool] = None
        self.coordinator: Optional[Coordinator] = None
        self.meeting: Optional[Meeting] = None
        self._stop = asyncio.Event()
        groups = (cfg.cluster.trainer, cfg.cluster.rollout)
        self._backend = "nccl" if any(group.gpus_per_worker for group in groups) else "gloo"

    async def run(self) -> None:
        """Run the stage to its end. Raises the first error of any part."""
        self.job_dir.mkdir(parents=True, exist_ok=True)
        self.cfg.model.model_path = stage_model_path(self.cfg, self.previous)
        await asyncio.to_thread(save_config, self.cfg, config_file(self.cfg))
        alone = self.cfg.mode == "explore" and not self.cfg.synchronizer.peer_timeout_s
        if alone and not (self.job_dir / "config.yaml").exists():
            await asyncio.to_thread(save_config, self.cfg, self.job_dir / "config.yaml")
        async with AsyncExitStack() as stack:
            built = await unless_set(self._stop, self.build(stack))
            if built is None:  # there is nothing to save yet
                return
            work, guards = built
            reporter = Reporter(self, self.board)
            stack.push_async_callback(reporter.close)
            reporter.start()
            if self._stop.is_set():
                await self.stop()
            await self._until_done(reporter, work, guards)
            await reporter.refresh()
            await self._check_accounts()

    async def stop(self) -> None:
        """End after the current train step, with the state saved."""
        self._stop.set()
        for part in (self.explorer, self.trainer):
            if part is not None:
                await part.stop()

    async def build(self, stack: AsyncExitStack) -> tuple[Work, Work]:
        """Make the parts; ``stack`` takes them down.

        Returns:
            What is to be done, all of it; and what ends the stage by an error meanwhile.
        """
        raise NotImplementedError

    async def _until_done(
        self,
        reporter: Reporter,
        work: Work,
        guards: Work,
    ) -> None:
        """Wait for all of ``work``; the first error (of it, of a guard, of the engines or of the
        accounts) ends the rest."""
        parts = {asyncio.ensure_future(each()) for each in work}
        watched = {asyncio.ensure_future(each()) for each in guards}
        everything: set[asyncio.Future[Any]] = {*parts, *watched, asyncio.shield(reporter.failed)}
        if self.pool is not None:
            everything.add(asyncio.ensure_future(self.pool.wait_failed()))
        waiting = everything
        try:
            while waiting & parts:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for part in done:
                    part.result()
        finally:
            await ended(everything)

    # parts ------------------------------------------------------------------------------
    def _monitor(self, stack: AsyncExitStack, role: str) -> Monitor:
        monitor = Monitor(
            self.cfg.monitor, str(self.job_dir), role, self.cfg.name, asdict(self.cfg)
        )
        monitor.add_sink("dashboard", EventSink(self.events, role, monitor.incarnation))
        stack.push_async_callback(asyncio.to_thread, monitor.close)
        return monitor

    async def _make_part(self, stack: AsyncExitStack, cls: type, *args: Any) -> Any:
        """A Dask actor on this worker that lives as long as the stage; its instance."""
        key = f"{self.run_id}-{cls.__name__.lower()}"
        instance, ref = await local_part(cls, *args, key=key)
        stack.push_async_callback(release_actor, ref)
        return instance

    async def _meet(self, stack: AsyncExitStack, member: str) -> Meeting:
        """Take part in the job as ``member``; leaving tells the others how this side ended."""
        meeting = await join(self.cfg, member, self.run_id)

        async def leave(
            kind: Optional[type[BaseException]],
            error: Optional[BaseException],
            trace: Optional[TracebackType],
        ) -> None:
            await meeting.leave(member, end_of(error, self._stop.is_set()))

        stack.push_async_exit(leave)
        self.meeting, self.buffer, self.synchronizer = meeting, meeting.buffer, meeting.synchronizer
        self._listen(stack, meeting.synchronizer.spans, meeting.buffer.spans)
        return meeting

    def _listen(self, stack: AsyncExitStack, *spans: Spans) -> None:
        """Waits and transfers are told of, as long as the stage lasts."""
        for each in spans:
            each.listeners.append(self.events.span)
            stack.callback(each.listeners.remove, self.events.span)

    def _attach_trainer(self) -> None:
        assert self.synchronizer is not None
        assert self.buffer is not None
        assert self.trainer is not None
        buffer, rows = self.buffer, self.cfg.buffer.train_batch_size
        self.synchronizer.attach_trainer(
            lambda: buffer.has_lease(rows), self.trainer.ensure_ranks, lambda: buffer.writes_blocked
        )

    def _make_engines(self, stack: AsyncExitStack) -> EnginePool:
        engine = self.cfg.explorer.rollout_model
        self.pool = EnginePool(
            engine_specs(self.cfg),
            self.run_id,
            engine.prepare_timeout_s,
            spec_of=partial(joining_spec, self.cfg),
            rejoin_timeout_s=away_s(self.cfg.cluster, CREATE_TIMEOUT_S),
        )
        stack.push_async_callback(bounded, self.pool.close, "engines")
        return self.pool

    def _attach_explorer(self, stack: AsyncExitStack) -> None:
        assert self.pool is not None
        assert self.synchronizer is not None
        name = self.cfg.explorer.name
        self.synchronizer.attach_explorer(name, self.pool, self._backend)
        leave = partial(self.synchronizer.detach_explorer, name)
        stack.push_async_callback(bounded, leave, "weight group")

    async def _make_explorer(
        self,
        stack: AsyncExitStack,
        role: str,
        end_writes: Optional[Callable[[], Awaitable[None]]] = None,
    ) -> ExploreLoop:
        assert self.pool is not None
        self.coordinator = Coordinator(self.cfg, self.buffer, run_id=self.run_id, guard=self.guard)
        stack.push_async_callback(bounded, self.coordinator.shutdown, "coordinator")
        await self.coordinator.prepare()
        load_s = self.cfg.explorer.rollout_model.prepare_timeout_s
        self.explorer = ExploreLoop(
            self.cfg,
            self.coordinator,
            self.synchronizer,
            self.buffer,
            self._monitor(stack, role),
            weights=EngineWeights(self.pool, str(self.job_dir), load_s, self._backend),
            end_writes=end_writes,
        )
        await self.explorer.prepare()
        freeze_loaded()
        return self.explorer

    # accounts ---------------------------------------------------------------------------
    async def _check_accounts(self) -> None:
        """The other side may be between two steps of its books, so they get a moment."""
        accounts = await self.accounts()
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while accounts is not None and accounts.errors() and self.meeting is not None:
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.1)
            accounts = await self.accounts()
        if accounts is not None:
            await self.board.update(accounts=accounts.as_dict())
            require_balanced(accounts)

    async def accounts(self) -> Any:
        """The lineage's accounts now, or None for a stage without an explorer."""
        if self.buffer is None:
            return None
        stats = await self.buffer.stats()
        trainer = self.trainer  # whose rows they are; of a lone explorer, its meeting's
        if trainer is None and self.meeting is not None:
            trainer = self.meeting.trainer
        trained = (trainer.trained_rows, trainer.skipped_rows) if trainer else (0, 0)
        return lineage_accounts(stats, *trained)


async def bounded(close: Any, what: str) -> None:
    """``close()`` within its deadline; a failure is logged and the teardown goes on."""
    try:
        await asyncio.wait_for(close(), CLOSE_TIMEOUT_S)
    except Exception as error:
        log.warning("closing the %s: %s: %s", what, type(error).__name__, error)


def begun_batches(manifests: Iterable[Manifest]) -> dict[str, int]:
    """How many batches each explorer has begun, as the committed ones tell."""
    begun = dict[str, int]()
    for meta in (manifest.meta for manifest in manifests):
        if "step" in meta:
            name = str(meta.get("explorer", DEFAULT_EXPLORER))
            begun[name] = max(begun.get(name, 0), int(meta["step"]))
    return begun


class BothStage(StageRunner):
    """Explorer and trainer in one run: modes ``both`` and ``colocate``.

    Neither side starts before engines and trainer hold the same weights. ``colocate`` differs in
    nothing but its validation, its sync method and the device that its workers share.
    """

    async def build(self, stack: AsyncExitStack) -> tuple[Work, Work]:
        await self.board.update(message="starting engines and trainer")
        store = self.cfg.buffer.trainer_input.experience_buffer
        self.buffer = await self._make_part(stack, ExperienceBuffer, store)
        self.synchronizer = synchronizer = await self._make_part(
            stack, Synchronizer, self.cfg.synchronizer, str(self.job_dir), self.run_id
        )
        self._listen(stack, synchronizer.spans, self.buffer.spans)
        monitor = self._monitor(stack, self.cfg.trainer.name)
        self.trainer = trainer = Trainer(
            self.cfg, self.run_id, self.buffer, self.synchronizer, monitor
        )
        stack.push_async_callback(bounded, trainer.close, "trainer")
        self._listen(stack, trainer.spans)
        pool = self._make_engines(stack)
        self._attach_trainer()
        self._attach_explorer(stack)
        await all_or_first_error(trainer.prepare(), pool.start())
        await self.board.update(message="sending the first weights")
        begun = begun_batches(await self.buffer.manifests())
        metrics = await synchronizer.initial_sync(trainer.step, trainer.progress, begun)
        log.info("first weights: version %d, %s", trainer.step, metrics)
        explorer = await self._make_explorer(stack, self.cfg.explorer.name)
        await self.board.update(message="")

        async def train() -> None:
            await trainer.train()
            # nobody will consume further batches; the explorer only finishes its last eval
            await explorer.finish()

        return [train, explorer.explore], []


class ExploreStage(StageRunner):
    """Mode ``explore``: alone, or beside a trainer (and explorers) that were started elsewhere.

    With a trainer, no rollout starts before the engines hold its weights; when it ends, this
    explorer takes its last weights, evaluates them and ends too, and when it fails or is
    interrupted this explorer does the same. Alone, batches are stored for a later trainer.
    """

    async def build(self, stack: AsyncExitStack) -> tuple[Work, Work]:
        if self.cfg.synchronizer.peer_timeout_s:
            await self._build_with_trainer(stack, self.cfg.synchronizer.peer_timeout_s)
        else:
            await self._build_alone(stack)
        await self.board.update(message="")
        assert self.explorer is not None
        guards = [] if self.meeting is None else [partial(self._follow_trainer, self.meeting)]
        return [self.explorer.explore], guards

    async def _build_alone(self, stack: AsyncExitStack) -> None:
        await self.board.update(message="starting engines")
        store = self.cfg.buffer.trainer_input.experience_buffer
        unbounded = replace(store, capacity_batches=0)  # nobody makes room
        self.buffer = buffer = await self._make_part(stack, ExperienceBuffer, unbounded)
        await buffer.prepare()
        pool = self._make_engines(stack)
        await pool.start()
        await pool.mark_ready(pool.slots())
        await self._make_explorer(stack, self.cfg.explorer.name)

    async def _build_with_trainer(self, stack: AsyncExitStack, timeout_s: float) -> None:
        name = self.cfg.explorer.name
        meeting = await self._meet(stack, name)
        pool = self._make_engines(stack)
        self._attach_explorer(stack)
        stack.push_async_callback(meeting.synchronizer.explorer_stopped, name)
        message = "starting engines"
        if meeting.trainer is None:
            message += f", waiting for the trainer of {self.cfg.name}"
        await self.board.update(message=message)
        await all_or_first_error(pool.start(), meeting.wait_trainer(timeout_s))
        await self.board.update(message="taking the first weights")
        await meeting.synchronizer.admit(name)
        await self._make_explorer(stack, name, partial(meeting.writes_end, name))
        meeting.started(name)

    async def _follow_trainer(self, meeting: Meeting) -> None:
        """End with the trainer, the way it ended."""
        assert self.explorer is not None
        end = await meeting.wait_trainer_end()
        if end.outcome == "failed":
            raise PeerLost(f"the trainer of {self.cfg.name} failed: {end.message}")
        if end.outcome == "interrupted" and self.request_stop is not None:
            await self.request_stop("the trainer was interrupted; state saved")
        else:
            await self.explorer.finish()


class TrainStage(StageRunner):
    """Mode ``train``: from a file or a store, or beside explorers that were started elsewhere.

    A trainer that has explorers stays until the last of them is gone, since they take its final
    weights; it ends with them when the last one fails or is interrupted.
    """

    async def build(self, stack: AsyncExitStack) -> tuple[Work, Work]:
        await self.board.update(message="starting the trainer")
        meeting = None
        if self.cfg.synchronizer.peer_timeout_s:
            meeting = await self._meet(stack, TRAINER)
        monitor = self._monitor(stack, self.cfg.trainer.name)
        self.trainer = trainer = Trainer(
            self.cfg, self.run_id, self.buffer, self.synchronizer, monitor
        )
        stack.push_async_callback(bounded, trainer.close, "trainer")
        self._listen(stack, trainer.spans)
        if meeting is None:
            await trainer.prepare()
        else:
            self._attach_trainer()
            await trainer.prepare()
            begun = begun_batches(await meeting.buffer.manifests())
            await meeting.synchronizer.trainer_joined(trainer.step, trainer.progress, begun)
            await meeting.trainer_is_ready(trainer)
            await self.board.update(message=f"waiting for an explorer of {self.cfg.name}")
            await self._wait_explorer(meeting)
        await self.board.update(message="")
        follows = meeting is not None and not self._stop.is_set()
        guards = [partial(self._follow_explorers, meeting)] if meeting and follows else []
        return [self._train], guards

    async def _wait_explorer(self, meeting: Meeting) -> None:
        """Until an explorer has joined, or this run is to stop. Raises PeerLost at the deadline."""
        limit_s = self.cfg.synchronizer.peer_timeout_s
        await unless_set(self._stop, meeting.wait_explorer(limit_s or 0.0))

    async def _train(self) -> None:
        assert self.trainer is not None
        await self.trainer.train()
        if self.meeting is None or not self.meeting.explorers:
            return
        outcome = "interrupted" if self._stop.is_set() else "done"
        await self.meeting.ended(TRAINER, End(outcome))
        await self.board.update(message="waiting for the explorers to end")
        evaluation_s = self.cfg.explorer.batch_timeout_s or self.cfg.explorer.max_timeout_s
        limit_s = evaluation_s + self.cfg.synchronizer.sync_timeout_s + GONE_GRACE_S
        await self.meeting.wait_explorers_gone(limit_s)

    async def _follow_explorers(self, meeting: Meeting) -> None:
        """End with the last explorer, unless it only ran out of tasks."""
        name, end = await meeting.wait_explorers_end()
        if end.outcome == "failed":
            raise PeerLost(f"explorer {name!r} of {self.cfg.name} failed: {end.message}")
        if end.outcome == "interrupted" and self.request_stop is not None:
            await self.request_stop(f"explorer {name!r} was interrupted; state saved")


class BenchStage(StageRunner):
    """Mode ``bench``: engines and an evaluation of each checkpoint; no trainer, no buffer.

    The job is only read. What a benchmark writes is its own: ``benchmark_meta.json``,
    ``benchmark_config.yaml`` and metrics of the role ``benchmark``.
    """

    async def build(self, stack: AsyncExitStack) -> tuple[Work, Work]:
        await self.board.update(message="starting engines")
        self.cfg.explorer.name = BENCHMARK
        pool = self._make_engines(stack)
        await pool.start()
        await pool.mark_ready(pool.slots())
        explorer = await self._make_explorer(stack, BENCHMARK)
        await self.board.update(message="")
        return [explorer.benchmark], []


STAGES: dict[str, type[StageRunner]] = {
    "both": BothStage,
    "colocate": BothStage,
    "explore": ExploreStage,
    "train": TrainStage,
    "bench": BenchStage,
}

"""One stage of a job: build its parts, run them, check the accounts, take them down.

Invariant: parts are taken down in the reverse order in which they were built, each within a
deadline, whatever happened before; the first error of any part ends the stage with that
error; a stage that ends without one has balanced accounts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Optional

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.cluster.settled import settle
from trinity_dask.config import save as save_config
from trinity_dask.config.schema import Config
from trinity_dask.engines.pool import EnginePool
from trinity_dask.explorer.coordinator import Coordinator
from trinity_dask.explorer.engine_weights import EngineWeights
from trinity_dask.explorer.loop import ExploreLoop
from trinity_dask.launcher.accounts import lineage_accounts, require_balanced
from trinity_dask.launcher.reporter import Reporter
from trinity_dask.launcher.specs import (
    config_file,
    engine_specs,
    joining_spec,
    stage_model_path,
)
from trinity_dask.launcher.status import StatusBoard
from trinity_dask.monitor.monitor import Monitor
from trinity_dask.sync.synchronizer import Synchronizer
from trinity_dask.trainer.trainer import Trainer

log = logging.getLogger("trinity_dask.stage")

CLOSE_TIMEOUT_S = 60.0
SETTLE_S = 10.0  # accounts of a job whose other side is at work


class StageRunner:
    """Runs one validated stage config on the control worker's event loop.

    Subclasses say which parts a mode has. ``request_stop(reason)`` asks the launcher to end
    the job as interrupted.
    """

    def __init__(
        self,
        cfg: Config,
        board: StatusBoard,
        run_id: str,
        previous: Optional[Config] = None,
        request_stop: Optional[Callable[[str], Awaitable[None]]] = None,
    ) -> None:
        self.cfg = cfg
        self.board = board
        self.run_id = f"{run_id}-{cfg.stage_name}" if cfg.stage_name else run_id
        self.previous = previous
        self.request_stop = request_stop
        self.job_dir = Path(str(cfg.job_dir))
        self.explorer: Optional[ExploreLoop] = None
        self.trainer: Optional[Trainer] = None
        self.buffer: Optional[ExperienceBuffer] = None
        self.synchronizer: Optional[Synchronizer] = None
        self.pool: Optional[EnginePool] = None
        self.coordinator: Optional[Coordinator] = None
        self._stopping = False

    async def run(self) -> None:
        """Run the stage to its end. Raises the first error of any part."""
        self.job_dir.mkdir(parents=True, exist_ok=True)
        self.cfg.model.model_path = stage_model_path(self.cfg, self.previous)
        await asyncio.to_thread(self._save_config)
        async with AsyncExitStack() as stack:
            await self.build(stack)
            reporter = Reporter(self, self.board)
            stack.push_async_callback(reporter.close)
            reporter.start()
            if self._stopping:
                await self.stop()
            await self._run_parts(reporter)
            await reporter.refresh()
            await self._check_accounts()

    def _save_config(self) -> None:
        save_config(self.cfg, config_file(self.cfg))
        alone = self.cfg.mode == "explore" and not self.cfg.synchronizer.peer_timeout_s
        if alone and not (self.job_dir / "config.yaml").exists():
            save_config(self.cfg, self.job_dir / "config.yaml")

    async def stop(self) -> None:
        """End after the current train step, with the state saved."""
        self._stopping = True
        for part in (self.explorer, self.trainer):
            if part is not None:
                await part.stop()

    async def build(self, stack: AsyncExitStack) -> None:
        """Make the parts; ``stack`` takes them down."""
        raise NotImplementedError

    async def _run_parts(self, reporter: Reporter) -> None:
        raise NotImplementedError

    # parts ------------------------------------------------------------------------------
    def _monitor(self, stack: AsyncExitStack, role: str) -> Monitor:
        monitor = Monitor(
            self.cfg.monitor, str(self.job_dir), role, self.cfg.name, asdict(self.cfg)
        )
        stack.push_async_callback(asyncio.to_thread, monitor.close)
        return monitor

    def _make_trainer(self, stack: AsyncExitStack) -> Trainer:
        self.trainer = Trainer(
            self.cfg,
            run_id=self.run_id,
            buffer=self.buffer,
            synchronizer=self.synchronizer,
            monitor=self._monitor(stack, self.cfg.trainer.name),
        )
        stack.push_async_callback(bounded, self.trainer.close, "trainer")
        return self.trainer

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

    @property
    def _backend(self) -> str:
        cluster = self.cfg.cluster
        gpus = cluster.trainer.gpus_per_worker or cluster.rollout.gpus_per_worker
        return "nccl" if gpus else "gloo"

    async def _make_explorer(
        self,
        stack: AsyncExitStack,
        role: str,
        end_writes: Optional[Callable[[], Awaitable[None]]] = None,
    ) -> ExploreLoop:
        assert self.pool is not None
        self.coordinator = Coordinator(self.cfg, self.buffer, run_id=self.run_id)
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
        settle()
        return self.explorer

    # accounts ---------------------------------------------------------------------------
    async def _check_accounts(self) -> None:
        """The other side may be between two steps of its books, so they get a moment."""
        accounts = await self.accounts()
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while accounts is not None and accounts.errors() and self._shares_books:
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.1)
            accounts = await self.accounts()
        if accounts is not None:
            await self.board.update(accounts=accounts.as_dict())
            require_balanced(accounts)

    @property
    def _shares_books(self) -> bool:
        """Whether another run writes into the same accounts."""
        return False

    @property
    def _books(self) -> Optional[Trainer]:
        """The trainer whose rows are in the accounts."""
        return self.trainer

    async def accounts(self) -> Any:
        """The lineage's accounts now, or None for a stage without an explorer."""
        if self.buffer is None:
            return None
        manifests = await self.buffer.manifests()
        stats = await self.buffer.stats()
        trainer = self._books
        trained = (trainer.trained_rows, trainer.skipped_rows) if trainer else (0, 0)
        return lineage_accounts(manifests, stats, *trained)


async def bounded(close: Any, what: str) -> None:
    """``close()`` within its deadline; a failure is logged and the teardown goes on."""
    try:
        await asyncio.wait_for(close(), CLOSE_TIMEOUT_S)
    except Exception as error:
        log.warning("closing the %s: %s: %s", what, type(error).__name__, error)


async def all_of(*coroutines: Any) -> None:
    """Await all; at the first error cancel the others and raise it."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def until_done(
    parts: Collection[asyncio.Future[Any]], guards: Collection[asyncio.Future[Any]]
) -> None:
    """Wait for all ``parts``; the first error (theirs or a guard's) cancels the rest."""
    everything = {*parts, *guards}
    waiting = everything
    try:
        while waiting.intersection(parts):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
    finally:
        for part in everything:
            part.cancel()
        for part in everything:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await part

"""One stage of a job: build its parts, run them, check the accounts, take them down.

Invariant: parts are taken down in the reverse order in which they were built, each within a
deadline, whatever happened before; the first error of any part ends the stage with that
error; a stage that ends without one has balanced accounts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.cluster.actors import create_actor, release_actor
from trinity_dask.cluster.rpc import local_actor
from trinity_dask.cluster.slots import CONTROL
from trinity_dask.config import save as save_config
from trinity_dask.config.schema import Config
from trinity_dask.explorer.explorer import Explorer
from trinity_dask.explorer.rollout_coordinator import RolloutCoordinator
from trinity_dask.launcher.reporter import Reporter
from trinity_dask.launcher.specs import engine_specs, stage_model_path
from trinity_dask.launcher.status import StatusBoard
from trinity_dask.manager.accounts import lineage_accounts, require_balanced
from trinity_dask.manager.engine_pool import EnginePool
from trinity_dask.manager.synchronizer import Synchronizer
from trinity_dask.manager.weight_transport import WeightTransport
from trinity_dask.monitor.monitor import Monitor
from trinity_dask.trainer.trainer import Trainer

log = logging.getLogger("trinity_dask.stage")

CREATE_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 60.0


class StageRunner:
    """Runs one validated stage config on the control worker's event loop."""

    def __init__(
        self, cfg: Config, board: StatusBoard, run_id: str, previous: Optional[Config] = None
    ) -> None:
        self.cfg = cfg
        self.board = board
        self.run_id = f"{run_id}-{cfg.stage_name}" if cfg.stage_name else run_id
        self.previous = previous
        self.job_dir = Path(str(cfg.job_dir))
        self.explorer: Optional[Explorer] = None
        self.trainer: Optional[Trainer] = None
        self.buffer: Optional[ExperienceBuffer] = None
        self.synchronizer: Optional[Synchronizer] = None
        self.pool: Optional[EnginePool] = None
        self.coordinator: Optional[RolloutCoordinator] = None
        self._stopping = False

    async def run(self) -> None:
        """Run the stage to its end. Raises the first error of any part."""
        self.job_dir.mkdir(parents=True, exist_ok=True)
        self.cfg.model.model_path = stage_model_path(self.cfg, self.previous)
        await asyncio.to_thread(save_config, self.cfg, self.job_dir / "config.yaml")
        async with AsyncExitStack() as stack:
            await self._build(stack)
            reporter = Reporter(self, self.board)
            stack.push_async_callback(reporter.close)
            reporter.start()
            await self._run_parts(reporter)
            await reporter.refresh()
            await self._check_accounts()

    async def stop(self) -> None:
        """End after the current train step, with the state saved."""
        self._stopping = True
        for part in (self.explorer, self.trainer):
            if part is not None:
                await part.stop()

    # building ------------------------------------------------------------------------
    async def _build(self, stack: AsyncExitStack) -> None:
        await self.board.update(message="starting the trainer")
        explores = self.cfg.mode == "both"
        if explores:
            await self._build_buffer(stack)
            await self._build_synchronizer(stack)
        self.trainer = Trainer(
            self.cfg,
            run_id=self.run_id,
            buffer=self.buffer,
            synchronizer=self.synchronizer,
            monitor=self._monitor(stack, self.cfg.trainer.name),
        )
        stack.push_async_callback(_bounded, self.trainer.close, "trainer")
        if not explores:
            await self.trainer.prepare()
            return
        await self.board.update(message="starting engines and trainer")
        await self._build_engines(stack)
        await _all(self.trainer.prepare(), self._start_engines())
        await self._first_weights()
        await self._build_explorer(stack)
        await self.board.update(message="")

    def _monitor(self, stack: AsyncExitStack, role: str) -> Monitor:
        monitor = Monitor(
            self.cfg.monitor, str(self.job_dir), role, self.cfg.name, asdict(self.cfg)
        )
        stack.push_async_callback(asyncio.to_thread, monitor.close)
        return monitor

    async def _local(self, stack: AsyncExitStack, cls: type, *args: Any) -> Any:
        """A Dask actor on this very worker; returns its instance."""
        key = f"{self.run_id}-{cls.__name__.lower()}"
        ref = await create_actor(cls, *args, slot=CONTROL, key=key, timeout=CREATE_TIMEOUT_S)
        stack.push_async_callback(release_actor, ref)
        instance = local_actor(key)
        if instance is None:
            raise RuntimeError(
                f"{cls.__name__} was created at {ref.handle.address}, not on this control "
                f"worker; exactly one worker may carry the control slot"
            )
        return instance

    async def _build_buffer(self, stack: AsyncExitStack) -> None:
        config = self.cfg.buffer.trainer_input.experience_buffer
        self.buffer = await self._local(stack, ExperienceBuffer, config)

    async def _build_synchronizer(self, stack: AsyncExitStack) -> None:
        self.synchronizer = await self._local(stack, Synchronizer, self.cfg.synchronizer)

    async def _build_engines(self, stack: AsyncExitStack) -> None:
        assert self.synchronizer is not None
        assert self.buffer is not None
        engine = self.cfg.explorer.rollout_model
        self.pool = EnginePool(engine_specs(self.cfg), self.run_id, engine.prepare_timeout_s)
        stack.push_async_callback(_bounded, self.pool.close, "engines")
        backend = "nccl" if self.cfg.cluster.trainer.gpus_per_worker else "gloo"
        transport = WeightTransport(
            self.cfg.synchronizer, self.pool, str(self.job_dir), self.run_id, backend
        )
        stack.push_async_callback(asyncio.to_thread, transport.remove_files)
        stack.push_async_callback(_bounded, transport.teardown, "weight group")
        assert self.trainer is not None
        buffer, rows = self.buffer, self.cfg.buffer.train_batch_size
        self.synchronizer.attach(
            self.pool, transport, lambda: buffer.has_lease(rows), self.trainer.ensure_ranks
        )

    async def _start_engines(self) -> None:
        assert self.pool is not None
        await self.pool.start()

    async def _first_weights(self) -> None:
        assert self.trainer is not None
        assert self.synchronizer is not None
        await self.board.update(message="sending the first weights")
        metrics = await self.synchronizer.initial_sync(self.trainer.step, self.trainer.progress)
        log.info("first weights: version %d, %s", self.trainer.step, metrics)

    async def _build_explorer(self, stack: AsyncExitStack) -> None:
        assert self.buffer is not None
        slots = self._rollout_slots()
        self.coordinator = RolloutCoordinator(self.cfg, self.buffer, run_id=self.run_id)
        stack.push_async_callback(_bounded, self.coordinator.shutdown, "coordinator")
        await self.coordinator.prepare(slots)
        self.explorer = Explorer(
            self.cfg,
            self.coordinator,
            self.synchronizer,
            self.buffer,
            self._monitor(stack, self.cfg.explorer.name),
        )
        await self.explorer.prepare()

    def _rollout_slots(self) -> int:
        group = self.cfg.cluster.rollout
        return group.n_workers * int(group.nthreads or 1)

    # running -------------------------------------------------------------------------
    async def _run_parts(self, reporter: Reporter) -> None:
        assert self.trainer is not None
        await self.board.update(message="")
        if self._stopping:
            await self.stop()
        if self.explorer is None:
            await self.trainer.train()
            return
        assert self.pool is not None
        guards = {
            asyncio.ensure_future(self.pool.wait_failed()),
            asyncio.ensure_future(reporter.wait_failed()),
        }
        train = asyncio.ensure_future(self._train())
        explore = asyncio.ensure_future(self.explorer.explore())
        await _until_done({train, explore}, guards)

    async def _train(self) -> None:
        assert self.trainer is not None
        assert self.explorer is not None
        await self.trainer.train()
        # nobody will consume further batches; the explorer only finishes its last eval
        await self.explorer.finish()

    # accounts ------------------------------------------------------------------------
    async def _check_accounts(self) -> None:
        accounts = await self.accounts()
        if accounts is not None:
            await self.board.update(accounts=accounts.as_dict())
            require_balanced(accounts)

    async def accounts(self) -> Any:
        """The lineage's accounts now, or None for a stage without an explorer."""
        if self.buffer is None or self.trainer is None:
            return None
        manifests = await self.buffer.manifests()
        stats = await self.buffer.stats()
        trainer = self.trainer
        return lineage_accounts(manifests, stats, trainer.trained_rows, trainer.skipped_rows)


async def _bounded(close: Any, what: str) -> None:
    """``close()`` within its deadline; a failure is logged and the teardown goes on."""
    try:
        await asyncio.wait_for(close(), CLOSE_TIMEOUT_S)
    except Exception as error:
        log.warning("closing the %s: %s: %s", what, type(error).__name__, error)


async def _all(*coroutines: Any) -> None:
    """Await all; at the first error cancel the others and raise it."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _until_done(
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

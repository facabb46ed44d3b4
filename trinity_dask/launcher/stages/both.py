"""Explorer and trainer in one run: modes ``both`` and ``colocate``.

Invariant: neither side starts before engines and trainer hold the same weights. ``colocate``
differs in nothing but its validation, its sync method and the device that its workers share.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.cluster.actors import release_actor
from trinity_dask.launcher.meeting import local_part
from trinity_dask.launcher.reporter import Reporter
from trinity_dask.launcher.stages.base import StageRunner, all_of, until_done
from trinity_dask.sync.synchronizer import Synchronizer

log = logging.getLogger("trinity_dask.stage")


class BothStage(StageRunner):
    """See the module."""

    async def build(self, stack: AsyncExitStack) -> None:
        await self.board.update(message="starting engines and trainer")
        await self._make_shared(stack)
        trainer = self._make_trainer(stack)
        pool = self._make_engines(stack)
        self._attach_trainer()
        self._attach_explorer(stack)
        await all_of(trainer.prepare(), pool.start())
        await self._first_weights()
        await self._make_explorer(stack, self.cfg.explorer.name)
        await self.board.update(message="")

    async def _make_shared(self, stack: AsyncExitStack) -> None:
        store = self.cfg.buffer.trainer_input.experience_buffer
        key = f"{self.run_id}-experiencebuffer"
        self.buffer, ref = await local_part(ExperienceBuffer, store, key=key)
        stack.push_async_callback(release_actor, ref)
        arguments = (self.cfg.synchronizer, str(self.job_dir), self.run_id)
        key = f"{self.run_id}-synchronizer"
        self.synchronizer, ref = await local_part(Synchronizer, *arguments, key=key)
        stack.push_async_callback(release_actor, ref)

    async def _first_weights(self) -> None:
        assert self.trainer is not None
        assert self.synchronizer is not None
        await self.board.update(message="sending the first weights")
        metrics = await self.synchronizer.initial_sync(self.trainer.step, self.trainer.progress)
        log.info("first weights: version %d, %s", self.trainer.step, metrics)

    async def _run_parts(self, reporter: Reporter) -> None:
        assert self.pool is not None
        assert self.explorer is not None
        guards = {
            asyncio.ensure_future(self.pool.wait_failed()),
            asyncio.ensure_future(reporter.wait_failed()),
        }
        train = asyncio.ensure_future(self._train())
        explore = asyncio.ensure_future(self.explorer.explore())
        await until_done({train, explore}, guards)

    async def _train(self) -> None:
        assert self.trainer is not None
        assert self.explorer is not None
        await self.trainer.train()
        # nobody will consume further batches; the explorer only finishes its last eval
        await self.explorer.finish()

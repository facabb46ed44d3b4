"""Mode ``explore``: alone, or beside a trainer (and other explorers) that were started elsewhere.

Invariant: with a trainer, no rollout starts before the engines hold its weights; when it ends,
this explorer takes its last weights, evaluates them and ends too, and when it fails or is
interrupted this explorer does the same. Alone, batches are stored for a later trainer.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Optional

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.cluster.actors import release_actor
from trinity_dask.launcher.meeting import Meeting, PeerLost, join, local_part
from trinity_dask.launcher.peers import end_of
from trinity_dask.launcher.reporter import Reporter
from trinity_dask.launcher.stages.base import StageRunner, all_of, until_done
from trinity_dask.trainer.trainer import Trainer


class ExploreStage(StageRunner):
    """See the module."""

    meeting: Optional[Meeting] = None

    async def build(self, stack: AsyncExitStack) -> None:
        if self.cfg.synchronizer.peer_timeout_s:
            await self._build_with_trainer(stack, self.cfg.synchronizer.peer_timeout_s)
        else:
            await self._build_alone(stack)
        await self.board.update(message="")

    async def _build_alone(self, stack: AsyncExitStack) -> None:
        await self.board.update(message="starting engines")
        store = self.cfg.buffer.trainer_input.experience_buffer
        unbounded = replace(store, capacity_batches=0)  # nobody makes room
        key = f"{self.run_id}-experiencebuffer"
        self.buffer, ref = await local_part(ExperienceBuffer, unbounded, key=key)
        stack.push_async_callback(release_actor, ref)
        await self.buffer.prepare()
        pool = self._make_engines(stack)
        await pool.start()
        await pool.mark_ready(pool.slots())
        await self._make_explorer(stack, self.cfg.explorer.name)

    async def _build_with_trainer(self, stack: AsyncExitStack, timeout_s: float) -> None:
        name = self.cfg.explorer.name
        self.meeting = meeting = await join(self.cfg, name, self.run_id)
        stack.push_async_exit(partial(self._leave, meeting))
        self.buffer, self.synchronizer = meeting.buffer, meeting.synchronizer
        pool = self._make_engines(stack)
        self._attach_explorer(stack)
        stack.push_async_callback(self.synchronizer.explorer_stopped, name)
        message = "starting engines"
        if meeting.trainer is None:
            message += f", waiting for the trainer of {self.cfg.name}"
        await self.board.update(message=message)
        await all_of(pool.start(), meeting.wait_trainer(timeout_s))
        await self.board.update(message="taking the first weights")
        await self.synchronizer.admit(name)
        await self._make_explorer(stack, name, partial(meeting.writes_end, name))
        meeting.started(name)

    async def _leave(
        self,
        meeting: Meeting,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        await meeting.leave(self.cfg.explorer.name, end_of(error, self._stopping))

    async def _run_parts(self, reporter: Reporter) -> None:
        assert self.explorer is not None
        assert self.pool is not None
        guards = {
            asyncio.ensure_future(self.pool.wait_failed()),
            asyncio.ensure_future(reporter.wait_failed()),
        }
        if self.meeting is not None:
            guards.add(asyncio.ensure_future(self._follow_trainer(self.meeting)))
        await until_done({asyncio.ensure_future(self.explorer.explore())}, guards)

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

    @property
    def _books(self) -> Optional[Trainer]:
        return self.meeting.trainer if self.meeting is not None else None

    @property
    def _shares_books(self) -> bool:
        return self.meeting is not None

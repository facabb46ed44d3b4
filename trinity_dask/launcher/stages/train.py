"""Mode ``train``: from a file or a store, or beside explorers that were started elsewhere.

Invariant: a trainer that has explorers stays until the last of them is gone, since they take
its final weights; it ends with them when the last one fails or is interrupted.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Optional

from trinity_dask.launcher.meeting import TRAINER, Meeting, PeerLost, join
from trinity_dask.launcher.peers import End, end_of
from trinity_dask.launcher.reporter import Reporter
from trinity_dask.launcher.stages.base import StageRunner, until_done

GONE_GRACE_S = 60.0


class TrainStage(StageRunner):
    """See the module."""

    meeting: Optional[Meeting] = None

    async def build(self, stack: AsyncExitStack) -> None:
        await self.board.update(message="starting the trainer")
        if not self.cfg.synchronizer.peer_timeout_s:
            await self._make_trainer(stack).prepare()
            await self.board.update(message="")
            return
        self.meeting = meeting = await join(self.cfg, TRAINER, self.run_id)
        stack.push_async_exit(partial(self._leave, meeting))
        self.buffer, self.synchronizer = meeting.buffer, meeting.synchronizer
        trainer = self._make_trainer(stack)
        self._attach_trainer()
        await trainer.prepare()
        await self.synchronizer.trainer_joined(trainer.step, trainer.progress)
        await meeting.trainer_is_ready(trainer)
        await self.board.update(message=f"waiting for an explorer of {self.cfg.name}")
        await self._wait_explorer(meeting)
        await self.board.update(message="")

    async def _wait_explorer(self, meeting: Meeting) -> None:
        assert self.cfg.synchronizer.peer_timeout_s is not None
        wait = asyncio.ensure_future(meeting.wait_explorer(self.cfg.synchronizer.peer_timeout_s))
        try:
            while not wait.done() and not self._stopping:
                await asyncio.wait({wait}, timeout=0.2)  # a stop has no event of its own here
            if wait.done():
                wait.result()
        finally:
            wait.cancel()

    async def _leave(
        self,
        meeting: Meeting,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        await meeting.leave(TRAINER, end_of(error, self._stopping))

    async def _run_parts(self, reporter: Reporter) -> None:
        assert self.trainer is not None
        guards = {asyncio.ensure_future(reporter.wait_failed())}
        if self.meeting is not None and not self._stopping:
            guards.add(asyncio.ensure_future(self._follow_explorers(self.meeting)))
        await until_done({asyncio.ensure_future(self._train())}, guards)

    async def _train(self) -> None:
        assert self.trainer is not None
        await self.trainer.train()
        if self.meeting is None or not self.meeting.explorers:
            return
        outcome = "interrupted" if self._stopping else "done"
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

    @property
    def _shares_books(self) -> bool:
        return self.meeting is not None

"""Waiting for batches, and for places to run them.

Invariant: a waiter is woken when anything of the scheduler moved, and ends at its deadline,
or with the scheduler's failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Optional

from trinity_dask.explorer.schedule.state import SchedulerState
from trinity_dask.explorer.schedule.tasks import BatchId


class BatchWaits:
    """``failure`` is why no result will come any more, or None."""

    def __init__(self, state: SchedulerState) -> None:
        self.failure: Optional[BaseException] = None
        self._state = state
        self._moved = asyncio.Condition()

    def complete(self, batch_id: BatchId) -> bool:
        batch = self._state.batches.get(batch_id)
        return batch is None or batch.complete

    def enough(self, batch_id: BatchId, min_num: Optional[int]) -> bool:
        """Whether ``min_num`` tasks (None: never) are finished with at least one good run."""
        batch = self._state.batches.get(batch_id)
        return min_num is not None and batch is not None and batch.completed_tasks >= min_num

    async def wait(
        self, batch_id: BatchId, min_num: Optional[int], deadline: Optional[float]
    ) -> bool:
        """Until complete, ``min_num`` tasks are there, or the deadline; whether complete."""

        def done() -> bool:
            return self.complete(batch_id) or self.enough(batch_id, min_num)

        await self.until(done, deadline)
        return self.complete(batch_id)

    async def until(self, reached: Callable[[], bool], deadline: Optional[float]) -> bool:
        """Until ``reached()``, looked at when something moved, or the deadline; its last value."""
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(left), self._moved:
                await self._moved.wait_for(lambda: reached() or self.failure is not None)
        except TimeoutError:
            pass  # the caller looks at what there is
        self.require_working()
        return reached()

    def require_working(self) -> None:
        if self.failure is not None:
            raise RuntimeError(f"rollouts cannot be collected: {self.failure}") from self.failure

    async def notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

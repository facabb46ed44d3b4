"""What becomes of an engine's running requests when its weights change.

Invariant: a caller gets one whole answer, whatever happened to its request meanwhile; an
update waits for requests no longer than its deadline; and requests that were held back go
on when the update is over, also when it failed.

Policies: ``keep`` changes the weights under the running requests, which the engine itself
sees to; ``wait`` lets the running ones end first; ``abort`` cancels them, and they are
sampled again from their prompt. Under the last two, new requests are held back meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

log = logging.getLogger("trinity_dask.engines")

KEEP, WAIT, ABORT = "keep", "wait", "abort"
SETTLE_S = 10.0  # how long an engine may take to let go of what was cancelled

T = TypeVar("T")


@dataclass(eq=False)
class _Request:
    """A request and the task that awaits it."""

    task: asyncio.Task[Any]
    cancelling: int  # cancellations of the task that are not ours
    aborted: bool = False

    def abort(self) -> None:
        self.aborted = True
        self.task.cancel()

    def is_ours(self) -> bool:
        """Whether the cancellation that just arrived came from :meth:`abort` alone."""
        return self.aborted and self.task.uncancel() <= self.cancelling


class InFlight:
    """The requests of one engine; used on one event loop.

    ``timeout_s`` is how long ``wait`` waits; what still runs then is aborted. ``aborted``
    counts the requests that were sampled again.
    """

    def __init__(self, policy: str, timeout_s: float) -> None:
        self.policy = policy
        self.timeout_s = timeout_s
        self.aborted = 0
        self._running: set[_Request] = set()
        self._updates = 0
        self._changed: asyncio.Condition | None = None

    async def sample(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer of ``ask()``, which is called again after an update that aborted it."""
        while True:
            if self._updates:
                await self._wait(lambda: not self._updates)
            task = asyncio.current_task()
            assert task is not None
            request = _Request(task, task.cancelling())
            self._running.add(request)
            try:
                return await ask()
            except asyncio.CancelledError:
                if not request.is_ours():
                    raise
                self.aborted += 1
            finally:
                self._running.discard(request)
                if self._updates:
                    await self._tell()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[Callable[[], int]]:
        """Around a change of weights; the yielded call gives the requests aborted for it."""
        if self.policy == KEEP:
            yield lambda: 0
            return
        before = self.aborted
        self._updates += 1
        try:
            await self._clear()
            yield lambda: self.aborted - before
        finally:
            self._updates -= 1
            await self._tell()

    async def _clear(self) -> None:
        """Until nothing runs."""
        if self.policy == WAIT:
            if await self._empty_within(self.timeout_s):
                return
            log.warning(
                "%d request(s) did not end within synchronizer.in_flight_timeout_s = %g s; "
                "they are sampled again with the new weights",
                len(self._running),
                self.timeout_s,
            )
        for request in self._running:
            request.abort()
        if not await self._empty_within(SETTLE_S):
            log.warning("%d aborted request(s) do not end", len(self._running))

    async def _empty_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait(lambda: not self._running)
        except TimeoutError:
            return False
        return True

    async def _wait(self, true: Callable[[], bool]) -> None:
        async with self._condition():
            await self._condition().wait_for(true)

    async def _tell(self) -> None:
        async with self._condition():
            self._condition().notify_all()

    def _condition(self) -> asyncio.Condition:
        # made here, not in __init__: actors are constructed in a thread, not on the loop
        if self._changed is None:
            self._changed = asyncio.Condition()
        return self._changed

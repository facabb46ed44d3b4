"""Waiting on one event loop: for a condition, for several things at once, for another try.

Invariant: a wait ends by what it waits for, by the failure of the whole or at its deadline,
and a task that was started here is either awaited or cancelled; nothing is left running
unseen.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any, Optional, TypeVar

log = logging.getLogger("trinity_dask.aio")

T = TypeVar("T")
TOLD_S = 0.005  # a shorter wait is none


class Spans:
    """Tells ``listeners`` of waits and other times that have ended, whoever looks at them."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[dict[str, Any]], object]] = []

    def tell(self, what: str, started: float, **facts: Any) -> None:
        """``what`` took from ``started`` (Unix time in seconds) until now. A wait says ``who`` has
        ``awaited`` what."""
        seconds = time.time() - started
        if what != "wait" or seconds >= TOLD_S:
            for listener in self.listeners:
                listener({"what": what, "start": started, "seconds": seconds, **facts})


class Changes:
    """Wakes those who wait for a condition whenever something may have changed it.

    May be made in any thread; used on one event loop.
    """

    def __init__(self) -> None:
        self.failure: Optional[BaseException] = None
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Something changed: every waiter looks again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End every wait, now and later, with ``error``; the first one counts."""
        self.failure = self.failure or error
        self.notify()

    async def until(
        self,
        ready: Callable[[], bool],
        timeout_s: Optional[float] = None,
        recheck_s: float | Callable[[], Optional[float]] | None = None,
    ) -> bool:
        """Wait until ``ready()``; whether it is. False: not within ``timeout_s``.

        ``ready`` is asked at once, at every change, and every ``recheck_s`` for conditions
        that also depend on what announces no change (a function says anew how long to wait).

        Raises:
            BaseException: ``failure``, once there is one; whatever ``ready`` raises.
        """
        clock = asyncio.get_running_loop().time
        deadline = None if timeout_s is None else clock() + timeout_s
        while True:
            if self.failure is not None:
                raise self.failure
            if ready():
                return True
            now = clock()
            if deadline is not None and now >= deadline:
                return False
            again_s = recheck_s() if callable(recheck_s) else recheck_s
            limits = [deadline, None if again_s is None else now + again_s]
            await self._woken(min((at for at in limits if at is not None), default=None))

    async def next(self, timeout_s: float) -> None:
        """Return at the next change, or after ``timeout_s``. Raises ``failure``."""
        if self.failure is not None:
            raise self.failure
        await self._woken(asyncio.get_running_loop().time() + timeout_s)

    async def _woken(self, at: Optional[float]) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(at):
                    await waiter
        finally:
            self._waiters.discard(waiter)


async def all_or_first_error(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Results in order; at the first error the others are cancelled, awaited, and it is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def unless_set(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> Optional[T]:
    """The result of ``work``; None when ``event`` is set before: then ``work`` is cancelled."""
    doing, ringing = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({doing, ringing}, return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        await ended({doing, ringing})


async def retry(
    once: Callable[[], Awaitable[T]],
    attempts: int,
    what: str,
    final: tuple[type[BaseException], ...] = (),
    between: Optional[Callable[[], Awaitable[None]]] = None,
) -> T:
    """``once()``, up to ``attempts`` times; errors of the types ``final`` are not tried again.

    ``between()`` is awaited before another attempt.
    """
    for attempt in range(1, attempts + 1):
        try:
            return await once()
        except final:
            raise
        except Exception as error:
            if attempt == attempts:
                raise
            log.warning("%s failed (%s: %s); once more", what, type(error).__name__, error)
        if between is not None:
            await between()
    raise ValueError(f"attempts must be at least 1 (got {attempts})")


class Background:
    """Tasks that nobody awaits by name: kept alive, their errors logged, closed together."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` on the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s: %s: %s", self._what, type(error).__name__, error)

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        await ended(self._tasks)


async def ended(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel all of ``tasks`` and wait until they are over, whatever they raise."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

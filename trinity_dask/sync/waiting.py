"""Waiting for a condition that another call makes true.

Invariant: every wait ends by an event, by the failure of the whole, or at its deadline, and
says then what it waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Optional

# conditions also look at things that announce no change (rows in the buffer)
RECHECK_S = 1.0


class Waiting:
    """A condition variable with deadlines and one failure that ends every wait."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.failure: Optional[BaseException] = None
        self._condition: Optional[asyncio.Condition] = None

    async def until(
        self,
        ready: Callable[[], bool],
        what: Callable[[], str],
        timeout_s: Optional[float] = None,
    ) -> None:
        """Return when ``ready()``; it is asked at every change and once a second.

        Raises:
            TimeoutError: not within ``timeout_s`` (default: the synchronizer's).
            RuntimeError: the whole failed meanwhile.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit
        async with self._cond():
            while self.failure is None and not ready():
                if clock() >= deadline:
                    raise TimeoutError(
                        f"{what()}: not within synchronizer.sync_timeout_s = {limit:g} s"
                    )
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(deadline, clock() + RECHECK_S)):
                        await self._cond().wait()
        if self.failure is not None:
            raise RuntimeError(f"weight synchronisation failed: {self.failure}") from self.failure

    async def notify(self) -> None:
        async with self._cond():
            self._cond().notify_all()

    async def fail(self, error: BaseException) -> None:
        """End every wait, now and later, with ``error``; the first one counts."""
        self.failure = self.failure or error
        await self.notify()

    def _cond(self) -> asyncio.Condition:
        # made here, not in __init__: actors are constructed in a thread, not on the loop
        if self._condition is None:
            self._condition = asyncio.Condition()
        return self._condition

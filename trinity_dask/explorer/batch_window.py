"""The batches that are submitted and not yet committed.

Invariant: batches are committed in the order of their steps, so the last manifest says how
far exploration is. A batch that failed fails everything after it, and nothing before it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable


class InFlight:
    """At most ``limit`` batches; ``finish(step)`` waits for a batch and commits it."""

    def __init__(self, limit: int, finish: Callable[[int], Awaitable[None]]) -> None:
        self.limit = limit
        self._finish = finish
        self._tasks: deque[asyncio.Task[None]] = deque()

    def add(self, step: int) -> None:
        """Batch ``step`` was submitted."""
        previous = self._tasks[-1] if self._tasks else None
        self._tasks.append(asyncio.ensure_future(self._commit(step, previous)))

    async def _commit(self, step: int, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.shield(previous)
        await self._finish(step)

    async def make_room(self) -> None:
        """Wait until another batch may be submitted."""
        while len(self._tasks) >= self.limit:
            await self._oldest()

    async def drain(self) -> None:
        """Wait until every submitted batch is committed."""
        while self._tasks:
            await self._oldest()

    async def _oldest(self) -> None:
        # removed only afterwards: a cancelled wait must not lose sight of the batch
        await asyncio.shield(self._tasks[0])
        self._tasks.popleft()

    @property
    def uncommitted(self) -> list[asyncio.Task[None]]:
        return [task for task in self._tasks if not task.done()]

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._tasks)

    def clear(self) -> None:
        self._tasks.clear()

"""How long an engine may take for a request: the time in its queue is not the request's.

Invariant: a request whose answer grows is not ended, nor is one that waits behind others while
these are answered or grow. One that does neither is ended ``limit_s`` after its last sign of
life, or up to twice that where only a look says whether it still grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class _Asked:
    """A request that is out; ``since`` is its last sign of life, on the loop's clock."""

    request_id: str
    since: float
    tokens: int = 0


class Patience:
    """The clocks of one engine's requests; on one event loop.

    ``sampled(request_id)`` is the number of tokens of a request so far: 0 while it waits in the
    engine's queue, and always where the engine does not say. Requests are taken to be begun in
    the order in which they were asked.
    """

    def __init__(self, limit_s: float, sampled: Callable[[str], int]) -> None:
        self._limit_s = limit_s
        self._sampled = sampled
        self._asked: dict[_Asked, None] = {}  # the oldest first
        self._answered = self._first_moved = self._held_until = 0.0
        self._holds = 0

    @asynccontextmanager
    async def limit(self, request_id: str) -> AsyncIterator[None]:
        """Around the asking of the engine. Raises TimeoutError for a request that is stuck."""
        loop = asyncio.get_running_loop()
        asked = _Asked(request_id, loop.time())
        self._asked[asked] = None
        bound = asyncio.timeout(None)
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            now = loop.time()
            due = self._alive(asked, now) + self._limit_s
            if due <= now:
                bound.reschedule(now)
            else:
                timer = loop.call_at(due, look)

        timer = loop.call_later(self._limit_s, look)
        try:
            async with bound:
                yield
            self._answered = loop.time()
        finally:
            timer.cancel()
            if next(iter(self._asked)) is asked:
                self._first_moved = loop.time()
            del self._asked[asked]

    @contextmanager
    def held(self) -> Iterator[None]:
        """While the weights change no request can go on, and none is late."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._held_until = asyncio.get_running_loop().time()

    def _alive(self, asked: _Asked, now: float) -> float:
        """When ``asked`` last gave a sign of life, as far as it is known ``now``."""
        first = next(iter(self._asked))
        for each in {first, asked}:
            tokens = self._sampled(each.request_id)
            if self._holds or tokens != each.tokens:
                each.since, each.tokens = now, tokens
            each.since = max(each.since, self._held_until)
        if first is asked and not asked.tokens:
            asked.since = max(asked.since, self._first_moved)
        elif not asked.tokens:  # in the queue: it lives as long as those before it move
            asked.since = max(asked.since, first.since, self._answered)
        return asked.since

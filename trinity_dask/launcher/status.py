"""The run's status as one dictionary with a version, and a long-poll on it.

Invariant: the version grows with every change, so a reader that passes the version it has
seen never misses the last change and never polls in a loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

FINAL_STATES = ("done", "failed", "interrupted")


class StatusBoard:
    """Made and used on one event loop."""

    def __init__(self, **initial: Any) -> None:
        self._values: dict[str, Any] = {"state": "starting", "message": "", **initial}
        self._version = 1
        self._started = time.monotonic()
        self._condition = asyncio.Condition()

    @property
    def values(self) -> dict[str, Any]:
        elapsed = round(time.monotonic() - self._started, 1)
        return {**self._values, "elapsed_s": elapsed, "version": self._version}

    @property
    def state(self) -> str:
        return self._values["state"]

    async def update(self, **changes: Any) -> None:
        if all(self._values.get(key) == value for key, value in changes.items()):
            return
        self._values.update(changes)
        self._version += 1
        async with self._condition:
            self._condition.notify_all()

    async def wait(self, seen: int, timeout_s: float) -> dict[str, Any]:
        """The status as soon as its version exceeds ``seen``, or after ``timeout_s``."""
        async with self._condition:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._condition.wait_for(lambda: self._version > seen), timeout_s
                )
        return self.values

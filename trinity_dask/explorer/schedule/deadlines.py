"""The earliest of many deadlines that come and go.

Invariant: the memory is in proportion to the deadlines that stand, not to those there were.
"""

from __future__ import annotations

import heapq
from typing import Optional

SPARE = 64


class Deadlines:
    """Deadlines by number, seconds of the caller's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._due: dict[int, float] = {}

    def set(self, number: int, due: float) -> None:
        self._due[number] = due
        heapq.heappush(self._heap, (due, number))
        if len(self._heap) > 2 * len(self._due) + SPARE:
            self._heap = [(when, which) for which, when in self._due.items()]
            heapq.heapify(self._heap)

    def drop(self, number: int) -> None:
        self._due.pop(number, None)

    def first(self) -> Optional[float]:
        """The earliest deadline that stands, or None."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def over(self, now: float) -> list[int]:
        """Numbers whose deadline has passed, earliest first. They stay until dropped."""
        return [n for n, due in sorted(self._due.items(), key=lambda item: item[1]) if due <= now]

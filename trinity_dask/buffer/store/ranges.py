"""Sets of integers as sorted, merged, half-open ranges.

Invariant: ranges are non-empty, disjoint, not adjacent, and ascending.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

Range = tuple[int, int]


class Ranges:
    """A set of integers that is cheap when its members are mostly consecutive."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ranges: list[Range] = []
        for start, stop in ranges:
            self.add(start, stop)

    def __len__(self) -> int:
        """Number of integers in the set."""
        return sum(stop - start for start, stop in self._ranges)

    def __contains__(self, value: int) -> bool:
        index = bisect_left(self._ranges, (value + 1,)) - 1
        return index >= 0 and value < self._ranges[index][1]

    def add(self, start: int, stop: int) -> None:
        """Add ``[start, stop)``. Raises ``ValueError`` when a part of it is there already."""
        if start >= stop:
            return
        index = bisect_left(self._ranges, (start, start))
        before = self._ranges[index - 1] if index else None
        after = self._ranges[index] if index < len(self._ranges) else None
        if (before and before[1] > start) or (after and after[0] < stop):
            raise ValueError(f"range {start}..{stop} overlaps {before or after}")
        first, last = index, index
        if before and before[1] == start:
            start, first = before[0], index - 1
        if after and after[0] == stop:
            stop, last = after[1], index + 1
        self._ranges[first:last] = [(start, stop)]

    def take(self, n: int) -> list[Range]:
        """Remove and return the ``n`` smallest members, as ranges."""
        taken: list[Range] = []
        while n > 0 and self._ranges:
            start, stop = self._ranges[0]
            cut = min(stop, start + n)
            taken.append((start, cut))
            self._ranges[:1] = [(cut, stop)] if cut < stop else []
            n -= cut - start
        return taken

    def cut(self, start: int, stop: int) -> list[Range]:
        """Remove and return the members of ``[start, stop)``, as ranges."""
        removed: list[Range] = []
        kept: list[Range] = []
        for low, high in self._ranges:
            inside = (max(low, start), min(high, stop))
            if inside[0] >= inside[1]:
                kept.append((low, high))
                continue
            removed.append(inside)
            kept += [part for part in ((low, inside[0]), (inside[1], high)) if part[0] < part[1]]
        self._ranges = kept
        return removed

    def complement(self, stop: int) -> Ranges:
        """The members of ``[0, stop)`` that are not in this set."""
        edges = [0, *(edge for pair in self._ranges for edge in pair), stop]
        return Ranges(zip(edges[::2], edges[1::2], strict=True))

    def largest_below(self, limit: int) -> int | None:
        """The largest member smaller than ``limit``, or None."""
        index = bisect_left(self._ranges, (limit,)) - 1
        return min(self._ranges[index][1], limit) - 1 if index >= 0 else None

    @property
    def stop(self) -> int:
        """One more than the largest member; 0 for the empty set."""
        return self._ranges[-1][1] if self._ranges else 0

    def to_list(self) -> list[list[int]]:
        return [[start, stop] for start, stop in self._ranges]

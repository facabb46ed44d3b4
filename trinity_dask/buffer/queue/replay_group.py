"""Groups of rows that can be handed out more than once, sorted by what they are worth.

Invariant: :class:`ReadyGroups` is sorted by falling priority and, among equals, by arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trinity_dask.buffer.queue.row_queue import BatchId


@dataclass
class Group:
    """Rows ``start`` to ``stop`` of a batch; ``serial`` is its place in order of arrival.

    ``version`` (the newest) decides the priority, ``oldest`` whether it is too old.
    """

    batch_id: BatchId
    start: int
    stop: int
    oldest: int
    version: int
    serial: int
    use_count: int = 0
    trained: bool = False  # at least once
    ready_at: float | None = None  # set while it cools
    priority: float = 0.0

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def rank(self) -> tuple[float, int]:
        """Small is first."""
        return (-self.priority, self.serial)

    def to_record(self, use_count: int, now: float) -> list[Any]:
        """JSON form; the pause that is left instead of a time of this process' clock."""
        left = None if self.ready_at is None else max(self.ready_at - now, 0.0)
        place = [self.batch_id, self.start, self.stop, self.oldest, self.version, self.serial]
        return [*place, use_count, self.trained, left]

    @classmethod
    def from_record(cls, record: list[Any], now: float) -> Group:
        *fields, left = record
        group = cls(*fields)
        group.ready_at = None if left is None else now + left
        return group


class ReadyGroups:
    """The groups that can be handed out now, best first."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self.rows = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def add(self, group: Group) -> None:
        insort(self._groups, group, key=lambda g: g.rank)
        self.rows += group.rows

    def take_rows(self, n_rows: int) -> list[Group]:
        """Remove and return the fewest best groups that have ``n_rows`` rows together."""
        count = rows = 0
        while rows < n_rows:
            rows += self._groups[count].rows
            count += 1
        taken, self._groups = self._groups[:count], self._groups[count:]
        self.rows -= rows
        return taken

    def take_if(self, wanted: Callable[[Group], bool]) -> list[Group]:
        """Remove and return every group that is wanted, best first."""
        taken = [group for group in self._groups if wanted(group)]
        self._groups = [group for group in self._groups if not wanted(group)]
        self.rows -= sum(group.rows for group in taken)
        return taken

    @property
    def least(self) -> Group:
        """The oldest of the least important ones. There must be one."""
        lowest = self._groups[-1].rank[0]
        return self._groups[bisect_left(self._groups, lowest, key=lambda g: g.rank[0])]

    def remove(self, group: Group) -> None:
        del self._groups[bisect_left(self._groups, group.rank, key=lambda g: g.rank)]
        self.rows -= group.rows

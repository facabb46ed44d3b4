"""Sub-tasks that wait for a lane: batches in order, first come first served in a batch.

Invariant: the counts per group are those of the queues.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Optional

from trinity_dask.explorer.schedule.tasks import BatchId, SubTask, sort_batch_id

UNROUTED = ""  # the group of sub-tasks of which it is not known yet where they may run


class Pending:
    """One queue per batch and group of workers."""

    def __init__(self) -> None:
        self._queues: dict[BatchId, defaultdict[str, deque[SubTask]]] = {}
        self._order: list[tuple[tuple[float, int], int, BatchId]] = []
        self._arrivals = itertools.count()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(self._counts.values())

    def count(self, group: str) -> int:
        return self._counts[group]

    def batches(self) -> Iterator[BatchId]:
        """Known batches in order."""
        return (batch_id for _, _, batch_id in self._order)

    def extend(self, batch_id: BatchId, sub_tasks: Iterable[SubTask], group: str) -> None:
        """A batch that is new takes its place in the order."""
        if batch_id not in self._queues:
            self._queues[batch_id] = defaultdict(deque)
            insort(self._order, (sort_batch_id(batch_id), next(self._arrivals), batch_id))
        queue = self._queues[batch_id][group]
        for sub_task in sub_tasks:
            sub_task.group = group
            queue.append(sub_task)
            self._counts[group] += 1

    def push_front(self, sub_task: SubTask) -> None:
        """It was out already; it goes before those that were not."""
        self._queues[sub_task.task.batch_id][sub_task.group].appendleft(sub_task)
        self._counts[sub_task.group] += 1

    def pop(self, group: str) -> Optional[SubTask]:
        if not self._counts[group]:
            return None
        for batch_id in self.batches():
            queue = self._queues[batch_id][group]
            if queue:
                self._counts[group] -= 1
                return queue.popleft()
        raise AssertionError(f"{self._counts[group]} sub-tasks counted in {group!r}, none found")

    def route(self, workflow: str, group: str) -> None:
        """It is known now where sub-tasks of a workflow may run."""
        for batch_id in list(self._queues):
            unrouted = self._queues[batch_id].get(UNROUTED, deque())
            found = [s for s in unrouted if s.task.task.workflow == workflow]
            if found:
                others = (s for s in unrouted if s.task.task.workflow != workflow)
                self._queues[batch_id][UNROUTED] = deque(others)
                self._counts[UNROUTED] -= len(found)
                self.extend(batch_id, found, group)

    def clear(self, batch_id: BatchId) -> None:
        for group, queue in self._queues.get(batch_id, {}).items():
            self._counts[group] -= len(queue)
            queue.clear()

    def forget(self, batch_id: BatchId) -> None:
        self.clear(batch_id)
        if self._queues.pop(batch_id, None) is not None:
            self._order = [entry for entry in self._order if entry[2] != batch_id]

"""What a queue of row ranges can do, whatever order it hands them out in.

Invariant: queued + leased + consumed + dropped rows are the rows of all added batches; a row
counts as consumed from the first time it was trained, and trainings after that as reused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from trinity_dask.buffer.store.ranges import Ranges
from trinity_dask.buffer.store.row_index import RowIndex

BatchId = int | str
Part = tuple[BatchId, int, int]


@dataclass(frozen=True)
class Lease:
    """Rows handed out together: ``(batch_id, start, stop)`` parts in queue order.

    ``use_counts`` says, part by part, how often the rows are handed out with this one.
    """

    lease_id: int
    parts: tuple[Part, ...]
    rows: int
    use_counts: tuple[int, ...] = ()


def step_number(batch_id: BatchId) -> int | None:
    """The step of a numbered or signed batch; None for any other name."""
    if isinstance(batch_id, int):
        return batch_id
    step, at, _ = batch_id.partition("@")
    return int(step) if at and step.isdigit() else None


@dataclass
class Done:
    """Ids of finished batches, integer ids compactly."""

    numbered: Ranges = field(default_factory=Ranges)
    named: dict[str, None] = field(default_factory=dict)
    steps: Ranges = field(default_factory=Ranges)  # of batches signed by an explorer

    def __post_init__(self) -> None:
        for batch_id in self.named:
            self._add_step(batch_id)

    def _add_step(self, batch_id: str) -> None:
        step = step_number(batch_id)
        if step is not None and step not in self.steps:  # another explorer's may be there
            self.steps.add(step, step + 1)

    def __bool__(self) -> bool:
        return bool(self.numbered) or bool(self.named)

    def __contains__(self, batch_id: BatchId) -> bool:
        if isinstance(batch_id, str):
            return batch_id in self.named
        return batch_id in self.numbered

    def add(self, batch_id: BatchId) -> None:
        if isinstance(batch_id, str):
            self.named[batch_id] = None
            self._add_step(batch_id)
        else:
            self.numbered.add(batch_id, batch_id + 1)

    def ids(self) -> list[BatchId]:
        return [*(n for a, b in self.numbered.to_list() for n in range(a, b)), *self.named]

    def largest_before(self, unfinished: list[BatchId]) -> int:
        """The largest b such that every batch <= b is finished; 0 for none.

        A batch that an explorer signed (``"12@explorer1"``) counts as 12, other names not.
        """
        steps = (step for b in unfinished if (step := step_number(b)) is not None)
        limit = min(steps, default=max(self.numbered.stop, self.steps.stop))
        return max(self.numbered.largest_below(limit) or 0, self.steps.largest_below(limit) or 0)


class RowQueue(Protocol):
    """Batches go in, leases come out, acknowledged leases are trained."""

    closed: bool
    # true: a writer waits while too many batches are unfinished; false: old rows give way
    bounded_by_batches: bool

    def add(self, batch_id: BatchId, rows: int, index: RowIndex | None = None) -> None: ...

    def lease(self, n_rows: int | None, whole_groups: bool = False) -> Lease | None: ...

    def can_lease(self, n_rows: int | None) -> bool: ...

    def ack(self, lease_id: int) -> None: ...

    def release(self, lease_id: int) -> None: ...

    def drop_older(self, version: int) -> int: ...

    def close(self) -> None: ...

    def next_change_s(self) -> float | None: ...

    @property
    def drained(self) -> bool: ...

    @property
    def leasable_rows(self) -> int: ...

    @property
    def queued_rows(self) -> int: ...

    @property
    def leased_rows(self) -> int: ...

    @property
    def returnable_rows(self) -> int: ...

    @property
    def consumed_rows(self) -> int: ...

    @property
    def dropped_rows(self) -> int: ...

    @property
    def reused_rows(self) -> int: ...

    @property
    def queued_batches(self) -> int: ...

    @property
    def unfinished_batches(self) -> int: ...

    @property
    def consumed_batch(self) -> int: ...

    def consumed_batches(self) -> list[BatchId]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

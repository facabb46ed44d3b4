"""A first-in-first-out queue of row ranges with leases. No I/O, no clock, no rows.

Invariant: every row of every added batch is in exactly one of four states, queued,
leased, consumed or dropped; it leaves the last two never, and ``state_dict`` names exactly
the rows in these. So a queue rebuilt from the state and the committed batches hands out
every row that was neither, once, in the original order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trinity_dask.buffer.store.manifest import RowIndex
from trinity_dask.buffer.store.ranges import Ranges

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

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Done:
        """Of a queue's ``state_dict``."""
        done = cls(Ranges(state["finished"]))
        for name in state["finished_named"]:
            done.add(name)
        return done

    def __contains__(self, batch_id: BatchId) -> bool:
        if isinstance(batch_id, str):
            return batch_id in self.named
        return batch_id in self.numbered

    def add(self, batch_id: BatchId) -> None:
        if not isinstance(batch_id, str):
            self.numbered.add(batch_id, batch_id + 1)
            return
        self.named[batch_id] = None
        step = step_number(batch_id)
        if step is not None and step not in self.steps:  # another explorer's may be there
            self.steps.add(step, step + 1)

    def ids(self) -> list[BatchId]:
        return [*(n for a, b in self.numbered.to_list() for n in range(a, b)), *self.named]

    def largest_before(self, unfinished: list[BatchId]) -> int:
        """The largest b such that every batch <= b is finished; 0 for none.

        A batch that an explorer signed (``"12@explorer1"``) counts as 12, other names not.
        """
        steps = (step for b in unfinished if (step := step_number(b)) is not None)
        limit = min(steps, default=max(self.numbered.stop, self.steps.stop))
        return max(self.numbered.largest_below(limit) or 0, self.steps.largest_below(limit) or 0)


@dataclass
class _Batch:
    """A batch with rows to come. ``untouched`` matters for batches of 0 rows only.

    ``consumed`` holds the dropped rows as well: neither is handed out again.
    """

    rows: int
    queued: Ranges
    consumed: Ranges
    index: RowIndex
    untouched: bool = True

    @property
    def leasable(self) -> bool:
        return bool(self.queued) or (self.rows == 0 and self.untouched)


class LeaseQueue:
    """Batches go in, leases come out, acknowledged leases are gone for good.

    ``consumed_rows`` and ``dropped_rows`` (too old) count over the whole lineage, a loaded
    state included; ``reused_rows`` is 0, no row is trained twice here.
    """

    bounded_by_batches = True  # a writer waits while too many batches are unfinished
    next_change_s = None  # no rows come by the passing of time

    def __init__(self) -> None:
        self._batches: dict[BatchId, _Batch] = {}  # unfinished ones, in queue order
        self._done = Done()
        self._partial: dict[BatchId, Ranges] = {}  # loaded, batch not added yet
        self._leases: dict[int, Lease] = {}
        self._next_lease = 0
        self.consumed_rows = 0
        self.dropped_rows = 0
        self.reused_rows = 0
        self.closed = False

    # -- events ---------------------------------------------------------------------

    def add(self, batch_id: BatchId, rows: int, index: RowIndex | None = None) -> None:
        """Append a batch of ``rows`` rows; what a loaded state calls consumed stays so.

        ``index`` tells groups and versions apart; without it the batch is one group of
        unknown version. Adding a known batch again is a no-op.

        Raises:
            ValueError: the queue is closed, or the state names rows the batch has not.
        """
        if self.closed:
            raise ValueError(f"batch {batch_id!r} came after the queue was closed")
        if batch_id in self._done or batch_id in self._batches:
            return
        consumed = self._partial.pop(batch_id, Ranges())
        if consumed.stop > rows:
            raise ValueError(
                f"the saved lease state consumed rows up to {consumed.stop} of batch "
                f"{batch_id!r}, which has {rows}: state and store belong to different runs"
            )
        index = index or RowIndex.unknown(rows)
        self._batches[batch_id] = _Batch(rows, consumed.complement(rows), consumed, index)

    def lease(self, n_rows: int | None, whole_groups: bool = False) -> Lease | None:
        """Lease exactly ``n_rows`` rows across batches, or the whole next batch for None.

        ``whole_groups`` adds the rest of the last group, so that none is torn apart.

        None returns what is queued of the first batch that has something queued, and a
        batch of 0 rows once. With ``n_rows`` such batches count as consumed in passing.
        Returns None when there is not enough.
        """
        parts: list[Part] = []
        if n_rows is None:
            for batch_id, batch in self._batches.items():
                if batch.leasable:
                    batch.untouched = False
                    ranges = batch.queued.take(batch.rows) or [(0, 0)]
                    parts = [(batch_id, start, stop) for start, stop in ranges]
                    break
        elif n_rows < 1:
            raise ValueError(f"a lease has at least one row (got n_rows={n_rows})")
        else:
            for batch_id, batch in list(self._batches.items()):
                if batch.rows == 0 and batch.untouched:
                    batch.untouched = False
                    self._finish_if_consumed(batch_id)
            if self.queued_rows >= n_rows:
                parts = self._next_rows(n_rows, whole_groups)
        if not parts:
            return None
        rows = sum(stop - start for _, start, stop in parts)
        lease = Lease(self._next_lease, tuple(parts), rows, (1,) * len(parts))
        self._next_lease += 1
        self._leases[lease.lease_id] = lease
        return lease

    def _next_rows(self, n_rows: int, whole_groups: bool) -> list[Part]:
        """Take the first ``n_rows`` queued rows, of which there are enough."""
        parts: list[Part] = []
        for batch_id, batch in self._batches.items():
            for start, stop in batch.queued.take(n_rows):
                parts.append((batch_id, start, stop))
                n_rows -= stop - start
            if n_rows == 0:
                break
        if whole_groups:
            batch_id, start, stop = parts[-1]
            batch = self._batches[batch_id]
            ends = (end for low, end, _, _ in batch.index.groups() if low < stop <= end)
            rest = batch.queued.cut(stop, next(ends, stop))
            if rest and rest[0][0] == stop:  # the last part and its rest are one range
                parts[-1] = (batch_id, start, rest.pop(0)[1])
            parts += [(batch_id, a, b) for a, b in rest]
        return parts

    def can_lease(self, n_rows: int | None) -> bool:
        """Whether :meth:`lease` would give something now; changes nothing."""
        return self.queued_batches > 0 if n_rows is None else self.queued_rows >= n_rows

    def ack(self, lease_id: int) -> None:
        """The lease's rows are consumed.

        Raises:
            KeyError: an unknown lease, or one that was acknowledged or released before.
        """
        lease = pop_lease(self._leases, lease_id)
        for batch_id, start, stop in lease.parts:
            self._batches[batch_id].consumed.add(start, stop)
            self._finish_if_consumed(batch_id)
        self.consumed_rows += lease.rows

    def release(self, lease_id: int) -> None:
        """The lease's rows return to their place in the queue. Raises like :meth:`ack`."""
        for batch_id, start, stop in pop_lease(self._leases, lease_id).parts:
            batch = self._batches[batch_id]
            batch.queued.add(start, stop)
            batch.untouched = True

    def drop_older(self, version: int) -> int:
        """Drop the queued groups with a token of a known model version below ``version``.

        Returns the number of rows; they are never handed out and count as dropped.
        """
        before = self.dropped_rows
        for batch_id, batch in list(self._batches.items()):
            for start, stop, oldest, _ in batch.index.groups():
                if 0 <= oldest < version:
                    for part in batch.queued.cut(start, stop):
                        batch.consumed.add(*part)
                        self.dropped_rows += part[1] - part[0]
            self._finish_if_consumed(batch_id)
        return self.dropped_rows - before

    def _finish_if_consumed(self, batch_id: BatchId) -> None:
        # a lease may hold several parts of one batch; only the last one finishes it
        batch = self._batches.get(batch_id)
        if batch is None or len(batch.consumed) < batch.rows or (not batch.rows and batch.leasable):
            return
        del self._batches[batch_id]
        self._done.add(batch_id)

    def close(self) -> None:
        """No batch will be added any more; leases go on until nothing is left."""
        self.closed = True

    def is_finished(self, batch_id: BatchId) -> bool:
        """Whether no row of the batch is handed out any more."""
        return batch_id in self._done

    # -- counts ---------------------------------------------------------------------

    def left_rows(self, n_rows: int | None) -> int | None:
        """Rows that remain when :meth:`lease` will never give anything again; else None.

        None also while a release could still bring enough rows back.
        """
        if n_rows is None:
            return 0 if self.closed and not self._batches else None
        ended = self.closed and self.queued_rows + self.leased_rows < n_rows
        return self.queued_rows if ended else None

    @property
    def queued_rows(self) -> int:
        return sum(len(batch.queued) for batch in self._batches.values())

    @property
    def leased_rows(self) -> int:
        return sum(lease.rows for lease in self._leases.values())

    @property
    def queued_batches(self) -> int:
        """Batches of which something can be leased."""
        return sum(batch.leasable for batch in self._batches.values())

    @property
    def unfinished_batches(self) -> int:
        """Batches that are not fully consumed, leased ones included."""
        return len(self._batches)

    @property
    def consumed_batch(self) -> int:
        """The largest b such that every integer batch <= b is fully consumed; 0 for none."""
        return self._done.largest_before([*self._batches, *self._partial])

    def consumed_batches(self) -> list[BatchId]:
        """Ids with at least one consumed row, and finished empty ones (for checks)."""
        started = [b for b, batch in self._batches.items() if batch.consumed]
        return [*self._done.ids(), *started, *self._partial]

    # -- state ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The consumed ranges, as JSON. Leased rows count as not consumed."""
        partial = {**{b: batch.consumed for b, batch in self._batches.items()}, **self._partial}
        return {
            "finished": self._done.numbered.to_list(),
            "finished_named": list(self._done.named),
            "partial": [[b, ranges.to_list()] for b, ranges in partial.items() if ranges],
            "consumed_rows": self.consumed_rows,
            "dropped_rows": self.dropped_rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`; add the committed batches afterwards.

        Raises:
            ValueError: batches were added before.
        """
        if "items" in state:
            raise ValueError(
                "the saved lease state is that of a replay buffer; set "
                "replay_buffer.enable=true again, or start a new job directory"
            )
        if self._batches or self._done.ids():
            raise ValueError("load the lease state before batches are added to the queue")
        self._done = Done.from_state(state)
        self._partial = {batch_id: Ranges(ranges) for batch_id, ranges in state["partial"]}
        self.consumed_rows = state["consumed_rows"]
        self.dropped_rows = state.get("dropped_rows", 0)


def pop_lease(leases: dict[int, Any], lease_id: int) -> Any:
    """Remove and return an open lease.

    Raises:
        KeyError: it is unknown, or was settled before.
    """
    if lease_id not in leases:
        raise KeyError(f"lease {lease_id} is unknown or was acknowledged or released before")
    return leases.pop(lease_id)

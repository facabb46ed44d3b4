"""A first-in-first-out queue of row ranges with leases. No I/O, no clock, no rows.

Invariant: every row of every added batch is in exactly one of four states, queued,
leased, consumed or dropped; it leaves the last two never, and ``state_dict`` names exactly
the rows in these. So a queue rebuilt from the state and the committed batches hands out
every row that was neither, once, in the original order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trinity_dask.buffer.queue.row_queue import BatchId, Done, Lease, Part
from trinity_dask.buffer.store.ranges import Ranges
from trinity_dask.buffer.store.row_index import RowIndex

__all__ = ["BatchId", "Lease", "LeaseQueue", "Part"]


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

    @property
    def finished(self) -> bool:
        return len(self.consumed) == self.rows and not (self.rows == 0 and self.untouched)


class LeaseQueue:
    """Batches go in, leases come out, acknowledged leases are gone for good."""

    bounded_by_batches = True

    def __init__(self) -> None:
        self._batches: dict[BatchId, _Batch] = {}  # unfinished ones, in queue order
        self._done = Done()
        self._partial: dict[BatchId, Ranges] = {}  # loaded, batch not added yet
        self._leases: dict[int, Lease] = {}
        self._next_lease = 0
        self._consumed_rows = 0
        self._dropped_rows = 0
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
        if n_rows is None:
            return self._lease_batch()
        if n_rows < 1:
            raise ValueError(f"a lease has at least one row (got n_rows={n_rows})")
        self._pass_empty_batches()
        if self.queued_rows < n_rows:
            return None
        return self._lease_rows(n_rows, whole_groups)

    def can_lease(self, n_rows: int | None) -> bool:
        """Whether :meth:`lease` would give something now; changes nothing."""
        return self.queued_batches > 0 if n_rows is None else self.queued_rows >= n_rows

    def ack(self, lease_id: int) -> None:
        """The lease's rows are consumed. Raises ``KeyError`` for an unknown or settled lease."""
        lease = self._pop(lease_id)
        for batch_id, start, stop in lease.parts:
            self._batches[batch_id].consumed.add(start, stop)
            self._finish_if_consumed(batch_id)
        self._consumed_rows += lease.rows

    def release(self, lease_id: int) -> None:
        """The lease's rows return to their place in the queue. Raises like :meth:`ack`."""
        for batch_id, start, stop in self._pop(lease_id).parts:
            batch = self._batches[batch_id]
            batch.queued.add(start, stop)
            batch.untouched = True

    def drop_older(self, version: int) -> int:
        """Drop the queued groups with a token of a known model version below ``version``.

        Returns the number of rows; they are never handed out and count as dropped.
        """
        dropped = 0
        for batch_id, batch in list(self._batches.items()):
            for start, stop, oldest, _ in batch.index.groups():
                if 0 <= oldest < version:
                    dropped += self._drop(batch, start, stop)
            self._finish_if_consumed(batch_id)
        self._dropped_rows += dropped
        return dropped

    def _drop(self, batch: _Batch, start: int, stop: int) -> int:
        parts = batch.queued.cut(start, stop)
        for part in parts:
            batch.consumed.add(*part)
        return sum(b - a for a, b in parts)

    def next_change_s(self) -> float | None:
        """Seconds until rows come by themselves: never here."""
        return None

    def close(self) -> None:
        """No batch will be added any more; leases go on until nothing is left."""
        self.closed = True

    # -- state ----------------------------------------------------------------------

    @property
    def drained(self) -> bool:
        """Closed, and everything is consumed."""
        return self.closed and not self._batches

    @property
    def queued_rows(self) -> int:
        return sum(len(batch.queued) for batch in self._batches.values())

    @property
    def leasable_rows(self) -> int:
        """Rows that can be leased now: the queued ones."""
        return self.queued_rows

    @property
    def returnable_rows(self) -> int:
        """Rows that a release may make leasable again: the leased ones."""
        return self.leased_rows

    @property
    def dropped_rows(self) -> int:
        """Rows that were too old, over the whole lineage."""
        return self._dropped_rows

    @property
    def reused_rows(self) -> int:
        """Trainings of rows after their first: none here."""
        return 0

    @property
    def leased_rows(self) -> int:
        return sum(lease.rows for lease in self._leases.values())

    @property
    def consumed_rows(self) -> int:
        """Over the whole lineage, a loaded state included."""
        return self._consumed_rows

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

    def state_dict(self) -> dict[str, Any]:
        """The consumed ranges, as JSON. Leased rows count as not consumed."""
        partial = {**{b: batch.consumed for b, batch in self._batches.items()}, **self._partial}
        return {
            "finished": self._done.numbered.to_list(),
            "finished_named": list(self._done.named),
            "partial": [[b, ranges.to_list()] for b, ranges in partial.items() if ranges],
            "consumed_rows": self._consumed_rows,
            "dropped_rows": self._dropped_rows,
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
        if self._batches or self._done:
            raise ValueError("load the lease state before batches are added to the queue")
        self._done = Done(Ranges(state["finished"]), dict.fromkeys(state["finished_named"]))
        self._partial = {batch_id: Ranges(ranges) for batch_id, ranges in state["partial"]}
        self._consumed_rows = state["consumed_rows"]
        self._dropped_rows = state.get("dropped_rows", 0)

    # -- internals ------------------------------------------------------------------

    def _pop(self, lease_id: int) -> Lease:
        if lease_id not in self._leases:
            raise KeyError(f"lease {lease_id} is unknown or was acknowledged or released before")
        return self._leases.pop(lease_id)

    def _new_lease(self, parts: list[Part]) -> Lease:
        rows = sum(stop - start for _, start, stop in parts)
        lease = Lease(self._next_lease, tuple(parts), rows, (1,) * len(parts))
        self._next_lease += 1
        self._leases[lease.lease_id] = lease
        return lease

    def _lease_batch(self) -> Lease | None:
        for batch_id, batch in self._batches.items():
            if batch.leasable:
                batch.untouched = False
                ranges = batch.queued.take(batch.rows) or [(0, 0)]
                return self._new_lease([(batch_id, start, stop) for start, stop in ranges])
        return None

    def _lease_rows(self, n_rows: int, whole_groups: bool) -> Lease:
        parts: list[Part] = []
        missing = n_rows
        for batch_id, batch in self._batches.items():
            for start, stop in batch.queued.take(missing):
                parts.append((batch_id, start, stop))
                missing -= stop - start
            if missing == 0:
                break
        if whole_groups:
            self._add_rest_of_group(parts)
        return self._new_lease(parts)

    def _add_rest_of_group(self, parts: list[Part]) -> None:
        batch_id, start, stop = parts[-1]
        batch = self._batches[batch_id]
        ends = (end for low, end, _, _ in batch.index.groups() if low < stop <= end)
        rest = batch.queued.cut(stop, next(ends, stop))
        if rest and rest[0][0] == stop:  # the last part and its rest are one range
            parts[-1] = (batch_id, start, rest.pop(0)[1])
        parts += [(batch_id, a, b) for a, b in rest]

    def _pass_empty_batches(self) -> None:
        empty = [b for b, batch in self._batches.items() if batch.rows == 0 and batch.untouched]
        for batch_id in empty:
            self._batches[batch_id].untouched = False
            self._finish_if_consumed(batch_id)

    def _finish_if_consumed(self, batch_id: BatchId) -> None:
        # a lease may hold several parts of one batch; only the last one finishes it
        batch = self._batches.get(batch_id)
        if batch is not None and batch.finished:
            del self._batches[batch_id]
            self._done.add(batch_id)

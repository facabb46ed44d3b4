"""A queue of groups by priority, some of them handed out again. No I/O, no rows.

Invariant: a group is always handed out whole; it is in exactly one of four places, ready,
leased, cooling or gone. A row counts as consumed when it was trained the first time, as
reused after that, and as dropped when it went without having been trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from trinity_dask.buffer.queue.priority import PriorityFn
from trinity_dask.buffer.queue.replay_group import Group, ReadyGroups
from trinity_dask.buffer.queue.row_queue import BatchId, Done, Lease
from trinity_dask.buffer.store.ranges import Ranges
from trinity_dask.buffer.store.row_index import RowIndex

Clock = Callable[[], float]


class ReplayQueue:
    """Groups by falling priority, the oldest first among equals.

    Args:
        priority: what a group is worth.
        capacity: groups that are ready; when a new one comes, the oldest of the least
            important gives way, or the new one itself when it is less important still.
        cooldown_s: seconds from a training until the group is ready again, with its
            priority computed anew; None hands every group out once.
        clock: monotonic seconds.
    """

    bounded_by_batches = False

    def __init__(
        self, priority: PriorityFn, capacity: int, cooldown_s: float | None, clock: Clock
    ) -> None:
        self._priority = priority
        self._capacity = capacity
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._ready = ReadyGroups()
        self._cooling: list[Group] = []
        self._leases: dict[int, tuple[Lease, list[Group]]] = {}
        self._empty: list[BatchId] = []  # batches without rows that were not handed out yet
        self._live: Counter[BatchId] = Counter()  # groups that are not gone
        self._fresh: Counter[BatchId] = Counter()  # rows neither trained nor dropped
        self._done = Done()
        self._saved: dict[BatchId, list[Group]] = {}  # loaded, batch not added yet
        self._next_lease = 0
        self._next_serial = 0
        self._consumed_rows = 0
        self._dropped_rows = 0
        self._reused_rows = 0
        self.closed = False

    # -- events ---------------------------------------------------------------------

    def add(self, batch_id: BatchId, rows: int, index: RowIndex | None = None) -> None:
        """Take in the groups of a batch. Adding a known batch again is a no-op.

        Raises:
            ValueError: the queue is closed, or the state names rows the batch has not.
        """
        if self.closed:
            raise ValueError(f"batch {batch_id!r} came after the queue was closed")
        if batch_id in self._done or batch_id in self._live or batch_id in self._empty:
            return
        groups = self._saved.pop(batch_id, None)
        if groups is None:
            groups = self._new_groups(batch_id, index or RowIndex.unknown(rows))
        if any(group.stop > rows for group in groups):
            raise ValueError(
                f"the saved lease state names rows beyond the {rows} of batch {batch_id!r}: "
                "state and store belong to different runs"
            )
        if not groups:
            self._empty.append(batch_id)
        self._live[batch_id] += len(groups)
        self._fresh[batch_id] += sum(g.rows for g in groups if not g.trained)
        for group in groups:
            self._enter(group)

    def _new_groups(self, batch_id: BatchId, index: RowIndex) -> list[Group]:
        groups = []
        for start, stop, oldest, newest in index.groups():
            groups.append(Group(batch_id, start, stop, oldest, newest, self._next_serial))
            self._next_serial += 1
        return groups

    def _enter(self, group: Group) -> None:
        if group.ready_at is not None:
            self._cooling.append(group)
        else:
            self._make_ready(group)

    def _make_ready(self, group: Group) -> None:
        """Put a group among the ready ones, or let one go when there are too many."""
        group.ready_at = None
        priority = self._priority(group.version, group.use_count, group.serial)
        if priority is None:
            self._let_go(group)
            return
        group.priority = priority
        if len(self._ready) >= self._capacity:
            least = self._ready.least
            if group.priority < least.priority:
                self._let_go(group)
                return
            self._ready.remove(least)
            self._let_go(least)
        self._ready.add(group)

    def _let_go(self, group: Group) -> None:
        if not group.trained:
            self._dropped_rows += group.rows
            self._fresh[group.batch_id] -= group.rows
        self._live[group.batch_id] -= 1
        self._finish(group.batch_id)

    def _finish(self, batch_id: BatchId) -> None:
        if self._live[batch_id] == 0:
            del self._live[batch_id]
            del self._fresh[batch_id]
            self._done.add(batch_id)

    def lease(self, n_rows: int | None, whole_groups: bool = True) -> Lease | None:
        """Lease the fewest best groups that have ``n_rows`` rows together.

        None leases the ready groups of the best group's batch, and a batch of 0 rows once.
        Returns None when there is not enough. Groups stay whole in any case, so up to a
        group less one row more than ``n_rows`` may come.
        """
        self._warm_up()
        if n_rows is None:
            return self._lease_batch()
        if n_rows < 1:
            raise ValueError(f"a lease has at least one row (got n_rows={n_rows})")
        self._pass_empty()
        if self.leasable_rows < n_rows:
            return None
        return self._new_lease(self._ready.take_rows(n_rows))

    def _lease_batch(self) -> Lease | None:
        if self._empty:
            batch_id = self._empty.pop(0)
            return self._new_lease([Group(batch_id, 0, 0, -1, -1, -1)])
        first = next(iter(self._ready), None)
        if first is None:
            return None
        return self._new_lease(self._ready.take_if(lambda g: g.batch_id == first.batch_id))

    def _new_lease(self, groups: list[Group]) -> Lease:
        for group in groups:
            group.use_count += 1
        lease = Lease(
            self._next_lease,
            tuple((g.batch_id, g.start, g.stop) for g in groups),
            sum(g.rows for g in groups),
            tuple(g.use_count for g in groups),
        )
        self._next_lease += 1
        self._leases[lease.lease_id] = (lease, groups)
        return lease

    def _pass_empty(self) -> None:
        for batch_id in self._empty:
            self._finish(batch_id)
        self._empty.clear()

    def can_lease(self, n_rows: int | None) -> bool:
        """Whether :meth:`lease` would give something now."""
        self._warm_up()
        return self.queued_batches > 0 if n_rows is None else self.leasable_rows >= n_rows

    def ack(self, lease_id: int) -> None:
        """The lease is trained. Raises ``KeyError`` for an unknown or settled lease."""
        for group in self._pop(lease_id):
            if group.rows == 0:
                self._finish(group.batch_id)
                continue
            self._count_training(group)
            if self._cooldown_s is None or self.closed:
                self._let_go(group)
            else:
                group.ready_at = self._clock() + self._cooldown_s
                self._cooling.append(group)

    def _count_training(self, group: Group) -> None:
        if group.trained:
            self._reused_rows += group.rows
            return
        group.trained = True
        self._consumed_rows += group.rows
        self._fresh[group.batch_id] -= group.rows

    def release(self, lease_id: int) -> None:
        """The lease was not trained; its groups are as before. Raises like :meth:`ack`."""
        for group in self._pop(lease_id):
            group.use_count -= 1
            if group.rows == 0:
                self._empty.append(group.batch_id)
            else:
                self._ready.add(group)

    def _pop(self, lease_id: int) -> list[Group]:
        if lease_id not in self._leases:
            raise KeyError(f"lease {lease_id} is unknown or was acknowledged or released before")
        return self._leases.pop(lease_id)[1]

    def _warm_up(self) -> None:
        """Groups whose pause is over are ready again, in the order of its end."""
        now = self._clock()
        due = [g for g in self._cooling if g.ready_at is not None and g.ready_at <= now]
        self._cooling = [g for g in self._cooling if g.ready_at is None or g.ready_at > now]
        for group in sorted(due, key=lambda g: (g.ready_at, g.serial)):
            self._make_ready(group)

    def drop_older(self, version: int) -> int:
        """Let go the waiting groups with a token of a known version below ``version``.

        Returns the rows among them that were never trained: they count as dropped.
        """
        before = self._dropped_rows
        old = [*self._ready.take_if(lambda g: 0 <= g.oldest < version)]
        old += [g for g in self._cooling if 0 <= g.oldest < version]
        self._cooling = [g for g in self._cooling if not 0 <= g.oldest < version]
        for group in old:
            self._let_go(group)
        return self._dropped_rows - before

    def close(self) -> None:
        """No batch will be added, and nothing is handed out again, any more."""
        self.closed = True
        cooling, self._cooling = self._cooling, []
        for group in cooling:
            self._let_go(group)

    def next_change_s(self) -> float | None:
        """Seconds until a group becomes ready by itself; None when none will."""
        times = [g.ready_at for g in self._cooling if g.ready_at is not None]
        return max(min(times) - self._clock(), 0.0) if times else None

    # -- counts ---------------------------------------------------------------------

    @property
    def drained(self) -> bool:
        """Closed, and nothing is left."""
        return self.closed and not self._live and not self._empty

    @property
    def leasable_rows(self) -> int:
        """Rows that can be leased now, for the first time or again."""
        return self._ready.rows

    @property
    def returnable_rows(self) -> int:
        """Rows that may become leasable again: leased ones."""
        return sum(lease.rows for lease, _ in self._leases.values())

    @property
    def queued_rows(self) -> int:
        """Rows that wait for their first training."""
        return _rows(g for g in self._ready if not g.trained)

    @property
    def leased_rows(self) -> int:
        """Rows that are leased for the first time."""
        return _rows(g for _, groups in self._leases.values() for g in groups if not g.trained)

    @property
    def consumed_rows(self) -> int:
        """Rows that were trained, each counted once, over the whole lineage."""
        return self._consumed_rows

    @property
    def dropped_rows(self) -> int:
        """Rows that went without a training, over the whole lineage."""
        return self._dropped_rows

    @property
    def reused_rows(self) -> int:
        """Trainings of rows after their first, over the whole lineage."""
        return self._reused_rows

    @property
    def queued_batches(self) -> int:
        """Batches of which something can be leased."""
        return len({group.batch_id for group in self._ready}) + len(self._empty)

    @property
    def unfinished_batches(self) -> int:
        """Batches of which something waits, cools or is leased."""
        return len(set(self._live) | set(self._empty) | self._leased_empty())

    def _leased_empty(self) -> set[BatchId]:
        return {g.batch_id for _, gs in self._leases.values() for g in gs if g.rows == 0}

    @property
    def consumed_batch(self) -> int:
        """The largest b such that no row of an integer batch <= b waits for its first use."""
        waiting = {b for b, rows in self._fresh.items() if rows > 0}
        waiting |= {*self._empty, *self._leased_empty()}
        waiting |= {b for b, groups in self._saved.items() if not all(g.trained for g in groups)}
        limit = min((b for b in waiting if isinstance(b, int)), default=None)
        live = [b for b in self._live if isinstance(b, int) and (limit is None or b < limit)]
        return max([*live, self._done.largest_before(list(waiting))])

    def consumed_batches(self) -> list[BatchId]:
        """Ids with at least one row that was trained or dropped (for checks)."""
        return [*self._done.ids(), *self._saved]

    # -- state ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Every group that is not gone, as JSON. Leased groups count as not leased."""
        now = self._clock()
        leased = [(g, g.use_count - 1) for _, groups in self._leases.values() for g in groups]
        waiting = [(g, g.use_count) for g in (*self._ready, *self._cooling)]
        saved = [(g, g.use_count) for groups in self._saved.values() for g in groups]
        groups = sorted(waiting + leased + saved, key=lambda pair: pair[0].serial)
        return {
            "finished": self._done.numbered.to_list(),
            "finished_named": list(self._done.named),
            "items": [g.to_record(uses, now) for g, uses in groups if g.rows],
            "next_serial": self._next_serial,
            "consumed_rows": self._consumed_rows,
            "dropped_rows": self._dropped_rows,
            "reused_rows": self._reused_rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`; add the committed batches afterwards.

        Raises:
            ValueError: batches were added before, or the state is that of another queue.
        """
        if self._live or self._done:
            raise ValueError("load the lease state before batches are added to the queue")
        if "items" not in state:
            raise ValueError(
                "the saved lease state is that of a first-in-first-out buffer; set "
                "replay_buffer.enable=false again, or start a new job directory"
            )
        self._done = Done(Ranges(state["finished"]), dict.fromkeys(state["finished_named"]))
        for record in state["items"]:
            group = Group.from_record(record, self._clock())
            self._saved.setdefault(group.batch_id, []).append(group)
        self._next_serial = state["next_serial"]
        self._consumed_rows = state["consumed_rows"]
        self._dropped_rows = state["dropped_rows"]
        self._reused_rows = state["reused_rows"]


def _rows(groups: Iterable[Group]) -> int:
    return sum(group.rows for group in groups)

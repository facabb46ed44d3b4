"""A queue of groups by priority, some of them handed out again. No I/O, no rows.

Invariant: a group is always handed out whole; it is in exactly one of four places, ready,
leased, cooling or gone. A row counts as consumed when it was trained the first time, as
reused after that, and as dropped when it went without having been trained. A priority is a
function of (version, uses, the group's number, seed) alone, so a queue that is rebuilt from
its state orders the same groups the same way.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from trinity_dask.buffer.queue.lease_queue import BatchId, Done, Lease, pop_lease
from trinity_dask.buffer.store.manifest import RowIndex
from trinity_dask.registry import Registry

Clock = Callable[[], float]
PRIORITY_FNS: Registry = Registry("priority_fn")


# (version, use_count, serial) -> the priority, or None when the group is not to be kept
PriorityFn = Callable[[int, int, int], Optional[float]]


@PRIORITY_FNS.register_module("linear_decay")
@dataclass
class LinearDecay:
    """p = version − decay · uses; every group is kept."""

    decay: float = 2.0

    def __call__(self, version: int, use_count: int, serial: int) -> Optional[float]:
        return version - self.decay * use_count


@PRIORITY_FNS.register_module("decay_limit_randomization")
class DecayLimitRandomization:
    """p = version − decay · uses + N(0, sigma²); kept while uses < ``use_count_limit``.

    A limit of 0 or less is none. The noise of a group's n-th use is always the same.
    """

    def __init__(
        self, decay: float = 2.0, use_count_limit: int = 3, sigma: float = 0.0, seed: int = 42
    ) -> None:
        if sigma < 0:
            raise ValueError(f"sigma must be >= 0 (got {sigma}); 0 switches the noise off")
        self.decay = decay
        self.use_count_limit = use_count_limit
        self.sigma = sigma
        self.seed = seed

    def __call__(self, version: int, use_count: int, serial: int) -> Optional[float]:
        if 0 < self.use_count_limit <= use_count:
            return None
        priority = version - self.decay * use_count
        if self.sigma > 0:
            noise = np.random.default_rng([self.seed, serial, use_count])
            priority += float(noise.normal(0.0, self.sigma))
        return priority


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
        """Small is first: falling priority and, among equals, arrival."""
        return (-self.priority, self.serial)


class ReplayQueue:
    """Groups by falling priority, the oldest first among equals.

    ``consumed_rows`` (each counted once), ``dropped_rows`` (gone without a training) and
    ``reused_rows`` (trainings of rows after their first) count over the whole lineage.

    Args:
        priority: what a group is worth.
        capacity: groups that are ready; when a new one comes, the oldest of the least
            important gives way, or the new one itself when it is less important still.
        cooldown_s: seconds from a training until the group is ready again, with its
            priority computed anew; None hands every group out once.
        clock: monotonic seconds.
    """

    bounded_by_batches = False  # old rows give way

    def __init__(
        self, priority: PriorityFn, capacity: int, cooldown_s: float | None, clock: Clock
    ) -> None:
        self._priority = priority
        self._capacity = capacity
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._ready: list[Group] = []  # by rank
        self._cooling: list[Group] = []
        self._leases: dict[int, list[Group]] = {}
        self._empty: list[BatchId] = []  # batches without rows that were not handed out yet
        self._live: Counter[BatchId] = Counter()  # groups that are not gone
        self._fresh: Counter[BatchId] = Counter()  # rows neither trained nor dropped
        self._done = Done()
        self._saved: dict[BatchId, list[Group]] = {}  # loaded, batch not added yet
        self._next_lease = 0
        self._next_serial = 0
        self.consumed_rows = 0
        self.dropped_rows = 0
        self.reused_rows = 0
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
            groups = []
            for start, stop, oldest, newest in (index or RowIndex.unknown(rows)).groups():
                groups.append(Group(batch_id, start, stop, oldest, newest, self._next_serial))
                self._next_serial += 1
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
            # the oldest of the least important ones
            lowest = self._ready[-1].rank[0]
            place = bisect_left(self._ready, lowest, key=lambda g: g.rank[0])
            if group.priority < self._ready[place].priority:
                self._let_go(group)
                return
            self._let_go(self._ready.pop(place))
        insort(self._ready, group, key=lambda g: g.rank)

    def _let_go(self, group: Group) -> None:
        if not group.trained:
            self.dropped_rows += group.rows
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
        groups: list[Group] = []
        if n_rows is None:
            if self._empty:
                groups = [Group(self._empty.pop(0), 0, 0, -1, -1, -1)]
            elif self._ready:
                best = self._ready[0].batch_id
                groups = [g for g in self._ready if g.batch_id == best]
                self._ready = [g for g in self._ready if g.batch_id != best]
        elif n_rows < 1:
            raise ValueError(f"a lease has at least one row (got n_rows={n_rows})")
        else:
            for batch_id in self._empty:
                self._finish(batch_id)
            self._empty.clear()
            if self.leasable_rows >= n_rows:
                count = rows = 0
                while rows < n_rows:
                    rows += self._ready[count].rows
                    count += 1
                groups, self._ready = self._ready[:count], self._ready[count:]
        if not groups:
            return None
        for group in groups:
            group.use_count += 1
        parts = tuple((g.batch_id, g.start, g.stop) for g in groups)
        uses = tuple(g.use_count for g in groups)
        lease = Lease(self._next_lease, parts, sum(g.rows for g in groups), uses)
        self._next_lease += 1
        self._leases[lease.lease_id] = groups
        return lease

    def can_lease(self, n_rows: int | None) -> bool:
        """Whether :meth:`lease` would give something now."""
        self._warm_up()
        return self.queued_batches > 0 if n_rows is None else self.leasable_rows >= n_rows

    def ack(self, lease_id: int) -> None:
        """The lease is trained.

        Raises:
            KeyError: an unknown lease, or one that was acknowledged or released before.
        """
        for group in pop_lease(self._leases, lease_id):
            if group.rows == 0:
                self._finish(group.batch_id)
                continue
            if group.trained:
                self.reused_rows += group.rows
            else:
                group.trained = True
                self.consumed_rows += group.rows
                self._fresh[group.batch_id] -= group.rows
            if self._cooldown_s is None or self.closed:
                self._let_go(group)
            else:
                group.ready_at = self._clock() + self._cooldown_s
                self._cooling.append(group)

    def release(self, lease_id: int) -> None:
        """The lease was not trained; its groups are as before. Raises like :meth:`ack`."""
        for group in pop_lease(self._leases, lease_id):
            group.use_count -= 1
            if group.rows == 0:
                self._empty.append(group.batch_id)
            else:
                insort(self._ready, group, key=lambda g: g.rank)

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
        before = self.dropped_rows
        old = [g for g in (*self._ready, *self._cooling) if 0 <= g.oldest < version]
        self._ready = [g for g in self._ready if not 0 <= g.oldest < version]
        self._cooling = [g for g in self._cooling if not 0 <= g.oldest < version]
        for group in old:
            self._let_go(group)
        return self.dropped_rows - before

    def close(self) -> None:
        """No batch will be added, and nothing is handed out again, any more."""
        self.closed = True
        cooling, self._cooling = self._cooling, []
        for group in cooling:
            self._let_go(group)

    def is_finished(self, batch_id: BatchId) -> bool:
        """Whether no row of the batch is handed out any more."""
        return batch_id in self._done

    def next_change_s(self) -> float | None:
        """Seconds until a group becomes ready by itself; None when none will."""
        times = [g.ready_at for g in self._cooling if g.ready_at is not None]
        return max(min(times) - self._clock(), 0.0) if times else None

    # -- counts ---------------------------------------------------------------------

    def left_rows(self, n_rows: int | None) -> int | None:
        """Rows that remain when :meth:`lease` will never give anything again; else None.

        None also while a release could still bring enough rows back.
        """
        if n_rows is None:
            return self.leasable_rows if self.closed and self.unfinished_batches == 0 else None
        leased = sum(group.rows for groups in self._leases.values() for group in groups)
        ended = self.closed and self.leasable_rows + leased < n_rows
        return self.leasable_rows if ended else None

    @property
    def leasable_rows(self) -> int:
        """Rows that can be leased now, for the first time or again."""
        return sum(group.rows for group in self._ready)

    @property
    def queued_rows(self) -> int:
        """Rows that wait for their first training."""
        return sum(group.rows for group in self._ready if not group.trained)

    @property
    def leased_rows(self) -> int:
        """Rows that are leased for the first time."""
        return sum(g.rows for groups in self._leases.values() for g in groups if not g.trained)

    @property
    def queued_batches(self) -> int:
        """Batches of which something can be leased."""
        return len({group.batch_id for group in self._ready}) + len(self._empty)

    @property
    def unfinished_batches(self) -> int:
        """Batches of which something waits, cools or is leased."""
        return len(set(self._live) | set(self._empty) | self._leased_empty())

    def _leased_empty(self) -> set[BatchId]:
        return {g.batch_id for groups in self._leases.values() for g in groups if g.rows == 0}

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
        leased = [(g, g.use_count - 1) for groups in self._leases.values() for g in groups]
        waiting = [(g, g.use_count) for g in (*self._ready, *self._cooling)]
        saved = [(g, g.use_count) for groups in self._saved.values() for g in groups]
        items = []
        for g, uses in sorted(waiting + leased + saved, key=lambda pair: pair[0].serial):
            # the pause that is left instead of a time of this process' clock
            left = None if g.ready_at is None else max(g.ready_at - now, 0.0)
            place = [g.batch_id, g.start, g.stop, g.oldest, g.version, g.serial]
            if g.rows:
                items.append([*place, uses, g.trained, left])
        return {
            "finished": self._done.numbered.to_list(),
            "finished_named": list(self._done.named),
            "items": items,
            "next_serial": self._next_serial,
            "consumed_rows": self.consumed_rows,
            "dropped_rows": self.dropped_rows,
            "reused_rows": self.reused_rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`; add the committed batches afterwards.

        Raises:
            ValueError: batches were added before, or the state is that of another queue.
        """
        if self._live or self._done.ids():
            raise ValueError("load the lease state before batches are added to the queue")
        if "items" not in state:
            raise ValueError(
                "the saved lease state is that of a first-in-first-out buffer; set "
                "replay_buffer.enable=false again, or start a new job directory"
            )
        self._done = Done.from_state(state)
        for *fields, left in state["items"]:
            group = Group(*fields)
            group.ready_at = None if left is None else self._clock() + left
            self._saved.setdefault(group.batch_id, []).append(group)
        self._next_serial = state["next_serial"]
        self.consumed_rows = state["consumed_rows"]
        self.dropped_rows = state["dropped_rows"]
        self.reused_rows = state["reused_rows"]

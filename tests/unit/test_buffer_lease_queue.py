"""The lease queue: every committed row is consumed exactly once, whatever happens."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trinity_dask.buffer.queue.lease_queue import Lease, LeaseQueue
from trinity_dask.buffer.store.ranges import Ranges


def rows_of(lease: Lease) -> list[tuple[Any, int]]:
    return [(batch, row) for batch, start, stop in lease.parts for row in range(start, stop)]


class QueueLineage(RuleBasedStateMachine):
    """A store, a queue over it, a trainer, checkpoints of both, and crashes.

    A crash forgets queue and leases; the rows trained after the last checkpoint are
    forgotten with the weights they made, so the model forgets them too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store: list[tuple[int | str, int]] = []
        self.queue = LeaseQueue()
        self.leases: list[Lease] = []
        self.trained: Counter[tuple[Any, int]] = Counter()
        self.saved = (json.dumps(self.queue.state_dict()), Counter(self.trained))
        self.next_batch = 1

    @rule(rows=st.integers(0, 5), named=st.booleans())
    def commit(self, rows: int, named: bool) -> None:
        batch: int | str = f"b{self.next_batch}" if named else self.next_batch
        self.next_batch += 1
        self.store.append((batch, rows))
        self.queue.add(batch, rows)

    @precondition(lambda self: self.store)
    @rule(data=st.data())
    def commit_again(self, data: Any) -> None:
        self.queue.add(*data.draw(st.sampled_from(self.store)))

    @rule(n_rows=st.none() | st.integers(1, 7))
    def lease(self, n_rows: int | None) -> None:
        queued, batches = self.queue.queued_rows, self.queue.queued_batches
        possible = self.queue.can_lease(n_rows)
        lease = self.queue.lease(n_rows)
        assert (lease is not None) == possible
        if n_rows is None:
            assert (lease is None) == (batches == 0)
        else:
            assert (lease is None) == (queued < n_rows)
            assert lease is None or lease.rows == n_rows
        if lease is not None:
            assert lease.rows == len(rows_of(lease))
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def ack(self, data: Any) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.queue.ack(lease.lease_id)
        self.trained.update(rows_of(lease))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self.queue.release(
            self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))).lease_id
        )

    @rule()
    def checkpoint(self) -> None:
        self.saved = (json.dumps(self.queue.state_dict()), Counter(self.trained))

    @rule()
    def crash_and_resume(self) -> None:
        state, self.trained = self.saved[0], Counter(self.saved[1])
        self.queue, self.leases = LeaseQueue(), []
        self.queue.load_state_dict(json.loads(state))
        for batch, rows in self.store:
            self.queue.add(batch, rows)

    @invariant()
    def accounts_balance(self) -> None:
        assert max(self.trained.values(), default=1) == 1
        assert self.queue.consumed_rows == sum(self.trained.values())
        assert self.queue.leased_rows == sum(lease.rows for lease in self.leases)
        total = sum(rows for _, rows in self.store)
        queue = self.queue
        assert queue.queued_rows + queue.leased_rows + queue.consumed_rows == total

    @invariant()
    def consumed_batch_is_a_prefix(self) -> None:
        b = self.queue.consumed_batch
        unfinished = [
            batch
            for batch, rows in self.store
            if isinstance(batch, int) and any((batch, r) not in self.trained for r in range(rows))
        ]
        assert all(batch > b for batch in unfinished)

    def teardown(self) -> None:
        """Drain: every row that was ever committed is consumed exactly once."""
        for lease in self.leases:
            self.queue.release(lease.lease_id)
        self.queue.close()
        order = []
        while (lease := self.queue.lease(None)) is not None:
            order += rows_of(lease)
            self.queue.ack(lease.lease_id)
            self.trained.update(rows_of(lease))
        committed = [(batch, row) for batch, rows in self.store for row in range(rows)]
        assert self.trained == Counter(committed)
        assert order == [row for row in committed if row in set(order)]  # first in, first out
        assert self.queue.left_rows(None) == 0


QueueLineage.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)
test_every_committed_row_is_consumed_exactly_once = QueueLineage.TestCase


def filled(*rows: int) -> LeaseQueue:
    queue = LeaseQueue()
    for batch, count in enumerate(rows, 1):
        queue.add(batch, count)
    return queue


def test_whole_batches_come_in_order_with_the_empty_one() -> None:
    queue = filled(3, 0, 2)
    leases = [queue.lease(None) for _ in range(4)]
    assert [lease and (lease.parts, lease.rows) for lease in leases] == [
        (((1, 0, 3),), 3),
        (((2, 0, 0),), 0),
        (((3, 0, 2),), 2),
        None,
    ]


def test_exact_rows_span_batches_and_too_few_give_nothing() -> None:
    queue = filled(3, 0, 2)
    lease = queue.lease(4)
    assert lease is not None
    assert lease.parts == ((1, 0, 3), (3, 0, 1))
    assert queue.lease(2) is None
    assert queue.queued_rows == 1  # the failed lease took nothing


def test_release_returns_rows_to_their_place() -> None:
    queue = filled(4, 4)
    first, second = queue.lease(3), queue.lease(3)
    assert first is not None
    assert second is not None
    queue.release(first.lease_id)
    again = queue.lease(5)
    assert again is not None
    assert again.parts == ((1, 0, 3), (2, 2, 4))
    assert second.parts == ((1, 3, 4), (2, 0, 2))


def test_consumed_batch_waits_for_the_slowest() -> None:
    queue = filled(1, 1, 1)
    leases = [queue.lease(None) for _ in range(3)]
    seen = []
    for lease in (leases[1], leases[0], leases[2]):
        assert lease is not None
        queue.ack(lease.lease_id)
        seen.append(queue.consumed_batch)
    assert seen == [0, 2, 3]


def test_empty_batches_count_as_consumed_when_rows_are_leased() -> None:
    queue = filled(0, 0)
    assert queue.lease(1) is None
    assert queue.consumed_batch == 2
    queue.close()
    assert queue.left_rows(None) == 0


def test_state_stays_small_over_many_batches() -> None:
    queue = LeaseQueue()
    for batch in range(1, 2001):
        queue.add(batch, 64)
        lease = queue.lease(None)
        assert lease is not None
        queue.ack(lease.lease_id)
    assert len(json.dumps(queue.state_dict())) < 200
    assert queue.consumed_batch == 2000


def test_misuse_is_refused() -> None:
    queue = filled(2)
    lease = queue.lease(2)
    assert lease is not None
    queue.ack(lease.lease_id)
    with pytest.raises(KeyError, match="acknowledged or released before"):
        queue.ack(lease.lease_id)
    with pytest.raises(ValueError, match="at least one row"):
        queue.lease(0)
    with pytest.raises(ValueError, match="before batches are added"):
        queue.load_state_dict(LeaseQueue().state_dict())
    queue.close()
    with pytest.raises(ValueError, match="after the queue was closed"):
        queue.add(2, 1)


def test_state_of_another_run_is_refused() -> None:
    queue = filled(5)
    lease = queue.lease(4)
    assert lease is not None
    queue.ack(lease.lease_id)
    other = LeaseQueue()
    other.load_state_dict(queue.state_dict())
    with pytest.raises(ValueError, match="state and store belong to different runs"):
        other.add(1, 3)


def test_ranges_merge_take_and_complement() -> None:
    ranges = Ranges([(5, 8), (0, 2), (2, 5)])
    assert ranges.to_list() == [[0, 8]]
    assert ranges.take(3) == [(0, 3)]
    assert ranges.complement(10).to_list() == [[0, 3], [8, 10]]
    assert (ranges.largest_below(7), ranges.largest_below(3), ranges.stop) == (6, None, 8)
    assert [n in ranges for n in (2, 3, 7, 8)] == [False, True, True, False]
    with pytest.raises(ValueError, match="overlaps"):
        ranges.add(7, 9)

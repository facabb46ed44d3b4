"""Priority and replay: groups stay whole, accounts balance, the state is complete."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trinity_dask.buffer.queue.lease_queue import Lease, LeaseQueue
from trinity_dask.buffer.queue.replay_queue import DecayLimitRandomization, LinearDecay, ReplayQueue
from trinity_dask.buffer.store.manifest import RowIndex


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def index(version: int, *sizes: int) -> RowIndex:
    return RowIndex(sizes, (version,) * len(sizes), (version,) * len(sizes))


def batches_of(lease: Lease | None) -> list[Any]:
    assert lease is not None
    return [part[0] for part in lease.parts]


def filled(queue: ReplayQueue, versions: list[int], size: int = 2) -> ReplayQueue:
    for version in versions:
        queue.add(version + 1, size, index(version, size))
    return queue


def test_new_and_unused_first_and_again_after_the_pause() -> None:
    clock = Time()
    queue = filled(ReplayQueue(LinearDecay(0.1), 4, 1.0, clock), [0, 1, 2, 3, 4])
    assert queue.dropped_rows == 2  # the capacity is 4 groups, and version 0 the least
    first = queue.lease(4)
    assert batches_of(first) == [5, 4]
    second = queue.lease(4)
    assert batches_of(second) == [3, 2]
    assert first is not None
    assert second is not None
    assert first.use_counts == second.use_counts == (1, 1)
    for lease in (first, second):
        queue.ack(lease.lease_id)
    assert not queue.can_lease(1)
    assert queue.next_change_s() == 1.0
    clock.now = 1.0
    third = queue.lease(4)
    assert batches_of(third) == [5, 4]
    assert third is not None
    assert third.use_counts == (2, 2)


def test_without_a_pause_every_group_comes_once() -> None:
    queue = filled(ReplayQueue(LinearDecay(), 10, None, Time()), [3, 1, 2])
    order = []
    while (lease := queue.lease(2)) is not None:
        order += batches_of(lease)
        queue.ack(lease.lease_id)
    assert order == [4, 3, 2]
    assert (queue.consumed_rows, queue.reused_rows, queue.consumed_batch) == (6, 0, 4)


def test_among_equals_the_oldest_comes_first_and_the_oldest_gives_way() -> None:
    queue = ReplayQueue(LinearDecay(), 2, None, Time())
    for batch in (1, 2, 3):
        queue.add(batch, 2, index(7, 2))
    assert batches_of(queue.lease(4)) == [2, 3]
    low = filled(ReplayQueue(LinearDecay(), 1, None, Time()), [5])
    low.add(9, 2, index(4, 2))  # less important than all there is
    assert (batches_of(low.lease(2)), low.dropped_rows) == ([6], 2)


def test_the_use_limit_ends_a_groups_life() -> None:
    clock = Time()
    queue = filled(ReplayQueue(DecayLimitRandomization(use_count_limit=3), 9, 0.0, clock), [1])
    uses = []
    while (lease := queue.lease(2)) is not None:
        uses.append(lease.use_counts)
        queue.ack(lease.lease_id)
    assert uses == [(1,), (2,), (3,)]
    assert (queue.consumed_rows, queue.reused_rows, queue.unfinished_batches) == (2, 4, 0)


def test_noise_is_the_same_after_a_resume_and_differs_between_groups() -> None:
    noisy = DecayLimitRandomization(sigma=1.0)
    assert noisy(3, 0, 7) == DecayLimitRandomization(sigma=1.0)(3, 0, 7) != noisy(3, 0, 8)
    assert noisy(3, 3, 7) is None
    assert DecayLimitRandomization(use_count_limit=0)(3, 99, 7) == 3 - 2.0 * 99


def test_fault_33_four_groups_in_four_groups_out() -> None:
    queue = ReplayQueue(LinearDecay(), 10, None, Time())
    queue.add(1, 14, index(0, 4, 4, 2, 4))
    lease = queue.lease(12)
    assert lease is not None
    assert lease.parts == ((1, 0, 4), (1, 4, 8), (1, 8, 10), (1, 10, 14))
    assert len(set(lease.parts)) == 4


def test_groups_are_never_torn() -> None:
    queue = ReplayQueue(LinearDecay(), 10, None, Time())
    queue.add(1, 10, index(0, 5, 5))
    lease = queue.lease(3)
    assert lease is not None
    assert (lease.rows, queue.leasable_rows) == (5, 5)


def test_old_groups_are_dropped_in_both_queues() -> None:
    both: list[Any] = [LeaseQueue(), ReplayQueue(LinearDecay(), 10, None, Time())]
    for queue in both:
        for version in range(4):
            queue.add(version + 1, 2, index(version, 2))
        queue.add(9, 1, index(-1, 1))  # of unknown version
        held = queue.lease(2)
        assert queue.drop_older(3) == (4 if isinstance(queue, LeaseQueue) else 6)
        queue.release(held.lease_id)
        queue.drop_older(3)
        assert (queue.dropped_rows, queue.queued_rows, queue.consumed_rows) == (6, 3, 0)
        assert queue.consumed_batch == 3


def test_whole_groups_in_order_of_arrival() -> None:
    queue = LeaseQueue()
    queue.add(1, 10, index(0, 4, 4, 2))
    lease = queue.lease(5, whole_groups=True)
    assert lease is not None
    assert lease.parts == ((1, 0, 8),)
    torn = queue.lease(1)
    assert torn is not None
    assert torn.parts == ((1, 8, 9),)
    queue.release(torn.lease_id)
    assert queue.lease(1, whole_groups=True) is not None
    assert queue.queued_rows == 0


def test_the_states_of_the_two_queues_are_not_mixed_up() -> None:
    replay, plain = ReplayQueue(LinearDecay(), 9, None, Time()), LeaseQueue()
    with pytest.raises(ValueError, match="enable=false"):
        ReplayQueue(LinearDecay(), 9, None, Time()).load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="enable=true"):
        LeaseQueue().load_state_dict(replay.state_dict())


class ReplayLineage(RuleBasedStateMachine):
    """A store, a replay queue, a trainer and crashes that forget what was not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Time()
        self.store: list[tuple[int, int, RowIndex]] = []
        self.queue = self.new()
        self.leases: list[Lease] = []
        self.trained: Counter[tuple[int, int]] = Counter()
        self.saved = (json.dumps(self.queue.state_dict()), Counter(self.trained))
        self.next_batch = 1

    def new(self) -> ReplayQueue:
        return ReplayQueue(DecayLimitRandomization(0.5, 2), 6, 1.0, self.clock)

    @rule(sizes=st.lists(st.integers(1, 3), max_size=3), version=st.integers(-1, 9))
    def commit(self, sizes: list[int], version: int) -> None:
        batch, self.next_batch = self.next_batch, self.next_batch + 1
        self.store.append((batch, sum(sizes), index(version, *sizes)))
        self.queue.add(*self.store[-1])
        self.queue.add(*self.store[-1])

    @rule(n_rows=st.none() | st.integers(1, 7))
    def lease(self, n_rows: int | None) -> None:
        possible = self.queue.can_lease(n_rows)
        lease = self.queue.lease(n_rows)
        assert (lease is not None) == possible
        if lease is not None:
            groups = {(b, a, z) for b, _, i in self.store for a, z, _, _ in i.groups()}
            assert lease.rows == 0 or set(lease.parts) <= groups
            assert len(set(lease.parts)) == len(lease.parts)
            assert n_rows is None or n_rows <= lease.rows <= n_rows + 2
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), good=st.booleans())
    def settle(self, data: Any, good: bool) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if not good:
            self.queue.release(lease.lease_id)
            return
        self.queue.ack(lease.lease_id)
        for batch, start, stop in lease.parts:
            self.trained.update((batch, row) for row in range(start, stop))
        with pytest.raises(KeyError):
            self.queue.ack(lease.lease_id)

    @rule(seconds=st.sampled_from([0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(version=st.integers(0, 9))
    def drop(self, version: int) -> None:
        self.queue.drop_older(version)

    @rule()
    def checkpoint(self) -> None:
        self.saved = (json.dumps(self.queue.state_dict()), Counter(self.trained))

    @rule()
    def crash(self) -> None:
        self.queue, self.leases = self.new(), []
        self.queue.load_state_dict(json.loads(self.saved[0]))
        self.trained = Counter(self.saved[1])
        for entry in self.store:
            self.queue.add(*entry)

    @invariant()
    def every_row_is_in_one_place(self) -> None:
        queue = self.queue
        committed = sum(rows for _, rows, _ in self.store)
        places = (queue.queued_rows, queue.leased_rows, queue.consumed_rows, queue.dropped_rows)
        assert sum(places) == committed
        assert queue.consumed_rows == len(self.trained)
        assert queue.consumed_rows + queue.reused_rows == self.trained.total()
        assert max(self.trained.values(), default=0) <= 2

    @invariant()
    def what_is_through_needs_no_training(self) -> None:
        done = self.queue.consumed_batch
        waiting = [b for b, rows in self.queue._fresh.items() if rows > 0]
        assert all(batch > done for batch in waiting)


TestReplayLineage = ReplayLineage.TestCase
TestReplayLineage.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_closing_hands_nothing_out_again_but_what_waits() -> None:
    clock = Time()
    queue = filled(ReplayQueue(LinearDecay(), 9, 1.0, clock), [0, 1, 2])
    leases = [queue.lease(2), queue.lease(2)]
    assert leases[0] is not None
    queue.ack(leases[0].lease_id)
    queue.close()
    assert queue.next_change_s() is None
    assert leases[1] is not None
    queue.ack(leases[1].lease_id)
    clock.now = 9.0
    last = queue.lease(2)
    assert batches_of(last) == [1]
    assert last is not None
    queue.ack(last.lease_id)
    assert queue.left_rows(None) == 0
    with pytest.raises(ValueError, match="after the queue was closed"):
        queue.add(99, 1)

"""Trainer and explorers under random interleavings, time-outs and deaths, in every style."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.sync.state import (
    REQUIRE_SYNC,
    RUNNING,
    STARVED,
    STOPPED,
    RunningStatus,
    SyncState,
)

STYLES = ("fixed", "trainer_driven", "explorer_driven", "fully_async")
METHODS = ("nccl", "checkpoint", "memory")


@dataclass
class Explorer:
    """What an explorer process would do; ``phase`` is what it awaits."""

    name: str
    explored: int = 0
    phase: str = "exploring"  # exploring | waiting | loading | ending | stopped | dead
    watching: bool = False  # loads beside its rollouts
    needs_trainer: bool = False
    passed: list[tuple[int, int]] = field(default_factory=list)  # (boundary, version)
    offered: int = -1


class World:
    """One trainer and some explorers that follow the protocol; one batch is one train step."""

    def __init__(self, style, method, interval, offset, n_explorers, n_batches, capacity):
        self.state = SyncState(style, method, interval, offset)
        self.n_batches, self.capacity = n_batches, capacity
        self.explorers = [Explorer(f"explorer-{i}") for i in range(n_explorers)]
        for explorer in self.explorers:
            self.state.explorer_joined(explorer.name)
        self.state.trainer_joined(0)
        self.queue = self.trained = 0
        self.trainer = "training"  # training | blocked | starved | stopped | dead
        for explorer in self.explorers:
            self.state.load_ended(explorer.name, 0)

    # explorer -------------------------------------------------------------------------
    def explore(self, e):
        if e.phase != "exploring":
            return False
        if e.explored == self.n_batches:
            e.phase = "ending"
            self.state.explorer_waiting(e.name, e.explored - self.state.offset, final=True)
            return True
        # a buffer that nobody empties has its own deadline
        if self.queue >= self.capacity and self.trainer != "dead":
            return False
        e.explored += 1
        self.queue += 1
        self.look()
        if self.state.should_sync(e.name, e.explored):
            e.phase = "waiting"
            self.state.explorer_waiting(e.name, max(e.explored - self.state.offset, 0))
        return True

    def answer(self, e):
        self.look()
        if e.phase not in ("waiting", "ending") or not self.state.may_pass(e.name):
            return False
        version = self.state.may_fetch(e.name)
        if version is None:
            self.end_wait(e)
        else:
            self.start_load(e, version)
            e.phase = "loading" if e.phase == "waiting" else "ending"
        return True

    def start_load(self, e, version):
        e.offered = version
        e.needs_trainer = version > self.state.published
        self.state.sending += e.needs_trainer
        self.state.explorers[e.name].loading = version

    def watch(self, e):
        free = self.state.style == "fully_async" and e.phase == "exploring" and not e.watching
        self.state.explorers[e.name].watching = free
        if not free or self.state.may_fetch(e.name) is None:
            return False
        self.start_load(e, self.state.may_fetch(e.name))
        self.state.explorers[e.name].watching = False
        e.watching = True
        return True

    def loaded(self, e, ok=True):
        if self.state.explorers[e.name].loading is None:
            return False
        self.release(e)
        if ok and self.state.method != "nccl":
            self.state.version_published(e.offered)
        self.state.load_ended(e.name, e.offered if ok else None)
        if e.watching:
            e.watching = False
        else:
            self.end_wait(e)
        return True

    def release(self, e):
        self.state.sending -= e.needs_trainer
        e.needs_trainer = False

    def end_wait(self, e):
        self.state.explorer_running(e.name, self.state.next_required(e.explored))
        if e.phase == "ending":
            self.state.explorer_stopped(e.name)
            e.phase = "stopped"
        else:
            e.passed.append((e.explored, self.state.explorers[e.name].version))
            e.phase = "exploring"

    def explorer_times_out(self, e):
        loading = self.state.explorers[e.name].loading is not None
        if e.phase not in ("waiting", "ending") or loading:
            return False
        self.end_wait(e)
        return True

    def explorer_dies(self, e):
        if e.phase in ("stopped", "dead"):
            return False
        self.release(e)
        self.state.explorer_stopped(e.name)
        self.state.load_ended(e.name, None)
        e.phase, e.watching = "dead", False
        return True

    # trainer --------------------------------------------------------------------------
    def train(self):
        if self.trainer != "training" or not self.queue:
            return False
        self.queue -= 1
        self.trained += 1
        if self.state.sync_due(self.trained):
            self.state.trainer_at_sync(self.trained, self.trained)
            if self.state.should_publish:
                self.state.version_published(self.trained)
            self.trainer = "blocked"
        return True

    def bring(self):
        name = self.state.receiver
        if name is None:
            return False
        assert self.trainer == "blocked"
        (e,) = (e for e in self.explorers if e.name == name)
        position = self.state.explorers[name]
        assert position.watching or e.phase in ("waiting", "ending"), "it stands not ready"
        self.start_load(e, self.state.trainer_version)
        if position.watching:
            position.watching, e.watching = False, True
        else:
            e.phase = "loading" if e.phase == "waiting" else "ending"
        return True

    def go_on(self):
        self.look()
        if self.trainer != "blocked" or not self.state.trainer_may_continue:
            return False
        self.state.trainer_running()
        self.trainer = "training"
        return True

    def starve(self):
        if self.trainer != "training" or self.queue:
            return False
        self.state.trainer_starved(self.trained, self.trained)
        self.trainer = "starved"
        return True

    def resume(self):
        if self.trainer != "starved" or self.state.sending:
            return False
        closed = all(e.phase in ("ending", "stopped", "dead") for e in self.explorers)
        if self.queue:
            self.state.trainer_running()
            self.trainer = "training"
        elif closed:
            self.state.trainer_stopped(self.trained, self.trained)
            self.trainer = "stopped"
        return bool(self.queue) or closed

    def trainer_times_out(self):
        if self.trainer != "blocked" or self.state.sending:
            return False
        self.state.trainer_running()
        self.trainer = "training"
        return True

    def trainer_dies(self):
        if self.trainer in ("stopped", "dead"):
            return False
        self.state.trainer_died()
        self.trainer = "dead"
        return True

    # all of it ------------------------------------------------------------------------
    def look(self):
        self.state.rows_available = self.queue > 0
        self.state.writes_blocked = self.queue >= self.capacity

    @property
    def ended(self):
        explorers = all(e.phase in ("stopped", "dead") for e in self.explorers)
        return explorers and self.trainer in ("stopped", "dead")

    def moves(self):
        alone = [self.train, self.bring, self.go_on, self.starve, self.resume]
        each = [self.explore, self.answer, self.watch, self.loaded]
        return alone + [lambda m=m, e=e: m(e) for e in self.explorers for m in each]

    def faults(self):
        alone = [self.trainer_times_out, self.trainer_dies]
        each = [self.explorer_times_out, self.explorer_dies, lambda e: self.loaded(e, ok=False)]
        return alone + [lambda m=m, e=e: m(e) for e in self.explorers for m in each]

    def check(self, before):
        state = self.state
        for e in self.explorers:
            position = state.explorers[e.name]
            assert position.version >= before[e.name], "a version fell"
            assert position.version <= self.trained
            waits = e.phase in ("waiting", "loading", "ending")
            assert (position.status is REQUIRE_SYNC) == waits, "a status leaked"
            assert (position.status is STOPPED) == (e.phase in ("stopped", "dead"))
        assert (state.trainer is REQUIRE_SYNC) == (self.trainer == "blocked")
        assert state.published >= before["published"]
        assert sum(state.explorer_status_counts.values()) == len(self.explorers)
        assert state.sending >= 0
        assert not (state.sending and state.trainer is RUNNING), "weights read while they change"

    def snapshot(self):
        versions = {name: e.version for name, e in self.state.explorers.items()}
        return {**versions, "published": self.state.published}


@st.composite
def worlds(draw):
    style, method = draw(st.sampled_from(STYLES)), draw(st.sampled_from(METHODS))
    interval, offset = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    n_explorers = 1 if method == "nccl" else draw(st.integers(1, 3))
    # in style fixed the explorer must be able to commit up to its boundary
    least = n_explorers * (interval + offset) if style == "fixed" else 1
    capacity = draw(st.integers(least, least + 3))
    return World(style, method, interval, offset, n_explorers, draw(st.integers(1, 8)), capacity)


def drive(world, choices, fault_at=()):
    """Play enabled moves in the order of ``choices`` to the end; faults where they are said."""
    order, faults = iter(choices), iter(fault_at)
    strike = next(faults, None)
    moves = world.moves()
    for turn in range(2000):
        if world.ended:
            return
        before = world.snapshot()
        if strike is not None and turn >= strike[0]:
            kinds = world.faults()
            kinds[strike[1] % len(kinds)]()
            strike = next(faults, None)
            world.check(before)
            continue
        first = next(order, turn)
        if not any(moves[(first + k) % len(moves)]() for k in range(len(moves))):
            raise AssertionError(f"everybody waits: {world.state} {world.explorers}")
        world.check(before)
    raise AssertionError("it does not end")


@settings(max_examples=250, deadline=None)
@given(world=worlds(), choices=st.lists(st.integers(0, 15), max_size=150))
def test_any_interleaving_ends_without_a_time_out(world: World, choices: list[int]) -> None:
    drive(world, choices)
    assert world.trained == world.n_batches * len(world.explorers)
    for explorer in world.explorers:
        # the end takes the last weights there are
        assert world.state.explorers[explorer.name].version == world.trained or (
            len(world.explorers) > 1
        )
    if world.state.style == "fixed" and len(world.explorers) == 1:
        for boundary, version in world.explorers[0].passed:
            assert version >= boundary - world.state.offset
            if world.state.offset == 0:
                assert version == boundary  # strictly on-policy: neither older nor newer


@settings(max_examples=300, deadline=None)
@given(
    world=worlds(),
    choices=st.lists(st.integers(0, 15), max_size=100),
    fault_at=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=6
    ).map(sorted),
)
def test_nobody_waits_for_ever_for_the_late_and_the_dead(world, choices, fault_at) -> None:
    drive(world, choices, fault_at)
    assert all(not e.live for e in world.state.explorers.values())
    assert world.state.trainer is STOPPED


# single decisions -------------------------------------------------------------------------
def alone(style: str = "fixed", method: str = "nccl", version: int = 0) -> SyncState:
    state = SyncState(style, method)
    state.trainer_joined(version, version)
    state.explorer_joined("e")
    state.load_ended("e", version)
    return state


def test_a_starved_trainer_lets_the_explorer_pass_only_while_no_rows_wait() -> None:
    state = alone(version=3)
    state.trainer_starved(3, 3)
    state.explorer_waiting("e", 4)
    state.rows_available = True
    assert not state.answered("e")
    state.rows_available = False
    state.trainer_resuming()  # they are in its hands already
    assert not state.answered("e")
    state.trainer_starved(3, 3)
    assert state.answered("e")
    assert state.offer("e") is None


def test_a_stopped_explorer_releases_the_trainer() -> None:
    state = alone()
    state.trainer_at_sync(1, 1)
    assert not state.trainer_may_continue
    state.explorer_stopped("e")
    assert state.trainer_may_continue


def test_versions_never_fall() -> None:
    state = alone()
    state.trainer_at_sync(5, 5)
    with pytest.raises(AssertionError, match="fell from 5 to 4"):
        state.trainer_at_sync(4, 5)
    state.load_ended("e", 5)
    with pytest.raises(AssertionError, match="from version 5 to 4"):
        state.load_ended("e", 4)
    state.version_published(3)
    assert state.published == 3
    state.version_published(2)
    assert state.published == 3


PULL_RULE = [(-1, 0, None, 0), (-1, 3, 3, 3), (2, 4, 4, 4), (3, 3, None, 3)]


@pytest.mark.parametrize(("current", "published", "transfer", "then"), PULL_RULE)
def test_the_pull_rule(current: int, published: int, transfer: int | None, then: int) -> None:
    state = SyncState("trainer_driven", "checkpoint")
    state.explorer_joined("e")
    state.explorers["e"].version = current
    state.version_published(published)
    assert state.offer("e") == transfer
    if transfer is not None:
        state.explorers["e"].loading = transfer
        state.load_ended("e", transfer)
    assert max(state.explorers["e"].version, 0) == then


# who asks when, by style (rows: RUNNING trainer, trainer at its sync point with news)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("style", "busy", "at_sync"),
    [
        ("fixed", True, True),
        ("trainer_driven", False, True),
        ("explorer_driven", True, True),
        ("fully_async", False, False),
    ],
)
def test_who_asks_at_a_boundary(style: str, method: str, busy: bool, at_sync: bool) -> None:
    state = alone(style, method)
    assert state.should_sync("e", 1) is busy
    state.trainer_at_sync(1, 1)
    assert state.should_sync("e", 1) is at_sync
    state.offset = 1
    assert state.should_sync("e", 1) is False  # no boundary


@pytest.mark.parametrize("method", METHODS)
def test_an_explorer_driven_trainer_stops_only_for_one_that_waits(method: str) -> None:
    state = alone("explorer_driven", method)
    assert not state.sync_due(1)
    state.explorer_waiting("e", 1)
    assert state.sync_due(2)
    state.trainer_at_sync(2, 2)
    assert state.answered("e")
    assert state.offer("e") == 2


def test_a_trainer_that_writes_files_does_not_wait() -> None:
    for style in ("trainer_driven", "fully_async"):
        state = alone(style, "memory")
        state.trainer_at_sync(1, 1)
        assert state.should_publish
        assert state.trainer_may_continue
        assert not alone(style, "nccl").should_publish


def test_two_explorers_share_files_and_nobody_waits_for_the_slower_one() -> None:
    state = alone("fixed", "checkpoint")
    state.explorer_joined("f")
    state.load_ended("f", 0)
    state.trainer_at_sync(1, 1)
    state.version_published(1)
    assert state.trainer_may_continue
    state.explorer_waiting("e", 1)
    assert state.answered("e")
    assert state.offer("e") == 1
    state.load_ended("e", 1)
    state.explorer_waiting("e", 2)
    assert not state.answered("e")  # only newer weights than its own are an answer
    state.trainer_starved(1, 1)
    assert not state.answered("e")  # "f" still makes rows
    state.explorer_stopped("f")
    assert state.answered("e")


def test_nccl_has_one_explorer() -> None:
    state = alone()
    with pytest.raises(ValueError, match=r"'f' cannot join: .*nccl serves one"):
        state.explorer_joined("f")
    state.explorer_stopped("e")
    state.explorer_joined("f")
    assert state.explorers["f"].version == -1


def test_a_trainer_behind_a_full_buffer_goes_on_and_is_due_at_its_next_step() -> None:
    state = alone("trainer_driven")
    state.interval = 4
    state.trainer_at_sync(4, 4)
    assert not state.trainer_may_continue
    state.writes_blocked = True  # the explorer cannot reach its boundary before a batch is used
    assert state.trainer_may_continue
    state.trainer_running()
    assert state.sync_due(5)
    state.trainer_at_sync(5, 5)
    state.load_ended("e", 5)
    state.trainer_running()
    assert not state.sync_due(6)


def test_the_dead_are_not_running() -> None:
    state = alone()
    state.trainer_at_sync(2, 2)
    state.trainer_died()
    assert state.trainer is STOPPED
    state.explorer_waiting("e", 2)
    assert state.answered("e")
    assert state.offer("e") is None  # nobody is left to send version 2
    state.explorer_stopped("e")
    assert state.explorer_status_counts == {RUNNING: 0, REQUIRE_SYNC: 0, STOPPED: 1}


def test_statuses_have_the_names_people_know() -> None:
    assert [s.value for s in RunningStatus] == ["running", "require_sync", "starved", "stopped"]
    assert STARVED not in SyncState().explorer_status_counts


# staleness --------------------------------------------------------------------------------
@pytest.mark.parametrize(("bound", "allowed"), [(0, 1), (1, 2), (3, 4)])
def test_batches_are_begun_only_when_they_will_be_young_enough(bound: int, allowed: int) -> None:
    state = alone("fully_async")
    state.max_staleness = bound
    assert [state.may_submit("e", step) for step in range(1, allowed + 2)] == [True] * allowed + [
        None
    ]
    state.load_ended("e", 1)
    assert state.may_submit("e", allowed + 1)


def test_what_other_explorers_have_begun_counts() -> None:
    state = alone("fully_async", "memory")
    state.max_staleness = 2
    state.explorer_joined("f")
    state.explorers["f"].submitted = 2
    assert state.may_submit("e", 1)
    assert state.may_submit("e", 2) is None


def test_a_bound_that_the_trainer_cannot_reach_does_not_stop_the_run() -> None:
    state = alone("fully_async")
    state.max_staleness = 0
    state.trainer_starved(0, 0)  # it needs two batches for one step
    assert state.may_submit("e", 2) is None
    state.explorers["e"].paced = True
    assert state.may_submit("e", 2)
    state.rows_available = True
    assert state.may_submit("e", 2) is None


@pytest.mark.parametrize("style", ["fully_async", "trainer_driven", "explorer_driven"])
def test_an_explorer_that_waits_in_vain_for_weights_goes_on_alone_in_every_style(
    style: str,
) -> None:
    state = alone(style, "memory")
    state.max_staleness = 0
    state.trainer_starved(0, 0)
    state.explorers["e"].paced = True
    assert state.may_submit("e", 2) is True
    state.explorer_joined("f")
    assert state.may_submit("e", 2) is None  # the rows of another one may still come
    state.explorers["f"].paced = True
    assert state.may_submit("e", 2) is True


def test_an_explorer_that_has_not_come_back_still_counts() -> None:
    state = alone("fully_async", "memory")
    state.max_staleness = 2
    state.begun_before = {"gone": 2, "e": 1}
    assert state.may_submit("e", 1)
    assert state.may_submit("e", 2) is None
    state.explorer_joined("gone")
    assert state.may_submit("e", 2) is None
    state.explorers["gone"].submitted = 2  # the same batches, not other ones
    assert state.may_submit("e", 1)


def test_weights_are_taken_first_where_the_explorer_must_come_for_them() -> None:
    state = alone("explorer_driven")
    state.max_staleness = 0
    assert state.may_submit("e", 2) is False
    state = alone("trainer_driven")
    state.max_staleness = 0
    assert state.may_submit("e", 2) is None
    state.trainer_at_sync(1, 1)
    assert state.may_submit("e", 2) is False

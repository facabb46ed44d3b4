"""The fixed-style hand-shake under random interleavings: no deadlock, no skipped boundary."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.manager.sync_state import ExplorerStatus, SyncState


@dataclass
class World:
    """A trainer and an explorer that follow the protocol; one batch is one train step."""

    interval: int
    offset: int
    n_batches: int
    state: SyncState = field(default_factory=SyncState)
    explored: int = 0
    trained: int = 0
    trainer_blocked: bool = False
    trainer_done: bool = False
    passed: list[tuple[int, int]] = field(default_factory=list)  # (boundary, engine version)

    def __post_init__(self) -> None:
        self.state.transfer_ended(0)
        self.state.explorer_running(self.interval)

    def next_required(self, step: int) -> int:
        base = max(step - self.offset, 0)
        return (base // self.interval + 1) * self.interval

    # each move returns False when it is not enabled
    def explore(self) -> bool:
        if self.state.explorer is not ExplorerStatus.RUNNING:
            return False
        if self.explored == self.n_batches:
            self.state.explorer_stopped()
            return True
        self.explored += 1
        past = self.explored - self.offset
        if past > 0 and past % self.interval == 0:
            self.state.explorer_waiting(past)
        return True

    def pass_boundary(self) -> bool:
        if self.state.should_transfer:
            self.state.transfer_started()
            self.state.transfer_ended(self.state.trainer_version)
        elif not self.state.explorer_may_pass:
            return False
        self.passed.append((self.explored, self.state.engine_version))
        self.state.explorer_running(self.next_required(self.explored))
        return True

    def train(self) -> bool:
        if self.trainer_done or self.trainer_blocked:
            return False
        if self.trained == self.explored:
            if self.explored == self.n_batches:
                self.state.trainer_stopped(self.trained, self.trained)
                self.trainer_done = True
                return True
            return False
        self.trained += 1
        if self.trained % self.interval == 0:
            self.state.trainer_at_sync(self.trained, self.trained)
            self.trainer_blocked = True
        return True

    def continue_training(self) -> bool:
        if not (self.trainer_blocked and self.state.trainer_may_continue):
            return False
        self.state.trainer_running()
        self.trainer_blocked = False
        return True


@settings(max_examples=200, deadline=None)
@given(
    interval=st.integers(1, 3),
    offset=st.integers(0, 3),
    n_batches=st.integers(1, 12),
    choices=st.lists(st.integers(0, 3), min_size=0, max_size=200),
)
def test_any_interleaving_ends_and_every_boundary_has_its_version(
    interval: int, offset: int, n_batches: int, choices: list[int]
) -> None:
    world = World(interval, offset, n_batches)
    moves = [world.explore, world.pass_boundary, world.train, world.continue_training]
    order = iter(choices)
    while not (world.trainer_done and world.state.explorer is ExplorerStatus.STOPPED):
        first = next(order, 0)
        assert any(moves[(first + k) % 4]() for k in range(4)), f"deadlock in {world}"
    versions = [version for _, version in world.passed]
    assert versions == sorted(versions)
    for boundary, version in world.passed:
        assert version >= boundary - offset
        if offset == 0:
            assert version == boundary  # strictly on-policy: neither older nor newer


def test_a_starved_trainer_lets_the_explorer_pass_only_while_no_rows_wait() -> None:
    state = SyncState(engine_version=3, trainer_version=3)
    state.trainer_starved(3, 3)
    state.explorer_waiting(4)
    state.rows_available = True
    assert not state.explorer_may_pass
    state.rows_available = False
    assert state.explorer_may_pass


def test_a_stopped_explorer_releases_the_trainer() -> None:
    state = SyncState(engine_version=0)
    state.explorer_running(1)
    state.trainer_at_sync(1, 1)
    assert not state.trainer_may_continue
    state.explorer_stopped()
    assert state.trainer_may_continue


def test_versions_never_fall() -> None:
    state = SyncState()
    state.trainer_at_sync(5, 5)
    with pytest.raises(AssertionError, match="fell from 5 to 4"):
        state.trainer_at_sync(4, 5)
    state.transfer_ended(5)
    with pytest.raises(AssertionError, match="from version 5 to 4"):
        state.transfer_ended(4)

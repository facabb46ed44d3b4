"""When weights move: the decisions of the ``fixed`` style, without I/O.

Invariant: the engines' version never falls; the explorer passes a boundary only when the
trainer has consumed every batch that the boundary requires (or can consume no more); the
trainer passes a sync point only when no explorer still needs exactly that version.

Steps and progress are counted in explorer batches: ``progress`` is the largest batch id b
such that every batch up to b has been trained on. ``version`` is the trainer's step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class TrainerStatus(Enum):
    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"  # at a sync point, weights stand still
    STARVED = "starved"  # waiting for rows that only the explorer can make
    STOPPED = "stopped"  # trains no more; its last weights can still be sent


class ExplorerStatus(Enum):
    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    STOPPED = "stopped"


@dataclass
class SyncState:
    """Both sides' positions. Mutate through the event methods, then read the decisions."""

    trainer: TrainerStatus = TrainerStatus.RUNNING
    explorer: ExplorerStatus = ExplorerStatus.RUNNING
    engine_version: int = -1  # what the engines serve; -1 = nothing sent yet
    trainer_version: int = 0
    progress: int = 0
    required: int = 0  # batches that must be trained before the (next) boundary is passed
    transferring: bool = False
    rows_available: bool = False  # the buffer could serve the trainer's next step right now

    # events -------------------------------------------------------------------------
    def trainer_at_sync(self, version: int, progress: int) -> None:
        self._trainer_moves(version, progress)
        self.trainer = TrainerStatus.REQUIRE_SYNC

    def trainer_running(self) -> None:
        if self.trainer is not TrainerStatus.STOPPED:
            self.trainer = TrainerStatus.RUNNING

    def trainer_starved(self, version: int, progress: int) -> None:
        self._trainer_moves(version, progress)
        self.trainer = TrainerStatus.STARVED

    def trainer_stopped(self, version: int, progress: int) -> None:
        self._trainer_moves(version, progress)
        self.trainer = TrainerStatus.STOPPED

    def explorer_waiting(self, required: int) -> None:
        self.required = required
        self.explorer = ExplorerStatus.REQUIRE_SYNC

    def explorer_running(self, next_required: int) -> None:
        self.required = next_required
        self.explorer = ExplorerStatus.RUNNING

    def explorer_stopped(self) -> None:
        self.explorer = ExplorerStatus.STOPPED

    def transfer_started(self) -> None:
        self.transferring = True

    def transfer_ended(self, version: int | None) -> None:
        """``version`` reached every engine; None when the transfer failed."""
        self.transferring = False
        if version is None:
            return
        if version < self.engine_version:
            raise AssertionError(f"engines went from version {self.engine_version} to {version}")
        self.engine_version = version

    # decisions ----------------------------------------------------------------------
    @property
    def trainer_ready(self) -> bool:
        """Weights stand still and cover what the waiting explorer requires, or as much of
        it as they ever can. A starved trainer whose rows have just arrived is about to train
        on them, so it is not ready."""
        if self.trainer is TrainerStatus.STOPPED:
            return True
        if self.trainer is TrainerStatus.STARVED:
            return not self.rows_available
        return self.trainer is TrainerStatus.REQUIRE_SYNC and self.progress >= self.required

    @property
    def should_transfer(self) -> bool:
        waiting = self.explorer is ExplorerStatus.REQUIRE_SYNC and not self.transferring
        return waiting and self.trainer_ready and self.trainer_version > self.engine_version

    @property
    def explorer_may_pass(self) -> bool:
        """At the boundary with nothing newer to wait for."""
        waiting = self.explorer is ExplorerStatus.REQUIRE_SYNC and not self.transferring
        return waiting and self.trainer_ready and self.trainer_version <= self.engine_version

    @property
    def trainer_may_continue(self) -> bool:
        """At a sync point, and no explorer boundary that this version answers is ahead."""
        if self.explorer is ExplorerStatus.STOPPED:
            return True
        return not self.transferring and self.required > self.progress

    # ---------------------------------------------------------------------------------
    def _trainer_moves(self, version: int, progress: int) -> None:
        if version < self.trainer_version:
            raise AssertionError(
                f"the trainer's version fell from {self.trainer_version} to {version}"
            )
        self.trainer_version, self.progress = version, max(progress, self.progress)

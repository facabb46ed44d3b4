"""Two sides that meet at one moment, as before a broadcast both take part in. No I/O.

Invariant: either both sides have met, and both are RUNNING again, or neither has; a side that
gives up leaves no ``REQUIRE_SYNC`` behind.
"""

from __future__ import annotations

from typing import Optional

from trinity_dask.sync.state import STOPPED, SyncState

SIDES = ("trainer", "explorer")


class HandShake:
    """The trainer and the one explorer of a run."""

    def __init__(self, state: SyncState) -> None:
        self.state = state
        self.met = 0  # how often both sides have met
        self._present: set[str] = set()

    def arrive(self, side: str, version: Optional[int] = None) -> None:
        """``side`` is ready; the trainer says with which ``version``.

        Raises:
            ValueError: unknown side, or more than one explorer.
        """
        if side not in SIDES:
            raise ValueError(f"module must be one of {', '.join(SIDES)} (got {side!r})")
        live = [name for name, e in self.state.explorers.items() if e.live]
        if len(live) > 1:
            raise ValueError(f"method nccl serves exactly one explorer, and there are {live}")
        if side == "trainer":
            at = self.state.trainer_version if version is None else version
            self.state.trainer_at_sync(at, self.state.progress)
        elif live:
            self.state.explorer_waiting(live[0], self.state.explorers[live[0]].required)
        self._present.add(side)
        if len(self._present) == len(SIDES):
            self._meet()

    def _meet(self) -> None:
        self.met += 1
        for side in SIDES:
            self.leave(side)

    def leave(self, side: str) -> None:
        """Met, or given up: the side runs on. Idempotent."""
        if side not in self._present:
            return
        self._present.discard(side)
        if side == "trainer":
            self.state.trainer_running()
            return
        for name, explorer in self.state.explorers.items():
            if explorer.live:
                self.state.explorer_running(name)

    def peer_is_gone(self, side: str) -> bool:
        """Nobody will come to meet ``side``."""
        if side == "explorer":
            return self.state.trainer is STOPPED
        return not self.state.live_explorers

    def vanished(self, side: str) -> None:
        """``side`` died while it waited here."""
        self._present.discard(side)

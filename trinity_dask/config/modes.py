"""What each mode of a run has: an explorer, a trainer, engines.

Invariant: the one place that says which parts a mode needs; everything else asks here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from trinity_dask.config.schema import Config

MODES = ("both", "explore", "train", "bench", "colocate", "serve")


def explores(mode: str) -> bool:
    """Whether tasks are rolled out into the experience buffer."""
    return mode in ("both", "colocate", "explore")


def trains(mode: str) -> bool:
    """Whether there is a trainer."""
    return mode in ("both", "colocate", "train")


def samples(mode: str) -> bool:
    """Whether there are engines."""
    return mode != "train"


def meets(mode: str) -> bool:
    """Whether the other side may be another run on the same scheduler."""
    return mode in ("explore", "train")


def member_of(cfg: Config) -> Optional[str]:
    """Which part of a job a run is: ``"trainer"``, an explorer's name, or None for all of it."""
    if cfg.stages or not cfg.synchronizer.peer_timeout_s or not meets(cfg.mode):
        return None
    return "trainer" if cfg.mode == "train" else cfg.explorer.name

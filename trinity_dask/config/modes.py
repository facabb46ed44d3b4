"""What each mode of a run has: an explorer, a trainer, engines.

Invariant: the one place that says which parts a mode needs; everything else asks here.
"""

from __future__ import annotations

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

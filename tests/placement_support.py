"""What a placement is measured against."""

from __future__ import annotations

from collections.abc import Sequence


def shortest_s(n: int, lanes: int, seconds: Sequence[float]) -> float:
    """In which engines that need ``seconds`` for a sub-task, ``lanes`` at a time, can end ``n``."""
    times = sorted(k * each for each in seconds for k in range(1, n + 1))
    return next(t for t in times if lanes * sum(int(t / s + 1e-9) for s in seconds) >= n)

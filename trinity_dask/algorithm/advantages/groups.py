"""Groups of experiences, their statistics, and the advantages written into them.

Invariant: a row that cannot be trained on (no action token, no finite reward) is in no
statistic; spreads are taken in two passes and are exactly 0 for equal values.

Experiences are duck-typed on ``eid.tid``, ``reward``, ``action_mask``, ``advantages`` and
``returns``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


def group_by_task(experiences: Sequence[Any]) -> dict[str, list[Any]]:
    """Experiences by task id, in order of first appearance."""
    groups: dict[str, list[Any]] = {}
    for experience in experiences:
        groups.setdefault(experience.eid.tid, []).append(experience)
    return groups


def group_by_run(experiences: Sequence[Any]) -> dict[str, list[Any]]:
    """Experiences by run, each run's in the order of its steps (equal steps: list order)."""
    runs: dict[str, list[Any]] = {}
    for experience in experiences:
        runs.setdefault(experience.eid.rid, []).append(experience)
    return {rid: sorted(rows, key=lambda row: row.eid.step) for rid, rows in runs.items()}


def is_scored(experience: Any) -> bool:
    """It has a finite reward and at least one token that the policy chose."""
    reward = experience.reward
    return reward is not None and math.isfinite(reward) and bool(experience.action_mask.any())


def scored_rewards(rows: Sequence[Any]) -> list[float]:
    return [float(row.reward) for row in rows if is_scored(row)]


def is_flat(values: Sequence[float]) -> bool:
    """Fewer than two values, or all equal: nothing to compare."""
    return len(values) < 2 or min(values) == max(values)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(len(values), 1)


def std(values: Sequence[float], ddof: int = 1) -> float:
    """Standard deviation in two passes; exactly 0 when all are equal, and below two values.

    E[x²] − E[x]² would cancel, and a rounded mean makes equal rewards differ from it.
    """
    if is_flat(values):
        return 0.0
    return float(np.std(np.asarray(values, dtype=np.float64), ddof=ddof))


def write(experience: Any, score: float) -> None:
    """The same advantage, and return, on every token that the policy chose."""
    experience.advantages = (score * experience.action_mask).astype(np.float32)
    experience.returns = experience.advantages.copy()


def group_metrics(
    rewards: Mapping[str, Sequence[float]], n_rows: int, n_kept: int
) -> dict[str, float]:
    """Counts and reward statistics over the groups; ``rewards`` are the scored ones."""
    scored = [values for values in rewards.values() if values]
    metrics = {
        "filtered_count": float(n_rows - n_kept),
        "group_count": float(len(rewards)),
        "group_of_one_count": float(sum(len(values) == 1 for values in rewards.values())),
        "zero_variance_group_count": float(
            sum(len(v) > 1 and min(v) == max(v) for v in rewards.values())
        ),
        "unscored_count": float(n_rows - sum(len(values) for values in rewards.values())),
    }
    metrics |= spread("group_advantages/reward_mean", [float(np.mean(v)) for v in scored])
    return metrics | spread("group_advantages/reward_std", [std(v) for v in scored])


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """``name``/mean, /max and /min; nothing for no values."""
    if not values:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }


class GroupOfOneWarning:
    """Says once per object that groups of one learn nothing; the metric counts them all."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, sizes: Sequence[int]) -> None:
        alone = sum(size == 1 for size in sizes)
        if not alone or self._said:
            return
        self._said = True
        logger.warning(
            "%d of %d groups have one scored answer and get advantage 0: there is nothing to "
            "compare it with. Raise algorithm.repeat_times, or see why runs are lost; the "
            "metric group_of_one_count goes on counting",
            alone,
            len(sizes),
        )

"""Groups of experiences, their statistics, and the advantages written into them.

Invariant: a row that cannot be trained on (no action token, no finite reward) is in no
statistic; every run counts once in one, however many rows it returned; spreads are taken in
two passes and are exactly 0 for equal values.

Experiences are duck-typed on ``eid.tid``, ``eid.rid``, ``reward``, ``action_mask``,
``advantages`` and ``returns``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Optional

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


class Rewards:
    """The rewards of the scored rows of one group, of which each run counts once.

    ``values`` and ``runs`` go by rows: a row's reward and the run that returned it. A run of
    k rows counts with each of them by 1/k: its reward in a statistic is the mean of theirs.
    """

    def __init__(self, values: Sequence[float], runs: Sequence[Hashable]) -> None:
        self.values, self.runs = list(values), list(runs)
        rows = Counter(self.runs)
        self.n_runs = len(rows)
        # fewer than two runs, or all rewards equal: nothing to compare
        self.is_flat = self.n_runs < 2 or min(self.values) == max(self.values)
        self.weights = [1.0 / rows[run] for run in self.runs]

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Rewards:
        """Those of the experiences that have one."""
        scored = [row for row in rows if is_scored(row)]
        return cls([float(row.reward) for row in scored], [row.eid.rid for row in scored])

    def mean(self) -> float:
        weighted = zip(self.values, self.weights, strict=True)
        return math.fsum(value * weight for value, weight in weighted) / max(self.n_runs, 1)

    def std(self, ddof: int = 1) -> float:
        """Over the runs; exactly 0 when all rewards are equal, and below two runs."""
        if self.is_flat:
            return 0.0
        center, weighted = self.mean(), zip(self.values, self.weights, strict=True)
        total = math.fsum((value - center) ** 2 * weight for value, weight in weighted)
        return math.sqrt(total / (self.n_runs - ddof))

    def of_runs(self) -> dict[Hashable, float]:
        """The reward of each run, in order of first appearance."""
        totals: dict[Hashable, float] = {}
        for run, value, weight in zip(self.runs, self.values, self.weights, strict=True):
            totals[run] = totals.get(run, 0.0) + value * weight
        return totals


def write(experience: Any, score: float) -> None:
    """The same advantage, and return, on every token that the policy chose."""
    experience.advantages = (score * experience.action_mask).astype(np.float32)
    experience.returns = experience.advantages.copy()


def group_metrics(rewards: Mapping[str, Rewards], n_rows: int, n_kept: int) -> dict[str, float]:
    """Counts and reward statistics over the groups; filtered and unscored ones are of rows."""
    scored = [group for group in rewards.values() if group.values]
    metrics = {
        "filtered_count": float(n_rows - n_kept),
        "group_count": float(len(rewards)),
        "group_of_one_count": float(sum(group.n_runs == 1 for group in scored)),
        "zero_variance_group_count": float(sum(g.n_runs > 1 and g.is_flat for g in scored)),
        "unscored_count": float(n_rows - sum(len(group.values) for group in scored)),
    }
    metrics |= spread("group_advantages/reward_mean", [group.mean() for group in scored])
    return metrics | spread("group_advantages/reward_std", [group.std() for group in scored])


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


def run_reward(rows: Sequence[Any]) -> Optional[float]:
    """The last step's reward; None when it is not finite or no step has an action token."""
    reward = rows[-1].reward
    if reward is None or not math.isfinite(reward):
        return None
    return float(reward) if any(row.action_mask.any() for row in rows) else None


def step_rewards(rows: Sequence[Any], key: str) -> list[float]:
    """Reward of each step: ``info[key]``, else 0 and the run's reward at the last step."""
    last = len(rows) - 1
    return [
        float(row.info[key])
        if row.info.get(key) is not None
        else (float(row.reward or 0.0) if index == last else 0.0)
        for index, row in enumerate(rows)
    ]


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """Σ_k γ^k r_{t+k} for each t."""
    returns: list[float] = []
    carry = 0.0
    for reward in reversed(rewards):
        carry = reward + gamma * carry
        returns.append(carry)
    return returns[::-1]

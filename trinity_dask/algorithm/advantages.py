"""Grouped advantages: what an answer earned compared with its siblings.

Invariant: inside a group the scores of the scored rows sum to 0; a row that cannot be
trained on (no action token, no finite reward) gets 0 and moves no other row.

The functions work on a list of experiences, duck-typed on ``eid.tid``, ``reward``,
``action_mask``, ``advantages`` and ``returns``; they write the last two and return the
experiences that remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np

from trinity_dask.algorithm.registry import Registry, nearest

AdvantageFn = Callable[[Sequence[Any]], tuple[list[Any], dict[str, float]]]
ADVANTAGES: Registry[Callable[..., AdvantageFn]] = Registry("advantage_fn")

STD_LEVELS = ("group", "batch")


@ADVANTAGES.register_module("grpo")
class GRPOAdvantage:
    """A = (r − mean) / (s + epsilon) in each group, s the sample std (n − 1).

    GRPO, arXiv 2402.03300. A group with one scored row gets 0 and is counted: there is
    nothing to compare it with. With ``std_threshold`` the groups of one and those with
    s ≤ threshold are dropped (0 drops exactly the groups whose rewards are all equal).
    ``std_cal_level="batch"`` divides by the std over all scored rows instead.
    """

    def __init__(
        self,
        epsilon: float = 1e-6,
        std_threshold: Optional[float] = None,
        std_cal_level: str = "group",
    ) -> None:
        if epsilon < 0:
            raise ValueError(f"epsilon must be >= 0 (got {epsilon}); 1e-4 and 1e-6 are usual")
        if std_threshold is not None and std_threshold < 0:
            raise ValueError(f"std_threshold must be >= 0 or null (got {std_threshold})")
        if std_cal_level not in STD_LEVELS:
            raise ValueError(f"std_cal_level {std_cal_level!r}{nearest(std_cal_level, STD_LEVELS)}")
        self.epsilon = epsilon
        self.std_threshold = std_threshold
        self.std_cal_level = std_cal_level

    def __call__(self, experiences: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
        groups = group_by_task(experiences)
        rewards = {tid: _scored_rewards(rows) for tid, rows in groups.items()}
        batch_std = _std([r for values in rewards.values() for r in values])
        kept: list[Any] = []
        for tid, rows in groups.items():
            if self._dropped(rewards[tid]):
                continue
            self._score_group(rows, rewards[tid], batch_std)
            kept.extend(rows)
        return kept, _group_metrics(rewards, len(experiences), len(kept))

    def _dropped(self, rewards: list[float]) -> bool:
        if self.std_threshold is None:
            return False
        return len(rewards) < 2 or _std(rewards) <= self.std_threshold

    def _score_group(self, rows: list[Any], rewards: list[float], batch_std: float) -> None:
        spread = batch_std if self.std_cal_level == "batch" else _std(rewards)
        flat = len(rewards) < 2 or min(rewards) == max(rewards)
        mean = math.fsum(rewards) / max(len(rewards), 1)
        for row in rows:
            scored = _is_scored(row) and not flat
            _write(row, (row.reward - mean) / (spread + self.epsilon) if scored else 0.0)


def group_by_task(experiences: Sequence[Any]) -> dict[str, list[Any]]:
    """Experiences by task id, in order of first appearance."""
    groups: dict[str, list[Any]] = {}
    for experience in experiences:
        groups.setdefault(experience.eid.tid, []).append(experience)
    return groups


def _is_scored(experience: Any) -> bool:
    reward = experience.reward
    return reward is not None and math.isfinite(reward) and bool(experience.action_mask.any())


def _scored_rewards(rows: Sequence[Any]) -> list[float]:
    return [float(row.reward) for row in rows if _is_scored(row)]


def _std(rewards: list[float]) -> float:
    """Sample std in two passes; exactly 0 when all are equal, and below two values.

    E[x²] − E[x]² would cancel, and a rounded mean makes equal rewards differ from it.
    """
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return 0.0
    return float(np.std(np.asarray(rewards, dtype=np.float64), ddof=1))


def _write(experience: Any, score: float) -> None:
    experience.advantages = (score * experience.action_mask).astype(np.float32)
    experience.returns = experience.advantages.copy()


def _group_metrics(rewards: dict[str, list[float]], n_rows: int, n_kept: int) -> dict[str, float]:
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
    metrics |= _spread("group_advantages/reward_mean", [float(np.mean(v)) for v in scored])
    metrics |= _spread("group_advantages/reward_std", [_std(v) for v in scored])
    return metrics


def _spread(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }

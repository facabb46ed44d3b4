"""Group-relative advantages of single-step answers."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from trinity_dask.algorithm.advantages.base import ADVANTAGE_FN
from trinity_dask.algorithm.advantages.groups import (
    GroupOfOneWarning,
    group_by_task,
    group_metrics,
    is_flat,
    is_scored,
    mean,
    std,
    write,
)
from trinity_dask.registry import nearest

STD_LEVELS = ("group", "batch", "none")


def check_scaling(epsilon: float, std_threshold: Optional[float], std_cal_level: str) -> None:
    """Raise ValueError for arguments that no group-relative advantage can have."""
    if epsilon < 0:
        raise ValueError(f"epsilon must be >= 0 (got {epsilon}); 1e-4 and 1e-6 are usual")
    if std_threshold is not None and std_threshold < 0:
        raise ValueError(f"std_threshold must be >= 0 or null (got {std_threshold})")
    if std_cal_level not in STD_LEVELS:
        raise ValueError(f"std_cal_level {std_cal_level!r}{nearest(std_cal_level, STD_LEVELS)}")


def is_dropped(values: Sequence[float], std_threshold: Optional[float]) -> bool:
    """A group of one, or one whose spread is not above the threshold; None drops nothing."""
    if std_threshold is None:
        return False
    return len(values) < 2 or std(values) <= std_threshold


@ADVANTAGE_FN.register_module("grpo")
class GRPOAdvantage:
    """A = (r − mean) / (s + epsilon) in each group, s the sample std (n − 1).

    GRPO, arXiv 2402.03300. A group with one scored row gets 0 and is counted: there is
    nothing to compare it with. With ``std_threshold`` the groups of one and those with
    s ≤ threshold are dropped (0 drops exactly the groups whose rewards are all equal).
    ``std_cal_level="batch"`` divides by the std over all scored rows instead (arXiv
    2508.08221), ``"none"`` not at all (Dr.GRPO, 2503.20783).

    ``rank_penalty`` p makes r' = r·(1 − p·rank/n) with rank 0 for the least likely answer
    by mean log-prob, and takes mean, s and numerator from r': a right answer that the policy
    rarely gives counts more. ``duplicate_experiences`` fills the places of dropped groups
    with copies of surviving groups, drawn with replacement, reproducibly.
    """

    def __init__(
        self,
        epsilon: float = 1e-6,
        std_threshold: Optional[float] = None,
        std_cal_level: str = "group",
        rank_penalty: Optional[float] = None,
        duplicate_experiences: bool = False,
    ) -> None:
        check_scaling(epsilon, std_threshold, std_cal_level)
        if rank_penalty is not None and not 0 <= rank_penalty <= 1:
            raise ValueError(f"rank_penalty must be in [0, 1] or null (got {rank_penalty})")
        self.epsilon = epsilon
        self.std_threshold = std_threshold
        self.std_cal_level = std_cal_level
        self.rank_penalty = rank_penalty
        self.duplicates = duplicate_experiences
        self._warn = GroupOfOneWarning()

    def __call__(self, experiences: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
        groups = group_by_task(experiences)
        scored = {tid: [row for row in rows if is_scored(row)] for tid, rows in groups.items()}
        rewards = {tid: self._rewards(rows) for tid, rows in scored.items()}
        self._warn([len(values) for values in rewards.values()])
        batch_std = std([r for values in rewards.values() for r in values])
        kept: list[list[Any]] = []
        for tid, rows in groups.items():
            if is_dropped(rewards[tid], self.std_threshold):
                continue
            self._score_group(rows, scored[tid], rewards[tid], batch_std)
            kept.append(rows)
        result = [row for rows in kept for row in rows]
        metrics = group_metrics(rewards, len(experiences), len(result))
        if self.duplicates:
            result += self._copies(kept, len(groups) - len(kept), len(experiences) - len(result))
            metrics["duplicated_count"] = float(len(result) - sum(map(len, kept)))
        return result, metrics

    def _rewards(self, rows: Sequence[Any]) -> list[float]:
        """Rewards of scored rows, after the rank penalty."""
        rewards = [float(row.reward) for row in rows]
        if not self.rank_penalty:
            return rewards
        order = np.argsort([_mean_logprob(row) for row in rows], kind="stable")
        rank = np.empty(len(rows), dtype=np.int64)
        rank[order] = np.arange(len(rows))
        return [
            r * (1.0 - self.rank_penalty * int(k) / len(rows))
            for r, k in zip(rewards, rank, strict=True)
        ]

    def _score_group(
        self, rows: list[Any], scored: list[Any], rewards: list[float], batch_std: float
    ) -> None:
        for row in rows:
            write(row, 0.0)
        if is_flat(rewards):
            return
        center, divisor = mean(rewards), self._divisor(rewards, batch_std)
        for row, reward in zip(scored, rewards, strict=True):
            write(row, (reward - center) / divisor)

    def _divisor(self, rewards: list[float], batch_std: float) -> float:
        if self.std_cal_level == "none":
            return 1.0
        width = batch_std if self.std_cal_level == "batch" else std(rewards)
        return width + self.epsilon

    def _copies(self, kept: list[list[Any]], n_groups: int, n_rows: int) -> list[Any]:
        """Copies of ``n_groups`` random groups, but never more than ``n_rows`` rows."""
        if not kept:
            return []
        draw = random.Random("/".join(rows[0].eid.tid for rows in kept))
        copies: list[Any] = []
        for _ in range(n_groups):
            group = kept[draw.randrange(len(kept))]
            if len(copies) + len(group) <= n_rows:
                copies += [_copied(row) for row in group]
        return copies


def _mean_logprob(row: Any) -> float:
    """Of the tokens that the policy chose.

    Raises:
        ValueError: the row carries no log-probs.
    """
    if row.logprobs is None:
        raise ValueError(
            f"experience {row.eid}: rank_penalty orders answers by their log-probs, and this one "
            "has none; let the engine return log-probs, or set rank_penalty to null"
        )
    return float(np.asarray(row.logprobs, dtype=np.float64)[row.action_mask].mean())


def _copied(row: Any) -> Any:
    """A deep copy with an identity of its own, so that stores do not take it for the same."""
    twin, eid = copy.deepcopy(row), row.eid
    twin.eid = dataclasses.replace(eid, suffix=type(eid)().suffix)
    return twin

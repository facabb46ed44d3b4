"""Group-relative advantages: of answers, and of runs with several steps."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from trinity_dask.algorithm.advantages.base import ADVANTAGE_FN
from trinity_dask.algorithm.advantages.groups import (
    GroupOfOneWarning,
    Rewards,
    group_by_run,
    group_by_task,
    group_metrics,
    is_scored,
    run_reward,
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


def is_dropped(rewards: Rewards, std_threshold: Optional[float]) -> bool:
    """A group of one, or one whose spread is not above the threshold; None drops nothing."""
    if std_threshold is None:
        return False
    return rewards.n_runs < 2 or rewards.std() <= std_threshold


def divisor(rewards: Rewards, batch_std: float, std_cal_level: str, epsilon: float) -> float:
    """What a group's differences from its mean are divided by."""
    if std_cal_level == "none":
        return 1.0
    return (batch_std if std_cal_level == "batch" else rewards.std()) + epsilon


def all_of(groups: Mapping[str, Rewards]) -> Rewards:
    """The rewards of all groups as those of one."""
    return Rewards(
        [value for group in groups.values() for value in group.values],
        [(tid, run) for tid, group in groups.items() for run in group.runs],
    )


@ADVANTAGE_FN.register_module("grpo")
class GRPOAdvantage:
    """A = (r − mean) / (s + epsilon) in each group, s the sample std (n − 1).

    GRPO, arXiv 2402.03300. Mean and s are over the n runs of the task. A group with one
    scored run gets 0 and is counted: there is
    nothing to compare it with. With ``std_threshold`` the groups of one and those with
    s ≤ threshold are dropped (0 drops exactly the groups whose rewards are all equal).
    ``std_cal_level="batch"`` divides by the std over all scored runs instead (arXiv
    2508.08221), ``"none"`` not at all (Dr.GRPO, 2503.20783).

    ``rank_penalty`` p makes r' = r·(1 − p·rank/n) with rank 0 for the least likely run
    by the mean log-prob of its tokens, and takes mean, s and numerator from r': a right answer
    that the policy rarely gives counts more. ``duplicate_experiences`` fills the places of
    dropped groups with copies of surviving groups, drawn with replacement, reproducibly.
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
        rewards = {tid: self._rewards(rows) for tid, rows in groups.items()}
        self._warn([group.n_runs for group in rewards.values()])
        batch_std = all_of(rewards).std()
        kept: list[list[Any]] = []
        for tid, rows in groups.items():
            if is_dropped(rewards[tid], self.std_threshold):
                continue
            self._score_group(rows, rewards[tid], batch_std)
            kept.append(rows)
        result = [row for rows in kept for row in rows]
        metrics = group_metrics(rewards, len(experiences), len(result))
        if self.duplicates:
            result += self._copies(kept, len(groups) - len(kept), len(experiences) - len(result))
            metrics["duplicated_count"] = float(len(result) - sum(map(len, kept)))
        return result, metrics

    def _rewards(self, rows: Sequence[Any]) -> Rewards:
        """Rewards of scored rows, after the rank penalty."""
        rewards = Rewards.of(rows)
        if not self.rank_penalty:
            return rewards
        logprobs: dict[str, list[np.ndarray]] = {}
        for row in rows:
            if is_scored(row):
                logprobs.setdefault(row.eid.rid, []).append(_logprobs(row))
        means = {run: float(np.concatenate(found).mean()) for run, found in logprobs.items()}
        rank = {run: place for place, run in enumerate(sorted(means, key=means.__getitem__))}
        penalised = [
            reward * (1.0 - self.rank_penalty * rank[str(run)] / len(rank))
            for reward, run in zip(rewards.values, rewards.runs, strict=True)
        ]
        return Rewards(penalised, rewards.runs)

    def _score_group(self, rows: list[Any], rewards: Rewards, batch_std: float) -> None:
        for row in rows:
            write(row, 0.0)
        if rewards.is_flat:
            return
        center = rewards.mean()
        width = divisor(rewards, batch_std, self.std_cal_level, self.epsilon)
        scored = [row for row in rows if is_scored(row)]
        for row, reward in zip(scored, rewards.values, strict=True):
            write(row, (reward - center) / width)

    def _copies(self, kept: list[list[Any]], n_groups: int, n_rows: int) -> list[Any]:
        """Copies of ``n_groups`` random groups, but never more than ``n_rows`` rows."""
        if not kept:
            return []
        draw = random.Random("/".join(rows[0].eid.tid for rows in kept))
        copies: list[Any] = []
        for _ in range(n_groups):
            group = kept[draw.randrange(len(kept))]
            if len(copies) + len(group) <= n_rows:
                for row in group:
                    twin, eid = copy.deepcopy(row), row.eid
                    # of its own, so that stores do not take it for the same
                    twin.eid = dataclasses.replace(eid, suffix=type(eid)().suffix)
                    copies.append(twin)
        return copies


@ADVANTAGE_FN.register_module("step_wise_grpo")
class StepWiseGRPOAdvantage:
    """A = (r − mean) / (s + epsilon) of the run's last reward, given to each of its steps.

    Every run counts once in its task's mean and std, however many steps it has; with
    ``enable_step_norm`` the advantage is divided by the run's number of steps. The other
    arguments are those of ``grpo``.
    """

    def __init__(
        self,
        epsilon: float = 1e-6,
        enable_step_norm: bool = False,
        std_threshold: Optional[float] = None,
        std_cal_level: str = "group",
    ) -> None:
        check_scaling(epsilon, std_threshold, std_cal_level)
        self.epsilon = epsilon
        self.step_norm = enable_step_norm
        self.std_threshold = std_threshold
        self.std_cal_level = std_cal_level
        self._warn = GroupOfOneWarning()

    def __call__(self, experiences: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
        tasks = {tid: group_by_run(rows) for tid, rows in group_by_task(experiences).items()}
        rewards = {
            tid: {rid: r for rid, rows in runs.items() if (r := run_reward(rows)) is not None}
            for tid, runs in tasks.items()
        }
        values = {
            tid: Rewards(list(of_runs.values()), list(of_runs)) for tid, of_runs in rewards.items()
        }
        self._warn([group.n_runs for group in values.values()])
        batch_std = all_of(values).std()
        kept = [tid for tid in tasks if not is_dropped(values[tid], self.std_threshold)]
        for tid in kept:
            self._score_task(tasks[tid], rewards[tid], values[tid], batch_std)
        wanted = set(kept)
        result = [row for row in experiences if row.eid.tid in wanted]
        metrics = group_metrics(values, len(experiences), len(result))
        scored = sum(group.n_runs for group in values.values())
        metrics["unscored_count"] = float(sum(len(runs) for runs in tasks.values()) - scored)
        return result, metrics | {
            "experience_count": float(len(result)),
            "skipped_group_ratio": 1.0 - len(kept) / len(tasks) if tasks else 0.0,
        }

    def _score_task(
        self,
        runs: dict[str, list[Any]],
        rewards: dict[str, float],
        values: Rewards,
        batch_std: float,
    ) -> None:
        width = divisor(values, batch_std, self.std_cal_level, self.epsilon)
        for rid, rows in runs.items():
            scored = rid in rewards and not values.is_flat
            score = (rewards[rid] - values.mean()) / width if scored else 0.0
            for row in rows:
                write(row, score / len(rows) if self.step_norm else score)


def _logprobs(row: Any) -> np.ndarray:
    """Of the tokens that the policy chose, float64.

    Raises:
        ValueError: the row carries no log-probs.
    """
    if row.logprobs is None:
        raise ValueError(
            f"experience {row.eid}: rank_penalty orders answers by their log-probs, and this one "
            "has none; let the engine return log-probs, or set rank_penalty to null"
        )
    return np.asarray(row.logprobs, dtype=np.float64)[row.action_mask]

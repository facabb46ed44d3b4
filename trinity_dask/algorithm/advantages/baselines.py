"""Grouped advantages by a baseline alone: reinforce, opmd, asymre, rec, and raft's choice."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Optional

from trinity_dask.algorithm.advantages.base import ADVANTAGE_FN
from trinity_dask.algorithm.advantages.groups import (
    GroupOfOneWarning,
    group_by_task,
    group_metrics,
    is_scored,
    mean,
    std,
    write,
)
from trinity_dask.registry import nearest


class BaselineAdvantage:
    """Base: scores of a group's rewards, written on the rows that have one.

    A group of one gets 0 where the score is a comparison (``compares``).
    """

    compares = True

    def __init__(self) -> None:
        self._warn = GroupOfOneWarning()

    def __call__(self, experiences: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
        groups = group_by_task(experiences)
        rewards: dict[str, list[float]] = {}
        extra: dict[str, list[float]] = {}
        for tid, rows in groups.items():
            scored = [row for row in rows if is_scored(row)]
            rewards[tid] = [float(row.reward) for row in scored]
            scores = self._group_scores(tid, rewards[tid], extra)
            for row in rows:
                write(row, 0.0)
            for row, score in zip(scored, scores, strict=True):
                write(row, score)
        if self.compares:
            self._warn([len(values) for values in rewards.values()])
        metrics = group_metrics(rewards, len(experiences), len(experiences))
        metrics |= {name: mean(values) for name, values in extra.items()}
        return [row for rows in groups.values() for row in rows], metrics

    def _group_scores(
        self, tid: str, rewards: list[float], extra: dict[str, list[float]]
    ) -> list[float]:
        if not rewards or (self.compares and len(rewards) == 1):
            return [0.0] * len(rewards)
        return self.scores(tid, rewards, extra)

    def scores(self, tid: str, rewards: list[float], extra: dict[str, list[float]]) -> list[float]:
        """Scores of at least one reward; group statistics for the metrics go to ``extra``."""
        raise TypeError(f"{type(self).__name__} defines no scores")


@ADVANTAGE_FN.register_module("reinforce")
class ReinforceAdvantage(BaselineAdvantage):
    """A = r, no baseline."""

    compares = False

    def scores(self, tid: str, rewards: list[float], extra: dict[str, list[float]]) -> list[float]:
        return rewards


BASELINES = ("mean", "logavgexp")


def opmd_baseline(rewards: Sequence[float], kind: str, tau: float) -> float:
    """The mean, or tau·(logsumexp(r/tau) − log n), which leans to the best answers."""
    if kind == "mean":
        return mean(rewards)
    top = max(rewards)
    total = math.fsum(math.exp((r - top) / tau) for r in rewards)
    return top + tau * math.log(total / len(rewards))


def check_opmd(kind: str, tau: float) -> None:
    """Raise ValueError for an unknown baseline or tau <= 0."""
    if kind not in BASELINES:
        raise ValueError(f"opmd_baseline {kind!r}{nearest(kind, BASELINES)}")
    if not tau > 0:
        raise ValueError(f"tau must be > 0 (got {tau})")


@ADVANTAGE_FN.register_module("opmd")
class OPMDAdvantage(BaselineAdvantage):
    """A = r − b with b the group's mean or log-mean-exp (arXiv 2505.17826)."""

    def __init__(self, opmd_baseline: str = "mean", tau: float = 1.0) -> None:
        super().__init__()
        check_opmd(opmd_baseline, tau)
        self.kind, self.tau = opmd_baseline, tau

    def scores(self, tid: str, rewards: list[float], extra: dict[str, list[float]]) -> list[float]:
        baseline = opmd_baseline(rewards, self.kind, self.tau)
        extra.setdefault("group_baseline", []).append(baseline)
        extra.setdefault("reward_mean", []).append(mean(rewards))
        return [r - baseline for r in rewards]


@ADVANTAGE_FN.register_module("asymre")
class AsymREAdvantage(BaselineAdvantage):
    """A = r − (mean + baseline_shift), arXiv 2506.20520.

    A baseline below the mean makes off-policy learning lean on the good answers.
    """

    def __init__(self, baseline_shift: float = -0.1) -> None:
        super().__init__()
        self.shift = baseline_shift

    def scores(self, tid: str, rewards: list[float], extra: dict[str, list[float]]) -> list[float]:
        baseline = mean(rewards) + self.shift
        extra.setdefault("group_baseline", []).append(baseline)
        return [r - baseline for r in rewards]


@ADVANTAGE_FN.register_module("rec")
class RECAdvantage(BaselineAdvantage):
    """A = r − mean, optionally over the std, of the answers that are kept (arXiv 2509.24203).

    ``drop="balance"`` gives advantage 0 to so many answers below the mean, drawn at random
    but reproducibly per task, that no more of them remain than of the others.
    """

    def __init__(
        self, epsilon: float = 1e-6, std_normalize: bool = False, drop: Optional[str] = None
    ) -> None:
        super().__init__()
        if drop not in (None, "balance"):
            raise ValueError(f"drop must be null or 'balance' (got {drop!r})")
        self.epsilon, self.std_normalize, self.drop = epsilon, std_normalize, drop

    def scores(self, tid: str, rewards: list[float], extra: dict[str, list[float]]) -> list[float]:
        dropped = self._surplus(tid, rewards) if self.drop else frozenset()
        extra.setdefault("drop_balance", []).append(float(len(dropped)))
        kept = [r for index, r in enumerate(rewards) if index not in dropped]
        center = mean(kept) if len(kept) > 1 else 0.0
        width = (std(kept, ddof=0) if len(kept) > 1 else 1.0) + self.epsilon
        divisor = width if self.std_normalize else 1.0
        if min(kept) == max(kept):
            return [0.0] * len(rewards)
        return [0.0 if k in dropped else (r - center) / divisor for k, r in enumerate(rewards)]

    def _surplus(self, tid: str, rewards: list[float]) -> frozenset[int]:
        center = mean(rewards)
        below = [index for index, r in enumerate(rewards) if r < center]
        surplus = max(2 * len(below) - len(rewards), 0)
        return frozenset(random.Random(tid).sample(below, surplus))


@ADVANTAGE_FN.register_module("raft")
class RAFTAdvantage:
    """A = 1 for the ``n_best`` answers of each group by reward, the others go (2304.06767).

    The first of equal ones is taken. A group whose answers are all equal tells nothing about
    which is good: it is dropped unless the reward reaches ``min_reward``. With
    ``min_reward`` null, every group with a spread gives its best.
    """

    def __init__(self, n_best: int = 1, min_reward: Optional[float] = None) -> None:
        if n_best < 1:
            raise ValueError(f"n_best must be >= 1 (got {n_best})")
        self.n_best, self.min_reward = n_best, min_reward

    def __call__(self, experiences: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
        groups = group_by_task(experiences)
        rewards = {
            tid: [float(r.reward) for r in rows if is_scored(r)] for tid, rows in groups.items()
        }
        kept = [row for tid, rows in groups.items() for row in self._best(rows, rewards[tid])]
        for row in kept:
            write(row, 1.0)
        return kept, group_metrics(rewards, len(experiences), len(kept))

    def _best(self, rows: list[Any], rewards: list[float]) -> list[Any]:
        scored = [row for row in rows if is_scored(row)]
        if self.min_reward is None:
            scored = [] if not rewards or min(rewards) == max(rewards) else scored
        else:
            scored = [row for row in scored if row.reward >= self.min_reward]
        return sorted(scored, key=lambda row: -row.reward)[: self.n_best]

"""Grouped advantages by a baseline alone: reinforce, opmd, asymre, rec, and raft's choice."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from typing import Any, Optional

from trinity_dask.algorithm.advantages.base import ADVANTAGE_FN
from trinity_dask.algorithm.advantages.groups import (
    GroupOfOneWarning,
    Rewards,
    group_by_task,
    group_metrics,
    is_scored,
    mean,
    write,
)
from trinity_dask.registry import nearest


class BaselineAdvantage:
    """Base: scores of a group's rewards, written on the rows that have one.

    A group of one run gets 0 where the score is a comparison (``compares``).
    """

    compares = True

    def __init__(self) -> None:
        self._warn = GroupOfOneWarning()

    def __call__(self, experiences: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
        groups = group_by_task(experiences)
        rewards = {tid: Rewards.of(rows) for tid, rows in groups.items()}
        extra: dict[str, list[float]] = {}
        for tid, rows in groups.items():
            for row in rows:
                write(row, 0.0)
            if rewards[tid].n_runs >= (2 if self.compares else 1):
                scored = [row for row in rows if is_scored(row)]
                scores = self.scores(tid, rewards[tid], extra)
                for row, score in zip(scored, scores, strict=True):
                    write(row, score)
        if self.compares:
            self._warn([group.n_runs for group in rewards.values()])
        metrics = group_metrics(rewards, len(experiences), len(experiences))
        metrics |= {name: mean(values) for name, values in extra.items()}
        return [row for rows in groups.values() for row in rows], metrics

    def scores(self, tid: str, rewards: Rewards, extra: dict[str, list[float]]) -> list[float]:
        """Of each row of at least one run; group statistics for the metrics go to ``extra``."""
        raise TypeError(f"{type(self).__name__} defines no scores")


@ADVANTAGE_FN.register_module("reinforce")
class ReinforceAdvantage(BaselineAdvantage):
    """A = r, no baseline."""

    compares = False

    def scores(self, tid: str, rewards: Rewards, extra: dict[str, list[float]]) -> list[float]:
        return rewards.values


BASELINES = ("mean", "logavgexp")


def opmd_baseline(rewards: Rewards, kind: str, tau: float) -> float:
    """The mean, or tau·(logsumexp(r/tau) − log n), which leans to the best answers."""
    if kind == "mean":
        return rewards.mean()
    top = max(rewards.values)
    weighted = zip(rewards.values, rewards.weights, strict=True)
    total = math.fsum(weight * math.exp((r - top) / tau) for r, weight in weighted)
    return top + tau * math.log(total / rewards.n_runs)


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

    def scores(self, tid: str, rewards: Rewards, extra: dict[str, list[float]]) -> list[float]:
        baseline = opmd_baseline(rewards, self.kind, self.tau)
        extra.setdefault("group_baseline", []).append(baseline)
        extra.setdefault("reward_mean", []).append(rewards.mean())
        return [r - baseline for r in rewards.values]


@ADVANTAGE_FN.register_module("asymre")
class AsymREAdvantage(BaselineAdvantage):
    """A = r − (mean + baseline_shift), arXiv 2506.20520.

    A baseline below the mean makes off-policy learning lean on the good answers.
    """

    def __init__(self, baseline_shift: float = -0.1) -> None:
        super().__init__()
        self.shift = baseline_shift

    def scores(self, tid: str, rewards: Rewards, extra: dict[str, list[float]]) -> list[float]:
        baseline = rewards.mean() + self.shift
        extra.setdefault("group_baseline", []).append(baseline)
        return [r - baseline for r in rewards.values]


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

    def scores(self, tid: str, rewards: Rewards, extra: dict[str, list[float]]) -> list[float]:
        dropped: frozenset[Hashable] = frozenset()
        if self.drop:
            center = rewards.mean()
            below = [run for run, r in rewards.of_runs().items() if r < center]
            surplus = max(2 * len(below) - rewards.n_runs, 0)
            dropped = frozenset(random.Random(tid).sample(below, surplus))
        extra.setdefault("drop_balance", []).append(float(len(dropped)))
        pairs = list(zip(rewards.values, rewards.runs, strict=True))
        left = [(r, run) for r, run in pairs if run not in dropped]
        kept = Rewards([r for r, _ in left], [run for _, run in left])
        if kept.is_flat:
            return [0.0] * len(pairs)
        center = kept.mean()
        width = kept.std(ddof=0) + self.epsilon if self.std_normalize else 1.0
        return [0.0 if run in dropped else (r - center) / width for r, run in pairs]


@ADVANTAGE_FN.register_module("raft")
class RAFTAdvantage:
    """A = 1 for the ``n_best`` runs of each group by reward, the others go (2304.06767).

    The first of equal ones is taken. Every group gives its best, also one whose answers are
    all right, or all wrong: ``min_reward`` keeps only runs that reach it.
    """

    def __init__(self, n_best: int = 1, min_reward: Optional[float] = None) -> None:
        if n_best < 1:
            raise ValueError(f"n_best must be >= 1 (got {n_best})")
        self.n_best, self.min_reward = n_best, min_reward

    def __call__(self, experiences: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
        groups = group_by_task(experiences)
        rewards = {tid: Rewards.of(rows) for tid, rows in groups.items()}
        kept: list[Any] = []
        for tid, rows in groups.items():
            runs = sorted(rewards[tid].of_runs().items(), key=lambda item: -item[1])
            for best, reward in runs[: self.n_best]:
                if self.min_reward is None or reward >= self.min_reward:
                    kept += [row for row in rows if row.eid.rid == best and is_scored(row)]
        for row in kept:
            write(row, 1.0)
        return kept, group_metrics(rewards, len(experiences), len(kept))

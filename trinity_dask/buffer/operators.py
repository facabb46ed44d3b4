"""Operators: what may happen to a batch of experiences before it is committed.

Invariant: an operator returns the experiences that remain, in order, and numbers that
say what it did; it never invents a reward. Grouping is by task (``eid.tid``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from trinity_dask.algorithm.advantages import group_by_task
from trinity_dask.algorithm.registry import Registry
from trinity_dask.experience import RESPONSE_TRUNCATED, Experience

Result = tuple[list[Experience], dict[str, float]]
OPERATORS: Registry = Registry("operator")


class Operator(Protocol):
    """``OperatorConfig.args`` are the constructor's keyword arguments."""

    def process(self, exps: list[Experience]) -> Result: ...


def _is_valid(reward: float | None) -> bool:
    return reward is not None and not math.isnan(reward)


def _filtered(before: Sequence[Experience], kept: list[Experience]) -> Result:
    return kept, {"filtered_count": float(len(before) - len(kept))}


@OPERATORS.register_module("reward_filter")
class RewardFilter:
    """Keep experiences with reward >= ``threshold``; those without a reward are dropped."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, exps: list[Experience]) -> Result:
        kept = [e for e in exps if e.reward is not None and e.reward >= self.threshold]
        return _filtered(exps, kept)


@OPERATORS.register_module("invalid_reward_filter")
class InvalidRewardFilter:
    """Drop experiences whose reward is missing or NaN."""

    def process(self, exps: list[Experience]) -> Result:
        return _filtered(exps, [e for e in exps if _is_valid(e.reward)])


@OPERATORS.register_module("reward_std_filter")
class RewardStdFilter:
    """Drop the groups that teach nothing: one member, or population std <= ``threshold``.

    Members without a valid reward do not count; a group is kept or dropped as a whole.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, exps: list[Experience]) -> Result:
        groups = group_by_task(exps)
        rewards = {
            tid: [e.reward for e in group if e.reward is not None and _is_valid(e.reward)]
            for tid, group in groups.items()
        }
        kept = {tid for tid, values in rewards.items() if self._is_spread(values)}
        result, metrics = _filtered(exps, [e for e in exps if e.eid.tid in kept])
        metrics |= {"operator_filtered_count": metrics["filtered_count"]}
        return result, metrics | _origin_metrics([v for v in rewards.values() if v])

    def _is_spread(self, rewards: list[float]) -> bool:
        # equal rewards are compared, not subtracted: a rounded mean must not make a spread
        if len(rewards) < 2 or min(rewards) == max(rewards):
            return False
        return float(np.std(rewards)) > self.threshold


def _origin_metrics(rewards: list[list[float]]) -> dict[str, float]:
    """Group statistics before the filter: they show what it removed."""
    metrics = {}
    for name, statistic in (("reward_mean", np.mean), ("reward_std", np.std)):
        values = [float(statistic(group)) for group in rewards]
        for summary, function in (("mean", np.mean), ("max", max), ("min", min)):
            if values:
                key = f"origin_group_advantages/{name}/{summary}"
                metrics[key] = float(function(values))
    return metrics


@OPERATORS.register_module("mask_response_truncated")
class MaskResponseTruncated:
    """Responses that were cut are kept in the group but not learned: action mask all false."""

    def process(self, exps: list[Experience]) -> Result:
        cut = [e for e in exps if e.truncate_status == RESPONSE_TRUNCATED]
        for exp in cut:
            exp.action_mask = np.zeros(exp.response_length, np.bool_)
        return exps, {"masked_truncated_count": float(len(cut))}

"""Operators: what may happen to a batch of experiences before it is committed.

Invariant: an operator returns the experiences that remain, in order, and numbers that
say what it did; it never invents a reward. Grouping is by task (``eid.tid``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from trinity_dask.algorithm.advantages import Rewards, group_by_task
from trinity_dask.buffer.operators.reward_operators import is_valid
from trinity_dask.experience import RESPONSE_TRUNCATED, Experience
from trinity_dask.registry import Registry

Result = tuple[list[Experience], dict[str, Any]]
_REWARDS = "trinity_dask.buffer.operators.reward_operators"
OPERATORS: Registry[Any] = Registry(
    "operator",
    {
        "reward_shaping_mapper": f"{_REWARDS}:RewardShapingMapper",
        "overlong_penalty": f"{_REWARDS}:OverlongPenalty",
        "pass_rate_calculator": f"{_REWARDS}:PassRateCalculator",
    },
)


class Operator(Protocol):
    """``OperatorConfig.args`` are the constructor's keyword arguments.

    Metrics are numbers; a key that begins with ``time/`` and the key ``selector_metric``
    are passed on as they are, others get the operator's name.
    """

    def process(self, exps: list[Experience]) -> Result: ...


def _teaches(exp: Experience, outcome: float | None) -> bool:
    """Whether a row has an outcome and a token to learn: others have no say about a group."""
    return is_valid(outcome) and bool(exp.action_mask is not None and exp.action_mask.any())


def _of_runs(outcomes: Sequence[tuple[Experience, float | None]]) -> Rewards:
    """The outcomes that have a say about their group, by run: each run counts once."""
    counted = [(float(o), e.eid.rid) for e, o in outcomes if o is not None and _teaches(e, o)]
    return Rewards([outcome for outcome, _ in counted], [run for _, run in counted])


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
        return _filtered(exps, [e for e in exps if is_valid(e.reward)])


@OPERATORS.register_module("reward_std_filter")
class RewardStdFilter:
    """Drop the groups that teach nothing: one run, or population std <= ``threshold``.

    Experiences without a valid reward, and those that are masked, do not count; a group is
    kept or dropped as a whole.
    """

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = threshold

    def process(self, exps: list[Experience]) -> Result:
        groups = group_by_task(exps)
        rewards = {tid: _of_runs([(e, e.reward) for e in g]) for tid, g in groups.items()}
        kept = {tid for tid, r in rewards.items() if not r.is_flat and r.std(0) > self.threshold}
        result, metrics = _filtered(exps, [e for e in exps if e.eid.tid in kept])
        metrics |= {"operator_filtered_count": metrics["filtered_count"]}
        return result, metrics | _origin_metrics([r for r in rewards.values() if r.values])


def _origin_metrics(rewards: list[Rewards]) -> dict[str, float]:
    """Group statistics before the filter: they show what it removed."""
    metrics = {}
    of_groups = {
        "reward_mean": [group.mean() for group in rewards],
        "reward_std": [group.std(0) for group in rewards],
    }
    for name, values in of_groups.items():
        for summary, function in (("mean", np.mean), ("max", max), ("min", min)):
            if values:
                key = f"origin_group_advantages/{name}/{summary}"
                metrics[key] = float(function(values))
    return metrics


@OPERATORS.register_module("dapo_dynamic_sampling")
class DAPODynamicSampling:
    """Keep the groups with right and wrong answers (DAPO, arXiv 2503.14476, section 3.2).

    The outcome of a row is ``metrics[metric_key]``, or its reward where there is no such
    metric; a run is right when the mean of its rows' exceeds ``correct_threshold``. Rows
    without an outcome and masked ones do not count, and a group with fewer than two runs that
    count is dropped.
    ``dropped_all_correct`` and ``dropped_all_wrong`` count rows, as ``filtered_count`` does.
    """

    def __init__(self, metric_key: str = "accuracy", correct_threshold: float = 0.0) -> None:
        self.metric_key = metric_key
        self.correct_threshold = correct_threshold

    def process(self, exps: list[Experience]) -> Result:
        groups = group_by_task(exps)
        right = {tid: self._outcomes(group) for tid, group in groups.items()}
        kept = {tid for tid, hits in right.items() if len(hits) > 1 and 0 < sum(hits) < len(hits)}
        result, metrics = _filtered(exps, [e for e in exps if e.eid.tid in kept])
        alike = {tid: hits for tid, hits in right.items() if len(hits) > 1 and tid not in kept}
        correct = sum(len(groups[tid]) for tid, hits in alike.items() if all(hits))
        wrong = sum(len(groups[tid]) for tid, hits in alike.items() if not any(hits))
        metrics |= {"dropped_all_correct": float(correct), "dropped_all_wrong": float(wrong)}
        return result, metrics | {"kept_group_count": float(len(kept))}

    def _outcomes(self, group: Sequence[Experience]) -> list[bool]:
        outcomes = [(e, e.metrics.get(self.metric_key, e.reward)) for e in group]
        return [o > self.correct_threshold for o in _of_runs(outcomes).of_runs().values()]


@OPERATORS.register_module("mask_response_truncated")
class MaskResponseTruncated:
    """Responses that were cut are kept in the group but not learned: action mask all false."""

    def process(self, exps: list[Experience]) -> Result:
        cut = [e for e in exps if e.truncate_status == RESPONSE_TRUNCATED]
        for exp in cut:
            exp.action_mask = np.zeros(exp.response_length, np.bool_)
        return exps, {"masked_truncated_count": float(len(cut))}

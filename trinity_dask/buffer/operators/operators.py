"""Operators: what may happen to a batch of experiences before it is committed.

Invariant: an operator returns the experiences that remain, in order, and numbers that
say what it did; it never invents a reward: a row without one, or whose reward is not a
number, is dropped or left as it is. Grouping is by task (``eid.tid``).

An operator is a class with ``process(exps) -> (exps, metrics)``, made with
``OperatorConfig.args`` as keyword arguments. Metrics are numbers; a key that begins with
``time/`` and the key ``selector_metric`` are passed on as they are, others get its name. One that
drops rows may have ``why(group) -> str``, which tells of the rows of one task, as they were before,
for what reason some were dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trinity_dask.algorithm.advantages import Rewards, group_by_task
from trinity_dask.buffer.data.taskset import SELECTOR_METRIC
from trinity_dask.experience import RESPONSE_TRUNCATED, Experience
from trinity_dask.registry import Registry

Result = tuple[list[Experience], dict[str, Any]]
OPERATORS: Registry[Any] = Registry("operator")
SIXTEENTH = 1 / 16  # pass rates one answer of a group of 16 away from 0 and 1
STRICT_MARGIN = 1e-3


def is_valid(reward: float | None) -> bool:
    """Whether a reward can be computed with."""
    return reward is not None and not math.isnan(reward)


def _of_runs(outcomes: Sequence[tuple[Experience, float | None]]) -> Rewards:
    """The outcomes that have a say about their group, by run: each run counts once. A row
    without an outcome, or without a token to learn, has none."""
    counted = [
        (float(outcome), exp.eid.rid)
        for exp, outcome in outcomes
        if outcome is not None and is_valid(outcome)
        if exp.action_mask is not None and exp.action_mask.any()
    ]
    return Rewards([outcome for outcome, _ in counted], [run for _, run in counted])


def _filtered(before: Sequence[Experience], kept: list[Experience]) -> Result:
    return kept, {"filtered_count": float(len(before) - len(kept))}


@OPERATORS.register_module("reward_filter")
@dataclass
class RewardFilter:
    """Keep experiences with reward >= ``threshold``; those without a reward are dropped."""

    threshold: float = 0.0

    def process(self, exps: list[Experience]) -> Result:
        kept = [e for e in exps if e.reward is not None and e.reward >= self.threshold]
        return _filtered(exps, kept)

    def why(self, group: Sequence[Experience]) -> str:
        return f"no reward, or one below {self.threshold:g}"


@OPERATORS.register_module("invalid_reward_filter")
class InvalidRewardFilter:
    """Drop experiences whose reward is missing or NaN."""

    def process(self, exps: list[Experience]) -> Result:
        return _filtered(exps, [e for e in exps if is_valid(e.reward)])

    def why(self, group: Sequence[Experience]) -> str:
        return "no reward, or one that is not a number"


@OPERATORS.register_module("reward_std_filter")
@dataclass
class RewardStdFilter:
    """Drop the groups that teach nothing: one run, or population std <= ``threshold``.

    Experiences without a valid reward, and those that are masked, do not count; a group is
    kept or dropped as a whole.
    """

    threshold: float = 0.0

    def process(self, exps: list[Experience]) -> Result:
        groups = group_by_task(exps)
        rewards = {tid: _of_runs([(e, e.reward) for e in g]) for tid, g in groups.items()}
        kept = {tid for tid, r in rewards.items() if not r.is_flat and r.std(0) > self.threshold}
        result, metrics = _filtered(exps, [e for e in exps if e.eid.tid in kept])
        metrics |= {"operator_filtered_count": metrics["filtered_count"]}
        # group statistics before the filter: they show what it removed
        scored = [r for r in rewards.values() if r.values]
        metrics |= _summary("origin_group_advantages/reward_mean", [r.mean() for r in scored])
        metrics |= _summary("origin_group_advantages/reward_std", [r.std(0) for r in scored])
        return result, metrics

    def why(self, group: Sequence[Experience]) -> str:
        rewards = _of_runs([(e, e.reward) for e in group])
        if rewards.is_flat:
            return f"{len(rewards.of_runs())} runs that count, all with the same reward"
        return f"the group's rewards have a std of {rewards.std(0):.4g}, at most {self.threshold:g}"


@OPERATORS.register_module("dapo_dynamic_sampling")
@dataclass
class DAPODynamicSampling:
    """Keep the groups with right and wrong answers (DAPO, arXiv 2503.14476, section 3.2).

    The outcome of a row is ``metrics[metric_key]``, or its reward where there is no such
    metric; a run is right when the mean of its rows' exceeds ``correct_threshold``. Rows
    without an outcome and masked ones do not count, and a group with fewer than two runs that
    count is dropped.
    ``dropped_all_correct`` and ``dropped_all_wrong`` count rows, as ``filtered_count`` does.
    """

    metric_key: str = "accuracy"
    correct_threshold: float = 0.0

    def process(self, exps: list[Experience]) -> Result:
        groups = group_by_task(exps)
        right: dict[str, list[bool]] = {}
        for tid, group in groups.items():
            outcomes = [(e, e.metrics.get(self.metric_key, e.reward)) for e in group]
            runs = _of_runs(outcomes).of_runs().values()
            right[tid] = [outcome > self.correct_threshold for outcome in runs]
        kept = {tid for tid, hits in right.items() if len(hits) > 1 and 0 < sum(hits) < len(hits)}
        result, metrics = _filtered(exps, [e for e in exps if e.eid.tid in kept])
        alike = {tid: hits for tid, hits in right.items() if len(hits) > 1 and tid not in kept}
        correct = sum(len(groups[tid]) for tid, hits in alike.items() if all(hits))
        wrong = sum(len(groups[tid]) for tid, hits in alike.items() if not any(hits))
        metrics |= {"dropped_all_correct": float(correct), "dropped_all_wrong": float(wrong)}
        return result, metrics | {"kept_group_count": float(len(kept))}

    def why(self, group: Sequence[Experience]) -> str:
        outcomes = [(e, e.metrics.get(self.metric_key, e.reward)) for e in group]
        hits = [hit > self.correct_threshold for hit in _of_runs(outcomes).of_runs().values()]
        if len(hits) < 2:
            return f"{len(hits)} runs that count; a group needs two"
        return f"{sum(hits)} of {len(hits)} runs are right: nothing to compare"


@OPERATORS.register_module("mask_response_truncated")
class MaskResponseTruncated:
    """Responses that were cut are kept in the group but not learned: action mask all false."""

    def process(self, exps: list[Experience]) -> Result:
        cut = [e for e in exps if e.truncate_status == RESPONSE_TRUNCATED]
        for exp in cut:
            exp.action_mask = np.zeros(exp.response_length, np.bool_)
        return exps, {"masked_truncated_count": float(len(cut))}


@OPERATORS.register_module("reward_shaping_mapper")
class RewardShapingMapper:
    """reward ∘ (weight · info[stats_key]), in the order of ``reward_shaping_configs``.

    Each is ``{"stats_key", "op_type": ADD | SUB | MUL | DIV, "weight": 1.0}``. A row that
    lacks the key keeps its reward, and so does one that would be divided by 0.
    """

    def __init__(self, reward_shaping_configs: Sequence[Mapping[str, Any]] = ()) -> None:
        self._steps = [_shaping_step(cfg) for cfg in reward_shaping_configs]

    def process(self, exps: list[Experience]) -> Result:
        differences = []
        for exp in exps:
            if exp.reward is None:
                continue
            before = exp.reward
            for key, op_type, weight in self._steps:
                exp.reward = _shaped(exp.reward, op_type, weight, exp.info.get(key))
            differences.append(exp.reward - before)
        return exps, _summary("reward_diff", differences)


_OPERATIONS = ("ADD", "SUB", "MUL", "DIV")


def _shaping_step(cfg: Mapping[str, Any]) -> tuple[str, str, float]:
    unknown = set(cfg) - {"stats_key", "op_type", "weight"}
    op_type = str(cfg.get("op_type", "ADD")).upper()
    if unknown or "stats_key" not in cfg or op_type not in _OPERATIONS:
        raise ValueError(
            f"reward_shaping_configs holds {dict(cfg)}: each entry is stats_key, op_type (one of "
            f"{', '.join(_OPERATIONS)}) and weight"
        )
    return str(cfg["stats_key"]), op_type, float(cfg.get("weight", 1.0))


def _shaped(reward: float, op_type: str, weight: float, value: Any) -> float:
    if value is None:
        return reward
    term = weight * float(value)
    if op_type == "ADD":
        return reward + term
    if op_type == "SUB":
        return reward - term
    if op_type == "MUL":
        return reward * term
    return reward / term if term else reward


@OPERATORS.register_module("overlong_penalty")
class OverlongPenalty:
    """DAPO's soft punishment of long answers (arXiv 2503.14476, eq. 13), added to the reward.

    With L = ``max_response_tokens``, c = ``cache_tokens`` and |y| response tokens::

        0 for |y| <= L - c;  factor · (L - c - |y|) / c up to L;  -factor beyond

    Truncated answers are either punished or masked, so this and
    ``mask_response_truncated`` exclude each other.
    """

    def __init__(
        self, max_response_tokens: int, cache_tokens: int, penalty_factor: float = 1.0
    ) -> None:
        if not 0 <= cache_tokens <= max_response_tokens:
            raise ValueError(
                f"cache_tokens must be between 0 and max_response_tokens={max_response_tokens} "
                f"(got {cache_tokens})"
            )
        self._limit = max_response_tokens
        self._cache = cache_tokens
        self._factor = penalty_factor

    def penalty(self, n_tokens: int) -> float:
        """What is added to the reward of an answer of ``n_tokens`` tokens."""
        exceeded = n_tokens - (self._limit - self._cache)
        if exceeded <= 0:
            return 0.0
        # without a cache the punishment is a step: there is no slope to divide by
        share = 1.0 if exceeded >= self._cache else exceeded / self._cache
        return -self._factor * share

    def process(self, exps: list[Experience]) -> Result:
        penalties = []
        for exp in exps:
            if exp.reward is not None:
                penalties.append(self.penalty(exp.response_length))
                exp.reward += penalties[-1]
        metrics = _summary("penalty", penalties)
        metrics["penalised_count"] = float(sum(p < 0 for p in penalties))
        return exps, metrics


@OPERATORS.register_module("pass_rate_calculator")
class PassRateCalculator:
    """Mean reward of the runs of every task, as feedback for the selectors of the tasksets.

    ``selector_metric`` is ``{taskset_id: {"indices": [...], "values": [...]}}``. Put it
    before operators that drop or change rewards.
    """

    def process(self, exps: list[Experience]) -> Result:
        rewards: dict[tuple[int, int], list[tuple[float, str]]] = {}
        for exp in exps:
            index = exp.info.get("task_index") or {}
            if "index" in index and exp.reward is not None and is_valid(exp.reward):
                key = (int(index.get("taskset_id", 0)), int(index["index"]))
                rewards.setdefault(key, []).append((exp.reward, exp.eid.rid))
        rates = {key: Rewards(*zip(*pairs, strict=True)).mean() for key, pairs in rewards.items()}
        found: dict[int, dict[str, list[Any]]] = {}
        for (taskset_id, index), rate in rates.items():
            entry = found.setdefault(taskset_id, {"indices": [], "values": []})
            entry["indices"].append(index)
            entry["values"].append(rate)
        return exps, {SELECTOR_METRIC: found, **_selection_metrics(list(rates.values()))}


def _selection_metrics(rates: list[float]) -> dict[str, float]:
    """Shares of the tasks that can teach something, by how far they are from all or none."""
    if not rates:
        return {}
    rate = np.array(rates)
    low, high = SIXTEENTH + STRICT_MARGIN, 1 - SIXTEENTH - STRICT_MARGIN
    shares = {
        "valid_ratio": (rate > 0) & (rate < 1),
        "strict_valid_ratio": (rate > low) & (rate < high),
        "<1_ratio": rate < 1,
        ">0_ratio": rate > 0,
        "<15_16_ratio": rate < high,
        ">1_16_ratio": rate > low,
    }
    return {f"selection/{name}": float(hits.mean()) for name, hits in shares.items()}


def _summary(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }

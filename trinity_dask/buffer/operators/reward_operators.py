"""Operators that look at rewards, or change them by a stated rule; none drops a row.

Invariant: a row without a reward, or whose reward is not a number, is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trinity_dask.algorithm.advantages import Rewards
from trinity_dask.buffer.data.taskset_mix import SELECTOR_METRIC
from trinity_dask.experience import Experience

Result = tuple[list[Experience], dict[str, Any]]
SIXTEENTH = 1 / 16  # pass rates one answer of a group of 16 away from 0 and 1
STRICT_MARGIN = 1e-3


def is_valid(reward: float | None) -> bool:
    """Whether a reward can be computed with."""
    return reward is not None and not math.isnan(reward)


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
        metrics: dict[str, Any] = {SELECTOR_METRIC: _by_taskset(rates)}
        return exps, metrics | _selection_metrics(list(rates.values()))


def _by_taskset(rates: Mapping[tuple[int, int], float]) -> dict[int, dict[str, list[Any]]]:
    found: dict[int, dict[str, list[Any]]] = {}
    for (taskset_id, index), rate in rates.items():
        entry = found.setdefault(taskset_id, {"indices": [], "values": []})
        entry["indices"].append(index)
        entry["values"].append(rate)
    return found


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

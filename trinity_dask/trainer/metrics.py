"""The metrics of a train step: one dictionary out of one per rank, and what to warn of.

Invariant: a number that every rank computed over the global mini-batch is taken as it is;
one that covers a rank's own rows is weighted by the rank's tokens. Each warning is said once
per run, names the number that shows it, and what to change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

log = logging.getLogger("trinity_dask.trainer")

GLOBAL = ("actor/", "critic/", "advantage/", "variance_proxy/")
TRUNCATED_SHARE = 0.5
SILENT_STEPS = 5
GAP_NATS = 0.02  # more than reduced precision explains
NO_ADVANTAGE = 1e-6  # what rounding leaves of the difference of equal rewards


def merge_rank_metrics(ranks: Sequence[dict[str, float]], seconds: float) -> dict[str, float]:
    """Metrics of the step; ``seconds`` is its wall time at the caller.

    Adds ``tokens_per_s`` over all ranks and ``time/train_step``.
    """
    tokens = [metrics["tokens"] for metrics in ranks]
    merged: dict[str, float] = {}
    for name in {name: None for metrics in ranks for name in metrics}:
        values = [(m[name], t) for m, t in zip(ranks, tokens, strict=True) if name in m]
        merged[name] = _merge(name, values)
    total = sum(tokens)
    return merged | {
        "tokens": total,
        "global_seqlen/mean": total / len(tokens),  # tokens of a rank: are they balanced?
        "global_seqlen/min": min(tokens),
        "global_seqlen/max": max(tokens),
        "tokens_per_s": total / max(seconds, 1e-9),
        "time/train_step": seconds,
    }


def _merge(name: str, values: list[tuple[float, float]]) -> float:
    if name.startswith(("time/", "perf/max_")) or name.endswith("_max"):
        return max(value for value, _ in values)
    if name.endswith("_min"):
        return min(value for value, _ in values)
    weight = sum(tokens for _, tokens in values)
    if name.startswith(GLOBAL) or weight == 0:
        return values[0][0]
    return sum(value * tokens for value, tokens in values) / weight


class Alarms:
    """Looks at the metrics of every train step."""

    def __init__(self) -> None:
        self._rung: set[str] = set()
        self._flat_steps = 0
        self._silent_steps = 0

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        self._truncated(step, metrics.get("sample/truncated_share", 0.0))
        self._flat_steps = self._flat_steps + 1 if _flat(metrics) else 0
        silent = 0.0 in (metrics.get("actor/grad_norm"), metrics.get("actor/updates"))
        self._silent_steps = self._silent_steps + 1 if silent else 0
        self._no_signal(metrics)
        self._gap(step, metrics)

    def _truncated(self, step: int, share: float) -> None:
        if share > TRUNCATED_SHARE:
            self._ring(
                "truncated",
                "%.0f%% of the answers of step %d were cut at the token limit; raise "
                "model.max_response_tokens if the task needs longer answers",
                100 * share,
                step,
            )

    def _no_signal(self, metrics: Mapping[str, float]) -> None:
        if self._silent_steps >= SILENT_STEPS:
            self._ring(
                "silent",
                "the gradient was exactly 0 in the last %d steps: all answers of each group earn "
                "the same reward, or none, so nothing is learned. Look at the rewards, use an "
                "easier task or a better start model, or raise algorithm.repeat_times",
                SILENT_STEPS,
            )
        elif self._flat_steps >= SILENT_STEPS:
            self._ring(
                "flat",
                "every answer of the last %d steps had the same reward (%g): nothing can be "
                "learned from rewards that do not differ. Look at the reward function and at "
                "some answers; are they cut, or is the task too hard or too easy?",
                SILENT_STEPS,
                metrics.get("sample/reward/mean", 0.0),
            )

    def _gap(self, step: int, metrics: Mapping[str, float]) -> None:
        """With the same weights, sampler and trainer must mean the same distribution."""
        same_weights = metrics.get("sample/model_version/min") == step - 1
        gap = metrics.get("correction/gap", 0.0)
        if same_weights and gap > GAP_NATS:
            self._ring(
                "gap",
                "the sampler's log-probs and the trainer's differ by %.3g nats per token (ratio "
                "%.3g to %.3g for 98%% of the tokens) although the weights are the same: "
                "model.top_p and model.top_k narrow what is sampled, a reduced precision rounds "
                "it. Set them to 1.0 and -1, or use algorithm.rollout_correction",
                gap,
                metrics.get("correction/ratio_p01", math.nan),
                metrics.get("correction/ratio_p99", math.nan),
            )

    def _ring(self, name: str, message: str, *values: float) -> None:
        if name not in self._rung:
            self._rung.add(name)
            log.warning(message, *values)


def _flat(metrics: Mapping[str, float]) -> bool:
    """Rewards that do not differ, and advantages that are nothing because of it.

    A teacher, step rewards or a critic can give a direction to rows of equal reward. One
    reward alone says nothing.
    """
    several = metrics.get("sample/reward/count", 0.0) > 1
    ends = [metrics.get(f"critic/advantages/{end}", math.inf) for end in ("min", "max")]
    flat = metrics.get("sample/reward/std") == 0.0
    return several and flat and max(map(abs, ends)) <= NO_ADVANTAGE

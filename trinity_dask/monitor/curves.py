"""Which metrics are drawn together, on the dashboard's page: the curves.

Invariant: a metric belongs to the first curve that its name fits, or to none; curves have names
that never change, since they are parts of URLs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

AGES = "sample/staleness_tokens/"  # of the tokens of a step; drawn as a histogram


@dataclass(frozen=True)
class Curve:
    """Metrics over steps: ``title`` with the ``unit`` of the vertical axis."""

    name: str
    title: str
    unit: str
    metrics: re.Pattern[str]
    logarithmic: bool = False

    def shows(self, metric: str) -> bool:
        return self.metrics.search(metric) is not None


def _curve(name: str, title: str, unit: str, *patterns: str, logarithmic: bool = False) -> Curve:
    return Curve(name, title, unit, re.compile("|".join(patterns)), logarithmic)


CURVES = (
    _curve(
        "reward",
        "Sampled reward",
        "reward, mean of a batch",
        "^rollout/reward/mean$",
        "^sample/reward/mean$",
    ),
    _curve(
        "eval",
        "Evaluation",
        "score, mean of a taskset",
        r"^(eval|bench)/(?!.*(/time/|/std(@\d+)?$))"
        r"(?!.*/(failed_runs|cancelled_runs|finished_task_count|model_version|retries)$)",
    ),
    _curve("loss", "Loss", "loss", r"^(actor|critic)/(?!kl_loss$).*loss$"),
    _curve("entropy", "Entropy", "nats per token", "^actor/entropy$"),
    _curve("kl", "KL divergence", "nats per token", "^actor/(ppo_kl|kl_loss)$", "/kl/mean$"),
    _curve(
        "ratio",
        "Ratio of new to old policy",
        "ratio, quantiles over tokens",
        "^(update|correction)/ratio_(p01|p50|p99)$",
    ),
    _curve(
        "gap",
        "Gap between sampler and trainer",
        "nats, mean |difference| per token",
        "^correction/gap$",
        "^update/gap$",
        "^sync/probe_max_abs_diff$",
    ),
    _curve("gradient", "Gradient norm", "norm", "^(actor|critic)/grad_norm$", logarithmic=True),
    _curve("length", "Length of answers", "tokens", "^rollout/response_length/(mean|max)$"),
    _curve(
        "share",
        "Cut answers, groups without a signal",
        "share",
        "^rollout/truncated_share$",
        "^sample/zero_variance_share$",
    ),
    _curve("speed", "Speed", "tokens/s", "^(rollout/)?tokens_per_s$", logarithmic=True),
    _curve(
        "time",
        "Where the time goes",
        "s per step",
        "^time/(explore_step|train_step|wait_data|sync_wait|sync_weight|eval|save_checkpoint)$",
        logarithmic=True,
    ),
)


def curve_of(metric: str) -> Curve | None:
    """The curve on which a metric is drawn; None: on none."""
    return next((curve for curve in CURVES if curve.shows(metric)), None)


def is_drawn(metric: str) -> bool:
    """Whether a metric is on a curve or counts the age of tokens."""
    return metric.startswith(AGES) or curve_of(metric) is not None


def drawn(metrics: Iterable[str]) -> list[str]:
    """Those that are drawn, in their order."""
    return [name for name in metrics if is_drawn(name)]

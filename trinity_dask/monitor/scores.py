"""Which of a run's metrics say whether the model got better.

Invariant: the report and the curves show the same ones, and bookkeeping (counts, times,
versions, spreads) is not among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# written by mode bench into a stage's directory: {"results": {step: {metric: value}}, ...}
BENCHMARK_FILE = "benchmark_meta.json"
REWARD = "rollout/reward/mean"  # the sampled reward of a batch
# what shows progress where no reward does: demonstrations, preference pairs, a teacher
TAUGHT = (
    "/sft_loss",
    "/dpo_loss",
    "actor/accuracy_mean",
    "advantage/kl/mean",
    "advantage/jsd/mean",
)
BOOKKEEPING = re.compile(
    r"/time/|/(failed_runs|cancelled_runs|finished_task_count|model_version|retries)$|/std(@\d+)?$"
)


def eval_scores(names: Iterable[str]) -> list[str]:
    """The evaluation metrics that score answers, in the given order."""
    return [name for name in names if name.startswith("eval/") and not BOOKKEEPING.search(name)]


def bench_scores(names: Iterable[str]) -> list[str]:
    """The benchmark metrics that score answers, in the given order."""
    return [name for name in names if name.startswith("bench/") and not BOOKKEEPING.search(name)]


def rewards(names: Iterable[str]) -> list[str]:
    """The sampled reward, if it was logged."""
    return [REWARD] if REWARD in names else []


def losses(names: Iterable[str]) -> list[str]:
    """The losses of the algorithm; ``final_loss`` is their sum and only shown alone."""
    found = [name for name in names if name.endswith("loss")]
    return [name for name in found if not name.endswith("/final_loss")] or found


def headline_scores(names: Iterable[str]) -> list[str]:
    """What a table of before and after compares."""
    names = list(names)
    taught = [name for name in names if name.endswith(TAUGHT)]
    return [*eval_scores(names), *rewards(names), *taught]

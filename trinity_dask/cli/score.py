"""The one number of a finished run, for sweepers.

Invariant: read from the metrics on disk: the last value of the evaluation that says most,
else of the sampled reward, else None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

# from most to least telling; a column matches when it contains all words of a row
_PREFERRED = (("accuracy", "mean"), ("accuracy",), ("reward", "mean"), ("reward",), ())


def final_score(job_dir: str) -> Optional[float]:
    """Last value of :func:`best_column` over all stages of ``job_dir``."""
    from trinity_dask.monitor.history import load_metrics

    frame = load_metrics(job_dir)
    name = best_column([str(column) for column in frame.columns])
    if name is None:
        return None
    return float(frame[name].dropna().iloc[-1])  # a column exists because it has a value


def best_column(columns: Sequence[str]) -> Optional[str]:
    """The name of the metric to optimise (greater is better)."""
    evals = [name for name in columns if name.startswith("eval/") and "time/" not in name]
    for words in _PREFERRED:
        for name in evals:
            if all(word in name for word in words):
                return name
    sampled = ("rollout/reward/mean", "rollout/reward", "reward/mean", "reward")
    return next((name for name in sampled if name in columns), None)

"""What a job's directory says of it: its stages' configurations, and its score.

Invariant: read only; a directory that holds no run is named in the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from trinity_dask.cli import CommandError
from trinity_dask.config.schema import Config

# from most to least telling; a column matches when it contains all words of a row
_PREFERRED = (("accuracy", "mean"), ("accuracy",), ("reward", "mean"), ("reward",), ())


def saved_stages(job_dir: str | Path) -> list[Config]:
    """The saved configurations of the stages that have begun, in their order.

    ``job_dir`` is a job's directory or that of one stage; where it was moved, so are the paths.

    Raises:
        CommandError: there is no run in it.
    """
    from trinity_dask.records import layout

    try:
        return layout.saved_stages(job_dir)
    except LookupError as error:
        raise CommandError(str(error)) from error


def final_score(job_dir: str) -> Optional[float]:
    """Last value of :func:`best_column` over all stages of ``job_dir``, for sweepers."""
    from trinity_dask.monitor.history import load_metrics

    frame = load_metrics(job_dir)
    name = best_column([str(column) for column in frame.columns])
    if name is None:
        return None
    return float(frame[name].dropna().iloc[-1])  # a column exists because it has a value


def best_column(columns: Sequence[str]) -> Optional[str]:
    """The name of the metric to optimise (greater is better): the evaluation that says most,
    else the sampled reward, else None."""
    evals = [name for name in columns if name.startswith("eval/") and "time/" not in name]
    for words in _PREFERRED:
        for name in evals:
            if all(word in name for word in words):
                return name
    sampled = ("rollout/reward/mean", "rollout/reward", "reward/mean", "reward")
    return next((name for name in sampled if name in columns), None)

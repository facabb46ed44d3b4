"""From the metrics of single experiences to the metrics of a batch.

Invariant: a key may end in ``:mean``, ``:sum``, ``:max``, ``:min`` or ``:last``; that
suffix says how values of the key are reduced at every level (no suffix: mean). Values that
are no real, finite-or-not numbers are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

Metrics = Mapping[str, float]

TIME_RUN = "time/run_execution"
TIME_TASK = "time/task_execution"
BOOTSTRAP_DRAWS = 1000
BOOTSTRAP_SEED = 42

# plain Python: the lists are short, and this runs once per metric of every task
_REDUCERS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "sum": math.fsum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


def split_key(key: str) -> tuple[str, str]:
    """Name and reduction of a key; an unknown suffix stays part of the name."""
    name, separator, suffix = key.rpartition(":")
    if separator and suffix in _REDUCERS:
        return name, suffix
    return key, "mean"


def collect(dicts: Iterable[Metrics]) -> dict[str, list[float]]:
    """Values of every key over ``dicts``, in order; non-numbers are left out."""
    values: dict[str, list[float]] = {}
    for metrics in dicts:
        for key, value in metrics.items():
            if isinstance(value, (int, float, np.number, np.bool_)):
                values.setdefault(key, []).append(float(value))
    return values


def reduce_metrics(dicts: Iterable[Metrics]) -> dict[str, float]:
    """One dict out of many: every key reduced by its suffix, which it keeps."""
    return {key: _REDUCERS[split_key(key)[1]](v) for key, v in collect(dicts).items()}


def task_metrics(
    runs: Sequence[Metrics], seconds: Sequence[float], is_eval: bool
) -> dict[str, float]:
    """Metrics of a task from those of its runs (``seconds``: how long each sub-task took)."""
    dicts = [*runs, *({TIME_TASK: value} for value in seconds)]
    if not is_eval:
        return reduce_metrics(dicts)
    result: dict[str, float] = {}
    for key, values in collect(dicts).items():
        name, how = split_key(key)
        if how != "mean" or name in (TIME_RUN, TIME_TASK):
            result[key] = _REDUCERS[how](values)
        else:
            result |= {f"{name}/{stat}": v for stat, v in repeated_statistics(values).items()}
    return result


def repeated_statistics(values: Sequence[float]) -> dict[str, float]:
    """``mean@n``, ``std@n`` (population) and, for n > 1, ``best@k`` and ``worst@k``.

    k runs over 2, 4, 8, ... below n, and n. best@k (worst@k) is the mean over 1000
    bootstrap draws of k values with replacement of their maximum (minimum).
    """
    array = np.asarray(values, dtype=np.float64)
    n = len(array)
    result = {f"mean@{n}": float(array.mean()), f"std@{n}": float(array.std())}
    # 2, 4, 8, ... below n, and n
    sizes = [2**i for i in range(1, n.bit_length()) if 2**i < n]
    for k in [*sizes, n] if n > 1 else []:
        draws = array[_bootstrap_indices(n, k)]
        result[f"best@{k}"] = float(draws.max(axis=1).mean())
        result[f"worst@{k}"] = float(draws.min(axis=1).mean())
    return result


@lru_cache(maxsize=256)
def _bootstrap_indices(n: int, k: int) -> np.ndarray:
    """int64 ``[1000, k]``; the same for every task, so that tasks can be compared."""
    return np.random.RandomState(BOOTSTRAP_SEED).choice(n, size=(BOOTSTRAP_DRAWS, k))


def batch_metrics(tasks: Sequence[Metrics], prefix: str) -> dict[str, float]:
    """Metrics of a train batch: ``prefix/name/{mean,max,min}``, or ``prefix/name/<how>``."""
    result: dict[str, float] = {}
    for key, values in collect(tasks).items():
        name, how = split_key(key)
        hows = ("mean", "max", "min") if how == "mean" else (how,)
        result |= {f"{prefix}/{name}/{h}": _REDUCERS[h](values) for h in hows}
    return result


def eval_batch_metrics(
    tasks: Sequence[Metrics], prefix: str, detailed: bool = False
) -> dict[str, float]:
    """Metrics of an eval batch: ``prefix/name`` (``detailed``: its mean, max, min and std)."""
    result: dict[str, float] = {}
    for key, values in collect(tasks).items():
        name, how = split_key(key)
        if how != "mean":
            result[f"{prefix}/{name}/{how}"] = _REDUCERS[how](values)
        elif detailed:
            result |= {f"{prefix}/{name}/{h}": _REDUCERS[h](values) for h in ("mean", "max", "min")}
            result[f"{prefix}/{name}/std"] = float(np.std(values))
        else:
            result[f"{prefix}/{name}"] = _REDUCERS["mean"](values)
    return result

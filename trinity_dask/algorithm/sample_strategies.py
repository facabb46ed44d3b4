"""Names of the ways to draw a train step's rows; the classes are in ``buffer``.

Invariant: nothing of the buffer is imported until a strategy is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from trinity_dask.registry import Registry, check_args

_MODULE = "trinity_dask.buffer.sample_strategy"

SAMPLE_STRATEGY: Registry[Any] = Registry(
    "sample_strategy",
    {
        "default": f"{_MODULE}:SampleStrategy",
        "warmup": f"{_MODULE}:SampleStrategy",
        "staleness_control": f"{_MODULE}:StalenessControlSampleStrategy",
        "mix": f"{_MODULE}:MixSampleStrategy",
    },
)

OVER_LIMIT = ("drop", "mask")

# arguments where the user gives none
SAMPLE_STRATEGY_ARGS: dict[str, dict[str, object]] = {
    # model versions; None: any age. over_limit: drop (the whole group) | mask (those tokens)
    "staleness_control": {"max_staleness": None, "over_limit": "drop"},
    "mix": {"expert_data_ratio": 0.5, "sft_dataset_name": "sft_dataset"},
}


def check_strategy(name: str, args: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument or a value that one of our strategies cannot take.

    A strategy at a dotted path is left to the process that runs it.
    """
    if name not in SAMPLE_STRATEGY.names():
        return
    factory = SAMPLE_STRATEGY.get(name)
    check_args(f"sample_strategy {name!r}", factory, args, hidden=("cfg", "buffer"))
    if "max_staleness" in args:
        check_staleness(args["max_staleness"])
    if "over_limit" in args:
        check_over_limit(args["over_limit"])
    if "expert_data_ratio" in args:
        check_expert_ratio(args["expert_data_ratio"])


def check_staleness(max_staleness: Optional[float]) -> None:
    """Raise ValueError unless it is None or a number of train steps >= 0."""
    if max_staleness is not None and not max_staleness >= 0:
        raise ValueError(
            f"max_staleness must be >= 0 train steps (got {max_staleness}), or null for no limit"
        )


def check_over_limit(over_limit: str) -> None:
    """Raise ValueError unless it is ``drop`` or ``mask``."""
    if over_limit not in OVER_LIMIT:
        raise ValueError(f"over_limit must be one of {', '.join(OVER_LIMIT)} (got {over_limit!r})")


def check_expert_ratio(ratio: float) -> None:
    """Raise ValueError unless 0 < ratio < 1."""
    if not 0 < ratio < 1:
        raise ValueError(f"expert_data_ratio must be between 0 and 1 (got {ratio}), as 0.5")

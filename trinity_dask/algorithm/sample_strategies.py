"""Names of the ways to draw a train step's rows; the classes are in ``buffer``.

Invariant: nothing of the buffer is imported until a strategy is asked for.
"""

from __future__ import annotations

from trinity_dask.algorithm.registry import LazyRegistry

_MODULE = "trinity_dask.buffer.sample_strategy"

SAMPLE_STRATEGY = LazyRegistry("sample_strategy")
SAMPLE_STRATEGY.register_module("default")(f"{_MODULE}:DefaultSampleStrategy")
SAMPLE_STRATEGY.register_module("warmup")(f"{_MODULE}:DefaultSampleStrategy")
SAMPLE_STRATEGY.register_module("staleness_control")(f"{_MODULE}:StalenessControlSampleStrategy")
SAMPLE_STRATEGY.register_module("mix")(f"{_MODULE}:MixSampleStrategy")

# arguments where the user gives none
SAMPLE_STRATEGY_ARGS: dict[str, dict[str, object]] = {
    "staleness_control": {"max_staleness": None},  # model versions; None: any age
    "mix": {"expert_data_ratio": 0.5, "sft_dataset_name": "sft_dataset"},
}

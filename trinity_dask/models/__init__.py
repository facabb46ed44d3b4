"""Engines and what workflows see of them.

Invariant: importing this package, or any module in it except the vLLM worker's, imports
neither torch nor transformers nor vllm; they are imported by the functions that need them.
"""

from __future__ import annotations

from collections.abc import Callable

from trinity_dask.models.protocol import EngineSpec, InferenceEngine
from trinity_dask.registry import Registry

# what explorer.rollout_model.engine_type may name: a class that is made from an EngineSpec and
# implements InferenceEngine; a user's own goes by its registered name or by its path
ENGINES: Registry[Callable[[EngineSpec], InferenceEngine]] = Registry(
    "engine_type",
    {
        "vllm": "trinity_dask.models.vllm.engine:VLLMEngine",
        "torch": "trinity_dask.models.torch.engine:TorchEngine",
        "fake": "trinity_dask.models.fake_engine:FakeEngine",
    },
)

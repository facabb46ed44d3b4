"""Reinforcement fine-tuning of language models as a Dask-distributed dataflow.

Invariant: importing this package imports neither torch, dask nor hydra; names are loaded
when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "Run": "trinity_dask.run",
    "load_config": "trinity_dask.config",
    "Config": "trinity_dask.config",
    "Experience": "trinity_dask.experience",
    "EID": "trinity_dask.experience",
    "Workflow": "trinity_dask.workflows",
    "WORKFLOWS": "trinity_dask.workflows",
    "REWARD_FUNCTIONS": "trinity_dask.rewards",
    "rollouts": "trinity_dask.records",
}
__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'trinity_dask' has no attribute {name!r}")

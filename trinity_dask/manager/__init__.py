"""What keeps explorer and trainer in step: synchronizer, engine pool, accounts, state files."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Synchronizer": "trinity_dask.sync.synchronizer",
    "RemoteSynchronizer": "trinity_dask.sync.remote_sync",
    "RunningStatus": "trinity_dask.sync.state",
    "StateManager": "trinity_dask.manager.state_manager",
    "EnginePool": "trinity_dask.engines.pool",
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'trinity_dask.manager' has no attribute {name!r}")

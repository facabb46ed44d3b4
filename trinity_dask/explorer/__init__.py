"""Turns tasks into committed experiences.

Invariant: importing this package imports nothing else, so that the scheduler's decisions can
be used without Dask, torch or a cluster; its public names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Coordinator": "trinity_dask.explorer.coordinator",
    "ExploreLoop": "trinity_dask.explorer.loop",
    "Scheduler": "trinity_dask.explorer.schedule.scheduler",
    "WorkflowRunner": "trinity_dask.explorer.rollout.workflow_runner",
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'trinity_dask.explorer' has no attribute {name!r}")

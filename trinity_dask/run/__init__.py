"""Starting, watching and finding runs: for notebooks and the command line.

Invariant: importing this package imports no dask; its names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Run", "RunFailed"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("trinity_dask.run.session"), name)
    raise AttributeError(f"module 'trinity_dask.run' has no attribute {name!r}")

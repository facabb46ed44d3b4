"""Starting, watching and finding runs: for notebooks (:class:`Run`) and for the command line.

Invariant: importing this package imports no dask; its names are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Run": "trinity_dask.run.session",
    "RunFailed": "trinity_dask.run.session",
    "run_from_cli": "trinity_dask.run.console",
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'trinity_dask.run' has no attribute {name!r}")

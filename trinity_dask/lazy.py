"""Public names of a module that are loaded when they are first used.

Invariant: importing a module that uses this imports nothing that stands behind its names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def names(module: str, sources: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module``: ``sources`` says which module defines each name."""

    def load(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(sources[name]), name)

    return load

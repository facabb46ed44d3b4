"""Configuration: typed keys, presets, derived values, and errors that say the fix.

Invariant: importing this package imports neither torch nor dask; Hydra is imported when a
name that needs it is first used, so that a worker process, which only reads values, starts
without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trinity_dask.config.errors import ConfigError, ConfigWarning
from trinity_dask.config.schema import Config

if TYPE_CHECKING:
    from trinity_dask.config.compose import (
        compose_tree,
        from_yaml,
        load_config,
        resolve,
        save,
        split_stages,
        to_yaml,
        validate,
    )

__all__ = [
    "Config",
    "ConfigError",
    "ConfigWarning",
    "compose_tree",
    "from_yaml",
    "load_config",
    "resolve",
    "save",
    "split_stages",
    "to_yaml",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.compose"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

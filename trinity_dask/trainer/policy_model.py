"""The earlier path of :mod:`trinity_dask.trainer.model.policy_model`.

Invariant: nothing is defined here, and nothing is loaded before it is used.
"""

from __future__ import annotations

from trinity_dask import lazy

_NAMES = ("load_policy",)
_SOURCES = dict.fromkeys(_NAMES, "trinity_dask.trainer.model.policy_model")
__all__ = list(_SOURCES)
__getattr__ = lazy.names(__name__, _SOURCES)

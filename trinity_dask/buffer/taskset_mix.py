"""The earlier path of mixed tasksets.

Invariant: nothing is defined here, and nothing is loaded before it is used.
"""

from __future__ import annotations

from trinity_dask import lazy

_SOURCES = dict.fromkeys(
    ("SELECTOR_METRIC", "TasksetScheduler"), "trinity_dask.buffer.data.taskset"
)
__all__ = list(_SOURCES)
__getattr__ = lazy.names(__name__, _SOURCES)

"""The earlier path of the row reader.

Invariant: nothing is defined here, and nothing is loaded before it is used.
"""

from __future__ import annotations

from trinity_dask import lazy

_NAMES = ("RowReader",)
_SOURCES = dict.fromkeys(_NAMES, "trinity_dask.buffer.data.readers")
__all__ = list(_SOURCES)
__getattr__ = lazy.names(__name__, _SOURCES)

"""Trinity-RFT's path of the explorer.

Invariant: nothing is defined here, and nothing is loaded before it is used.
"""

from __future__ import annotations

from trinity_dask import lazy

_SOURCES = {"Explorer": "trinity_dask.compat.explorer"}
__all__ = list(_SOURCES)
__getattr__ = lazy.names(__name__, _SOURCES)

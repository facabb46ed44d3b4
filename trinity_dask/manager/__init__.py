"""Trinity-RFT's paths of the synchronizer and the state manager.

Invariant: nothing is defined here, and nothing is loaded before it is used.
"""

from __future__ import annotations

from trinity_dask import lazy

_SOURCES = {
    "Synchronizer": "trinity_dask.compat.synchronizer",
    "RunningStatus": "trinity_dask.sync.state",
    "StateManager": "trinity_dask.compat.state_manager",
}
__all__ = list(_SOURCES)
__getattr__ = lazy.names(__name__, _SOURCES)

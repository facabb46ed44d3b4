"""Trinity-RFT's path of :class:`~trinity_dask.compat.state_manager.StateManager`.

Invariant: nothing is defined here.
"""

from __future__ import annotations

from trinity_dask.compat.state_manager import StateManager

__all__ = ["StateManager"]

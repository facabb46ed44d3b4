"""Trinity-RFT's path of :class:`~trinity_dask.compat.synchronizer.Synchronizer`.

Invariant: nothing is defined here.
"""

from __future__ import annotations

from trinity_dask.compat.synchronizer import Synchronizer

__all__ = ["Synchronizer"]

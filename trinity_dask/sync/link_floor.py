"""How fast the way to the engines is when nothing is done with the bytes.

Invariant: measured once, with a sample of at most :data:`SAMPLE_BYTES`, and given up at a
deadline: a run starts no later for it, and without a floor it runs all the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Optional

import numpy as np

from trinity_dask.sync.shelf import WeightShelf

log = logging.getLogger("trinity_dask.weights")

SAMPLE_BYTES = 16 << 20
DEADLINE_S = 10.0


class FileFloor:
    """Of a file method: a copy in memory, or a write and a read where the weights lie."""

    def __init__(self) -> None:
        self._bytes_per_s: Optional[float] = None
        self._is_known = False

    async def bytes_per_s(self, shelf: WeightShelf, n_bytes: int) -> Optional[float]:
        """Measured at the first call; None if that took too long or failed."""
        if not self._is_known:
            self._is_known = True
            sample = min(n_bytes, SAMPLE_BYTES)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    self._bytes_per_s = await asyncio.to_thread(_measured, shelf, sample)
            except Exception as error:
                log.info("the bare speed of %s is not known: %r", shelf.base, error)
        return self._bytes_per_s


def _measured(shelf: WeightShelf, n_bytes: int) -> float:
    data = np.ones(max(n_bytes, 1), dtype=np.uint8)
    if shelf.in_memory:
        target = np.zeros_like(data)  # its pages are there before the clock runs
        start = time.perf_counter()
        target[:] = data
    else:
        content = data.tobytes()
        start = time.perf_counter()
        shelf.round_trip(content)
    return len(data) / max(time.perf_counter() - start, 1e-9)


def share(n_bytes: float, bytes_per_s: Optional[float], seconds: float) -> dict[str, float]:
    """``sync/floor_share``: the part of ``seconds`` that the bare link needs; 1 is all of it."""
    if bytes_per_s is None:
        return {}
    return {"sync/floor_share": n_bytes / bytes_per_s / max(seconds, 1e-9)}

"""When a transfer to all engines is tried again.

Invariant: an attempt in which an engine was lost is not counted, because the engines' own
number of restarts bounds those; any other failure is counted, and a mismatch is never retried.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Optional, TypeVar

from trinity_dask.engines.errors import WeightMismatch
from trinity_dask.engines.pool import EnginePool

log = logging.getLogger("trinity_dask.synchronizer")

T = TypeVar("T")
TRANSFER_ATTEMPTS = 3


async def until_through(
    pool: EnginePool,
    once: Callable[[], Awaitable[T]],
    what: str,
    timeout_s: float,
    between: Optional[Callable[[], Awaitable[None]]] = None,
) -> T:
    """``once()`` with the engines that are present, until it goes through.

    ``between()`` is awaited before another attempt; ``timeout_s`` bounds the wait for an engine.

    Raises:
        EngineFailed: no engine is left.
        WeightMismatch: ``once`` raised it.
        Exception: what ``once`` raised the TRANSFER_ATTEMPTS-th time.
    """
    failed = 0
    while True:
        await pool.wait_present(timeout_s)
        losses = pool.losses
        try:
            return await once()
        except WeightMismatch:
            raise
        except Exception as error:
            await pool.look_for_lost()  # now: the next attempt needs everyone
            failed += pool.losses == losses
            if failed == TRANSFER_ATTEMPTS:
                raise
            log.warning("%s failed (%s); once more", what, error)
        if between is not None:
            await between()

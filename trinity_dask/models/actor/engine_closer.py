"""The worker plugin that closes an engine when its Dask worker closes.

Invariant: a worker's clean shutdown leaves no process or thread of its engine behind, and
is delayed by a bounded time only.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from distributed import Worker, WorkerPlugin

if TYPE_CHECKING:
    from trinity_dask.models.actor.actor import EngineActor

log = logging.getLogger("trinity_dask.engines")

CLOSE_TIMEOUT_S = 15.0


class EngineCloser(WorkerPlugin):
    """Awaits the actor's ``close`` in the worker's teardown."""

    def __init__(self, actor: EngineActor) -> None:
        self.actor = actor

    async def teardown(self, worker: Worker) -> None:
        try:
            await asyncio.wait_for(self.actor.close(), CLOSE_TIMEOUT_S)
        except Exception as error:
            log.warning("engine %s did not close: %r", self.actor.spec.slot, error)

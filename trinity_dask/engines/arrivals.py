"""Engine slots of workers that join the cluster while a run is under way.

Invariant: a slot is reported when a worker that carries it has joined, at least once; who
hears of it decides whether it is news.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Optional

from distributed import Client

from trinity_dask.cluster.announcements import listen
from trinity_dask.cluster.placement import slot_labels

log = logging.getLogger("trinity_dask.engines")

ENGINE = "engine-"


class Arrivals:
    """``on_present(slot)`` for every engine slot there is, whenever a worker has joined."""

    def __init__(self, client: Client, on_present: Callable[[str], None]) -> None:
        self._client = client
        self._on_present = on_present
        self._looks: set[asyncio.Task[None]] = set()
        self._unlisten: Optional[Callable[[], None]] = None

    def start(self) -> None:
        self._unlisten = listen(self._client, self._heard)

    async def stop(self) -> None:
        if self._unlisten is not None:
            self._unlisten()
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)

    async def present(self) -> list[str]:
        """The engine slots that running workers carry."""
        return sorted(s for s in await slot_labels(self._client) if s.startswith(ENGINE))

    def look(self) -> None:
        """Report who is there, in the background."""
        task = asyncio.get_running_loop().create_task(self._look())
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    def _heard(self, message: dict[str, Any]) -> None:
        if message.get("action") == "add-worker":
            self.look()

    async def _look(self) -> None:
        try:
            slots = await self.present()
        except OSError as error:  # the next announcement brings another look
            log.warning("the workers that joined could not be looked at: %s", error)
            return
        for slot in slots:
            self._on_present(slot)

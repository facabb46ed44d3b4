"""Which workers can take sub-tasks now: told by the Dask scheduler, never asked in a loop.

Invariant: a worker is reported up only when it runs and its engine takes requests, and it is
reported lost before it is reported up again. Its death is known a few milliseconds after the
Dask scheduler knows it.

What tells that a worker is (again) there is a tiny task with its slot label: Dask itself
keeps it until a worker with that label joins.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Optional

from distributed import Client

from trinity_dask.aio import Background, ended
from trinity_dask.cluster.context import current_worker
from trinity_dask.cluster.placement import LEAVING, listen, scheduler_of
from trinity_dask.cluster.slots import PREFIX, ROLLOUT, RUNNER, slot_resource
from trinity_dask.explorer.rollout.subtask import RunnerSettings, warm_up
from trinity_dask.models.actor.actor import ready_engine

log = logging.getLogger("trinity_dask.scheduler")

SLOTS_OF = {ROLLOUT: "engine-", RUNNER: "runner-"}
CLAIM_DELAY_S = 1.0  # a worker of a cluster that was there before gets its slot after it joined


async def report_ready(
    group: str, timeout_s: float, settings: Optional[RunnerSettings] = None
) -> tuple[str, int]:
    """Runs on the worker: once it can take sub-tasks, its address and how many at a time.

    Plugins and tokenizer are loaded first: an attempt's time is for its workflow alone.
    """
    if group == ROLLOUT:
        await ready_engine(timeout_s, settings.run if settings is not None else "")
    if settings is not None:
        await warm_up(settings)
    worker = current_worker()
    if worker is None:
        raise RuntimeError("report_ready runs on a Dask worker only")
    return worker.address, int(worker.state.total_resources.get(group, 0))


class Membership:
    """Watches the slots of the groups ``rollout`` and ``runner``.

    ``addresses`` are those of the slots that are up. ``on_up(slot, capacity, group)``,
    ``on_lost(slot)`` and, for a worker that is about to leave, ``on_left(slot)`` are called on
    the event loop.
    """

    def __init__(
        self,
        client: Client,
        ready_timeout_s: float,
        on_up: Callable[[str, int, str], None],
        on_lost: Callable[[str], None],
        settings: Optional[RunnerSettings] = None,
        on_left: Optional[Callable[[str], None]] = None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._ready_timeout_s = ready_timeout_s
        self._on_up = on_up
        self._on_lost = on_lost
        self._on_left = on_left or on_lost
        self._left: dict[str, str] = {}  # slots of workers that leave and are still there
        self.addresses: dict[str, str] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._looks = Background("looking for workers")
        self._unlisten: Optional[Callable[[], None]] = None

    async def start(self) -> None:
        self._unlisten = listen(self._client, self._heard)
        await self._look()

    async def stop(self) -> None:
        if self._unlisten is not None:
            self._unlisten()
        await self._looks.close()
        await ended(self._probes.values())
        self._probes.clear()
        self.addresses.clear()
        self._left.clear()

    def _heard(self, message: dict[str, Any]) -> None:
        action = message.get("action")
        if action == LEAVING:
            for slot, address in list(self.addresses.items()):
                if address == message.get("worker"):
                    self._left[slot] = self.addresses.pop(slot)
                    self._on_left(slot)
        elif action == "remove-worker":
            for slot, address in list(self._left.items()):
                if address == message.get("worker"):
                    del self._left[slot]
                    self._probe(slot)
            for slot, address in list(self.addresses.items()):
                if address == message.get("worker"):
                    self._lose(slot)
        elif action == "add-worker":
            for delay_s in (0.0, CLAIM_DELAY_S):
                self._looks.start(self._look(delay_s))

    def _lose(self, slot: str) -> None:
        del self.addresses[slot]
        self._on_lost(slot)
        self._probe(slot)

    async def _look(self, delay_s: float = 0.0) -> None:
        """Compare what is known with the workers that the Dask scheduler has."""
        await asyncio.sleep(delay_s)
        with suppress(OSError):  # without a scheduler every future fails, and says so
            identity = await scheduler_of(self._client).identity(n_workers=-1)
            present = self._present(identity["workers"])
            for slot, address in present.items():
                if self._left.get(slot) == address:
                    continue
                if slot in self.addresses and self.addresses[slot] != address:
                    self._lose(slot)
                elif slot not in self.addresses:
                    self._probe(slot)

    def _present(self, workers: dict[str, dict[str, Any]]) -> dict[str, str]:
        """Slot -> address of the workers that may take sub-tasks.

        Without the engines of other explorers of a shared cluster.
        """
        own = self._settings.engine_slots if self._settings is not None else None
        found: dict[str, str] = {}
        for address, worker in workers.items():
            for name, amount in worker["resources"].items():
                slot = name.removeprefix(PREFIX)
                if slot == name or amount <= 0:
                    continue
                engine = slot.startswith(SLOTS_OF[ROLLOUT])
                if slot.startswith(SLOTS_OF[RUNNER]) or (engine and (own is None or slot in own)):
                    found[slot] = address
        return found

    def _probe(self, slot: str) -> None:
        if slot not in self._probes:
            task = self._probes[slot] = asyncio.ensure_future(self._wait_ready(slot))
            task.add_done_callback(lambda _: self._probes.pop(slot, None))

    async def _wait_ready(self, slot: str) -> None:
        group = next(g for g, prefix in SLOTS_OF.items() if slot.startswith(prefix))
        while True:
            future = self._client.submit(
                report_ready,
                group,
                self._ready_timeout_s,
                self._settings,
                key=f"ready-{slot}-{uuid.uuid4().hex}",
                resources={slot_resource(slot): 1},
                pure=False,
            )
            try:
                address, capacity = await future
            except Exception as error:  # whatever keeps an engine from serving
                log.warning("%s does not serve yet: %s; asking again", slot, error)
                await asyncio.sleep(CLAIM_DELAY_S)
                continue
            finally:
                future.release()
            if capacity < 1:
                log.error("%s has no resource %r and gets no sub-task", slot, group)
                return
            self.addresses[slot] = address
            self._on_up(slot, capacity, group)
            return

"""What the scheduler knows of workers, slots and the actors in them, and announces of them.

Invariant: every wait here ends at its deadline, with a message that says what is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Client, Future

from trinity_dask.cluster.slots import PREFIX, slot_resource

POLL_S = 0.05


def scheduler_of(client: Client) -> Any:
    """The RPC object of the client's scheduler.

    Raises:
        RuntimeError: the client is not connected.
    """
    if client.scheduler is None:
        raise RuntimeError(f"the Dask client is {client.status}, not connected to a scheduler")
    return client.scheduler


def slots_in(identity: dict[str, Any]) -> dict[str, str]:
    """Slot and worker address, of every running worker that carries a slot, in what the scheduler
    says of itself."""
    return {
        name.removeprefix(PREFIX): address
        for address, worker in identity["workers"].items()
        for name, amount in worker["resources"].items()
        if name.startswith(PREFIX) and amount > 0
    }


async def slot_labels(client: Client) -> set[str]:
    """The slots that running workers carry."""
    return set(slots_in(await scheduler_of(client).identity(n_workers=-1)))


async def wait_for_slot(client: Client, slot: str, timeout: float) -> None:
    """Wait until a running worker carries the slot.

    A task that is submitted before waits inside the scheduler without a reason that could
    be reported.

    Raises:
        TimeoutError: names the slot and those that are present.
    """
    labels: set[str] = set()
    try:
        async with asyncio.timeout(timeout):
            while slot not in labels:
                labels = await slot_labels(client)
                if slot not in labels:
                    await asyncio.sleep(POLL_S)
    except TimeoutError:
        present = ", ".join(sorted(labels)) or "none"
        raise TimeoutError(
            f"no worker carries slot {slot!r} ({slot_resource(slot)}) after {timeout:g} s; "
            f"slots present: {present}. Start a worker for it, or lower the group's n_workers"
        ) from None


async def wait_until_alive(client: Client, future: Future, timeout: float) -> str:
    """Wait until the actor exists; returns the address of its worker.

    Raises:
        TimeoutError: its constructor is not done at the deadline.
        RuntimeError: the actor was cancelled; the scheduler is gone or was restarted.
        Exception: what the constructor raised.
    """
    try:
        async with asyncio.timeout(timeout):
            error = await future.exception()
            if error is not None:
                raise error
            if future.status != "finished":
                raise RuntimeError(f"actor {future.key!r} was {future.status} by the scheduler")
            while True:  # for a moment after a loss nobody holds it
                holders = await scheduler_of(client).who_has(keys=[future.key])
                if holders.get(future.key):
                    return holders[future.key][0]
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise TimeoutError(
            f"actor {future.key!r} is not alive after {timeout:g} s although its slot has a "
            "worker; its constructor is slow, or the worker is stuck or was lost"
        ) from None


TOPIC = "all"  # where the Dask scheduler announces workers that come and go
LEAVING = "leaving-worker"  # an announcement of ours: it will go, and takes nothing any more

Listener = Callable[[dict[str, Any]], None]
_listeners: WeakKeyDictionary[Client, set[Listener]] = WeakKeyDictionary()


def listen(client: Client, listener: Listener) -> Callable[[], None]:
    """Have every announcement (``action``: ``add-worker``, ``remove-worker``, :data:`LEAVING` and
    others; ``worker``: its address); returns what ends it.

    Every listener of a client hears them, although Dask keeps one handler for each client.
    """
    known = _listeners.get(client)
    if known is None:
        listeners = known = _listeners[client] = set()

        def forward(event: tuple[float, Any]) -> None:
            for each in list(listeners):
                if isinstance(event[1], dict):
                    each(event[1])

        client.subscribe_topic(TOPIC, forward)
    known.add(listener)

    def end() -> None:
        known.discard(listener)
        if not known and _listeners.pop(client, None) is not None:
            # or the scheduler announces the client's own departure to it
            client.unsubscribe_topic(TOPIC)

    return end

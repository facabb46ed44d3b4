"""Actors: created at a slot, watched, created again after their worker died.

Invariant: whoever holds the :class:`ActorRef` owns the actor; it lives until the ref is
released or the owner's process ends. No Dask ``Actor`` proxy is ever made: a proxy keeps
its actor alive through a reference cycle and hangs when the worker is lost.

All coroutines run on the event loop of the client they use: inside a worker that is the
worker's own, which is the default.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distributed import Client, Future

from trinity_dask.cluster.context import worker_client
from trinity_dask.cluster.placement import POLL_S, wait_for_slot, wait_until_alive
from trinity_dask.cluster.rpc import SYNC_GRACE_S, ActorHandle
from trinity_dask.cluster.slots import slot_resource


@dataclass
class ActorRef:
    """The owner's side of an actor: its handle, and the future that keeps it alive."""

    handle: ActorHandle
    future: Future
    client: Client
    watch: asyncio.Task[None] | None = field(default=None, repr=False)


async def create_actor(
    cls: type,
    *args: Any,
    slot: str,
    key: str,
    timeout: float,
    client: Client | None = None,
    **kwargs: Any,
) -> ActorRef:
    """Create ``cls(*args, **kwargs)`` as an actor on the worker that carries ``slot``.

    Raises:
        TimeoutError: no worker with the slot (the message names it), or ``__init__`` not
            done, after ``timeout`` s.
        Exception: whatever ``__init__`` raised.
    """
    client = await worker_client() if client is None else client
    deadline = time.monotonic() + timeout
    await wait_for_slot(client, slot, timeout)
    future = client.submit(
        cls,
        *args,
        actor=True,
        pure=False,
        key=key,
        resources={slot_resource(slot): 1},
        allow_other_workers=False,
        **kwargs,
    )
    try:
        address = await wait_until_alive(client, future, deadline - time.monotonic())
    except BaseException:
        future.release()
        raise
    return ActorRef(ActorHandle(key, address, slot), future, client)


async def recreate_actor(ref: ActorRef, timeout: float) -> ActorRef:
    """Create a lost actor again, from the arguments it was created with.

    The slot's worker may still be restarting; the scheduler places the actor when it is
    back. The same ref is returned, with a new handle.

    Raises:
        TimeoutError: the scheduler does not know of the loss, or no worker took the slot,
            within ``timeout`` s.
        Exception: whatever ``__init__`` raised.
    """
    deadline = time.monotonic() + timeout
    await _until_lost(ref, timeout)
    await wait_for_slot(ref.client, ref.handle.slot, deadline - time.monotonic())
    await ref.client.retry([ref.future], asynchronous=True)
    address = await wait_until_alive(ref.client, ref.future, deadline - time.monotonic())
    ref.handle = ActorHandle(ref.handle.key, address, ref.handle.slot)
    return ref


async def release_actor(ref: ActorRef) -> None:
    """Let the actor go; its worker drops it when no one else holds it."""
    stop_watching(ref)
    ref.future.release()


def on_lost(ref: ActorRef, callback: Callable[[ActorRef], None]) -> None:
    """Call ``callback(ref)`` once, on the event loop, when the actor is lost.

    Call it again after :func:`recreate_actor`. Must be called on the event loop.
    """
    stop_watching(ref)
    ref.watch = asyncio.get_running_loop().create_task(_watch(ref, callback))


def stop_watching(ref: ActorRef) -> None:
    if ref.watch is not None:
        ref.watch.cancel()
        ref.watch = None


async def _watch(ref: ActorRef, callback: Callable[[ActorRef], None]) -> None:
    # Dask has no event for a future that was finished and errs later, so its status is read
    while ref.future.status in ("finished", "pending"):
        await asyncio.sleep(POLL_S)
    ref.watch = None
    callback(ref)


async def _until_lost(ref: ActorRef, timeout: float) -> None:
    """Wait until the scheduler has marked the actor as lost; only then can it be retried."""
    try:
        async with asyncio.timeout(timeout):
            while ref.future.status in ("finished", "pending"):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise TimeoutError(
            f"actor {ref.handle.key!r} in slot {ref.handle.slot!r} is {ref.future.status!r}, "
            f"not lost, after {timeout:g} s; only a lost actor can be created again"
        ) from None
    if ref.future.status == "cancelled":
        raise RuntimeError(
            f"actor {ref.handle.key!r} was cancelled (the scheduler is gone or restarted); "
            "it cannot be created again"
        )


def start_actor(
    client: Client, cls: type, *args: Any, slot: str, key: str, timeout: float, **kwargs: Any
) -> ActorRef:
    """:func:`create_actor` for a driver with a synchronous client."""
    job = partial(
        create_actor, cls, *args, slot=slot, key=key, timeout=timeout, client=client, **kwargs
    )
    return client.sync(job, asynchronous=False, callback_timeout=timeout + SYNC_GRACE_S)


def stop_actor(ref: ActorRef) -> None:
    """:func:`release_actor` for a driver with a synchronous client."""
    ref.client.sync(release_actor, ref, asynchronous=False, callback_timeout=SYNC_GRACE_S)

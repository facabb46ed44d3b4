"""One synchronizer per run name on a Dask scheduler, found or created by whoever comes first.

Invariant: all who ask for one run name get the same actor, also when they ask at the same
time; it outlives its creator and is let go when the last module that was added has left.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Optional

from distributed import Client, Future

from trinity_dask.cluster.context import worker_client
from trinity_dask.cluster.placement import wait_for_slot, wait_until_alive
from trinity_dask.cluster.rpc import ActorHandle, rpc
from trinity_dask.cluster.slots import CONTROL, slot_resource
from trinity_dask.config.schema import Config

if TYPE_CHECKING:
    from trinity_dask.sync.synchronizer import Synchronizer

CALL_TIMEOUT_S = 30.0


def registered_name(config: Config) -> str:
    """Unlike that of any other run on the scheduler."""
    parts = [config.project, config.group, config.name, config.stage_name or ""]
    return "/".join(["trinity-dask", *(p for p in parts if p), "synchronizer"])


async def get_or_create(
    cls: type[Synchronizer], config: Config, client: Optional[Client], timeout_s: float
) -> ActorHandle:
    """See :meth:`Synchronizer.get_actor`.

    Raises:
        TimeoutError: no worker carries the control slot, or the actor does not start.
    """
    client = await worker_client() if client is None else client
    name = registered_name(config)
    future = await _find(client, name)
    if future is None:
        future = await _create(client, cls, config, name, timeout_s)
    address = await wait_until_alive(client, future, timeout_s)
    handle = ActorHandle(str(future.key), address, CONTROL)
    outside = None if _inside_worker(client) else client
    await rpc(handle, "leave_with_modules", name, timeout=CALL_TIMEOUT_S, client=outside)
    return handle


async def _find(client: Client, name: str) -> Optional[Future]:
    try:
        return await client.get_dataset(name)
    except KeyError:
        return None


async def _create(
    client: Client, cls: type[Synchronizer], config: Config, name: str, timeout_s: float
) -> Future:
    await wait_for_slot(client, CONTROL, timeout_s)
    future = client.submit(
        cls,
        config.synchronizer,
        str(config.job_dir) if config.job_dir else None,
        config.name,
        actor=True,
        pure=False,
        key=name,  # one key, one actor: who comes second gets the first one's
        resources={slot_resource(CONTROL): 1},
        allow_other_workers=False,
    )
    try:
        await client.publish_dataset(future, name=name)
    except KeyError:  # published by another one in this moment
        found = await _find(client, name)
        return future if found is None else found
    return future


def _inside_worker(client: Client) -> bool:
    from trinity_dask.cluster.context import current_worker

    return current_worker() is not None


async def withdraw(name: str) -> None:
    """Let the actor of ``name`` go. For use on the actor's own worker."""
    client = await worker_client()
    await client.unpublish_dataset(name)


def abandon(name: str) -> Any:
    """A callback for :attr:`SyncCore.on_abandoned`."""

    async def leave() -> None:
        # in a task of its own: the actor may end while the call to the scheduler is under way
        task = asyncio.get_running_loop().create_task(withdraw(name))
        await asyncio.shield(task)

    return leave

"""Runner workers: found by their slot, and killed when user code in them will not end.

Invariant: only a worker that carries a ``runner-<i>`` slot can be killed here, and only its
process: the nanny stays and starts the worker again with the same slot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Any

from distributed import Client, Nanny

from trinity_dask.cluster.placement import POLL_S, scheduler_of
from trinity_dask.cluster.slots import PREFIX, RUNNER, runner_slot, slot_resource

log = logging.getLogger("trinity_dask.cluster")

REBIRTH_TIMEOUT_S = 60.0


async def kill_runner(client: Client, runner: str, timeout_s: float = REBIRTH_TIMEOUT_S) -> str:
    """Kill a runner worker with SIGKILL and wait until its nanny has brought it back.

    ``runner`` is the slot (``runner-0``) or the worker's address. What else ran there is
    run again by Dask when the worker is back; cancel a future that must not be. Runs on the
    event loop of ``client``. Returns the new address.

    Raises:
        ValueError: that is no runner worker; anything else must not be killed like this.
        RuntimeError: the worker has no nanny, so nobody would start it again.
        TimeoutError: it is not back after ``timeout_s``; the message names the slot.
    """
    address, info = await _find(client, runner)
    slot = _slot(info)
    if not info.get("nanny"):
        raise RuntimeError(
            f"runner worker {slot!r} at {address} has no nanny to start it again; start runner "
            "workers with one (`trinity-dask worker`, or `dask worker` without --no-nanny)"
        )
    log.warning("killing runner worker %s at %s: user code in it does not end", slot, address)
    await client.run(_kill_process, workers=[address], nanny=True, asynchronous=True)
    return await _reborn(client, slot, address, timeout_s)


def _kill_process(dask_worker: Nanny) -> None:
    """Runs in the nanny."""
    if dask_worker.pid:
        os.kill(dask_worker.pid, signal.SIGKILL)


async def runner_addresses(client: Client) -> dict[str, str]:
    """Slot and address of every runner worker that is there now."""
    workers = await _workers(client)
    return {_slot(info): address for address, info in workers.items() if _is_runner(info)}


async def _find(client: Client, runner: str) -> tuple[str, dict[str, Any]]:
    for address, info in (await _workers(client)).items():
        if runner == address or slot_resource(runner) in info["resources"]:
            if not _is_runner(info):
                raise ValueError(f"{runner!r} is worker {info['name']!r}, not a runner worker")
            return address, info
    raise ValueError(f"there is no worker {runner!r}; a runner's slot is {runner_slot(0)!r}")


async def _workers(client: Client) -> dict[str, dict[str, Any]]:
    identity = await scheduler_of(client).identity(n_workers=-1)
    return identity["workers"]


def _is_runner(info: dict[str, Any]) -> bool:
    return info["resources"].get(RUNNER, 0) > 0 and bool(_slot(info))


def _slot(info: dict[str, Any]) -> str:
    start = PREFIX + RUNNER
    found = [
        name for name, amount in info["resources"].items() if name.startswith(start) and amount
    ]
    return found[0].removeprefix(PREFIX) if found else ""


async def _reborn(client: Client, slot: str, dead: str, timeout_s: float) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                address = (await runner_addresses(client)).get(slot, dead)
                if address != dead:
                    return address
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise TimeoutError(
            f"runner worker {slot!r} (killed at {dead}) was not back within {timeout_s:g} s"
        ) from None

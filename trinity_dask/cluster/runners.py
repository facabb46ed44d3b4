"""Runner workers: found by their slot, and killed when user code in them will not end.

Invariant: only a worker that carries a ``runner-<i>`` slot can be killed here, and only its
process: the nanny stays and starts the worker again with the same slot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from distributed import Client, Nanny

from trinity_dask.cluster.placement import POLL_S, scheduler_of, slots_in
from trinity_dask.cluster.slots import RUNNER, runner_slot

log = logging.getLogger("trinity_dask.cluster")

REBIRTH_TIMEOUT_S = 60.0
OF_RUNNERS = f"{RUNNER}-"  # begins their slots


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
    identity = await scheduler_of(client).identity(n_workers=-1)
    slots = slots_in(identity)
    address = slots.get(runner, runner)
    if address not in identity["workers"]:
        raise ValueError(f"there is no worker {runner!r}; a runner's slot is {runner_slot(0)!r}")
    info = identity["workers"][address]
    slot = next((s for s, at in slots.items() if at == address and s.startswith(OF_RUNNERS)), "")
    if not slot:
        raise ValueError(f"{runner!r} is worker {info['name']!r}, not a runner worker")
    if not info.get("nanny"):
        raise RuntimeError(
            f"runner worker {slot!r} at {address} has no nanny to start it again; start runner "
            "workers with one (`trinity-dask worker`, or `dask worker` without --no-nanny)"
        )
    log.warning("killing runner worker %s at %s: user code in it does not end", slot, address)
    await client.run(_kill_process, workers=[address], nanny=True, asynchronous=True)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                born = (await runner_addresses(client)).get(slot, address)
                if born != address:
                    return born
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise TimeoutError(
            f"runner worker {slot!r} (killed at {address}) was not back within {timeout_s:g} s"
        ) from None


def _kill_process(dask_worker: Nanny) -> None:
    """Runs in the nanny."""
    if dask_worker.pid:
        os.kill(dask_worker.pid, signal.SIGKILL)


async def runner_addresses(client: Client) -> dict[str, str]:
    """Slot and address of every runner worker that is there now."""
    slots = slots_in(await scheduler_of(client).identity(n_workers=-1))
    return {slot: address for slot, address in slots.items() if slot.startswith(OF_RUNNERS)}

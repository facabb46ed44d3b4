"""One worker of a group, started by hand or by Slurm on any machine that reaches the scheduler.

Invariant: the worker is the same as one that a local cluster starts, and it ends with this
process, with Ctrl-C or SIGTERM here, or with its scheduler. Before it ends by a signal it says
that it leaves, so that what it does is handed back and not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import tempfile
from typing import Any

import dask
from distributed import Security
from distributed.comm import get_address_host
from distributed.utils import LoopRunner, sync

from trinity_dask.cluster.addresses import address_towards, own_address
from trinity_dask.cluster.placement import LEAVING, TOPIC
from trinity_dask.cluster.specs import SETTINGS, ClusterError, GroupNanny, worker_options
from trinity_dask.config.schema import Config

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 15.0
HAND_BACK_S = 0.5  # for what it does to be given to others
# SIGTERM: Slurm's preemption and scancel; SIGUSR1: its time is almost over
LEAVE = (signal.SIGTERM, signal.SIGUSR1)


def run_worker(
    address: str,
    group: str,
    index: int,
    cfg: Config,
    security: Security | None = None,
    *,
    leaves: bool = True,
) -> int:
    """Serve as worker ``index`` of ``group`` until the scheduler ends or a signal comes.

    ``security`` is needed where the scheduler's address begins with ``tls://``; ``leaves``: on a
    signal, or only with the scheduler. Returns the exit code: 0 ended with its scheduler, 130
    interrupted.

    Raises:
        ClusterError: nobody answers at ``address``.
        ValueError: ``group`` or the network interface is unknown.
    """
    runner = LoopRunner(asynchronous=False)
    with tempfile.TemporaryDirectory(prefix="trinity-dask-") as scratch:
        directory = cfg.cluster.local_directory or scratch
        options = worker_options(cfg, group, index, directory)
        interface = cfg.cluster.interface
        # by the route: the configuration's host is the driver's
        options["host"] = (
            own_address(interface) if interface else address_towards(get_address_host(address))
        )
        if security is not None:
            options |= {"security": security, "protocol": "tls://"}
        with dask.config.set(SETTINGS):
            # they end the worker as Ctrl-C does, instead of leaving it to its warden
            handler = signal.default_int_handler if leaves else signal.SIG_IGN
            before = {s: signal.signal(s, handler) for s in LEAVE}
            try:
                runner.start()
                return _serve(runner, address, options, cfg.cluster.start_timeout_s)
            except KeyboardInterrupt:  # once more, while it closes
                return 130
            finally:
                runner.stop()
                for number, earlier in before.items():
                    signal.signal(number, earlier)


def _serve(runner: LoopRunner, address: str, options: dict[str, Any], timeout_s: float) -> int:
    nannies: list[GroupNanny] = []

    async def start() -> None:
        # death_timeout: how long a worker looks for its scheduler
        nannies.append(GroupNanny(address, death_timeout=timeout_s, **options))
        await nannies[0]

    async def close() -> None:
        if nannies:
            with contextlib.suppress(AssertionError):  # it was not started yet
                await nannies[0].close()

    async def leave() -> None:
        """Tell the run; where nobody listens any more there is nothing to hand back."""
        if nannies and nannies[0].worker_address is not None:
            message = {"action": LEAVING, "worker": nannies[0].worker_address}
            with contextlib.suppress(OSError):
                await nannies[0].scheduler.log_event(topic=TOPIC, msg=message)
            await asyncio.sleep(HAND_BACK_S)

    try:
        sync(runner.loop, start, callback_timeout=timeout_s)
        logger.info("%s serves %s", options["name"], address)
        sync(runner.loop, nannies[0].finished)
        return 0
    except KeyboardInterrupt:
        for number in LEAVE:  # Slurm sends it twice, a step at its limit
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(TimeoutError):
            sync(runner.loop, leave, callback_timeout=CLOSE_TIMEOUT_S)
        return 130
    except OSError as error:
        raise ClusterError(
            f"cannot join the scheduler at {address!r} as {options['name']}: {error}"
        ) from error
    finally:
        with contextlib.suppress(TimeoutError):
            sync(runner.loop, close, callback_timeout=CLOSE_TIMEOUT_S)

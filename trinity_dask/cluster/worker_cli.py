"""One worker of a group, started by hand on any machine that reaches the scheduler.

Invariant: the worker is the same as one that a local cluster starts, and it ends with this
process, with Ctrl-C or SIGTERM here, or with its scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
from typing import Any

import dask
from distributed.utils import LoopRunner, sync

from trinity_dask.cluster.specs import SETTINGS, ClusterError, GroupNanny, worker_options
from trinity_dask.config.schema import Config

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 15.0


def run_worker(address: str, group: str, index: int, cfg: Config) -> int:
    """Serve as worker ``index`` of ``group`` until the scheduler ends or a signal comes.

    Returns the exit code: 0 ended with its scheduler, 130 interrupted.

    Raises:
        ClusterError: nobody answers at ``address``.
        ValueError: ``group`` is unknown.
    """
    runner = LoopRunner(asynchronous=False)
    with tempfile.TemporaryDirectory(prefix="trinity-dask-") as scratch:
        directory = cfg.cluster.local_directory or scratch
        options = worker_options(cfg, group, index, directory)
        with dask.config.set(SETTINGS):
            # SIGTERM ends the worker as Ctrl-C does, instead of leaving it to its warden
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                runner.start()
                return _serve(runner, address, options, cfg.cluster.start_timeout_s)
            finally:
                runner.stop()
                signal.signal(signal.SIGTERM, before)


def _serve(runner: LoopRunner, address: str, options: dict[str, Any], timeout_s: float) -> int:
    nannies: list[GroupNanny] = []

    async def start() -> None:
        # death_timeout: how long a worker looks for its scheduler
        nannies.append(GroupNanny(address, death_timeout=timeout_s, **options))
        await nannies[0]

    async def close() -> None:
        if nannies:
            await nannies[0].close()

    try:
        sync(runner.loop, start, callback_timeout=timeout_s)
        logger.info("%s serves %s", options["name"], address)
        sync(runner.loop, nannies[0].finished)
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        raise ClusterError(
            f"cannot join the scheduler at {address!r} as {options['name']}: {error}"
        ) from error
    finally:
        with contextlib.suppress(TimeoutError):
            sync(runner.loop, close, callback_timeout=CLOSE_TIMEOUT_S)

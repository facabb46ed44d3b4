"""Worker plugins that every cluster of a run carries, whoever started its workers.

Invariant: the scheduler installs them in every worker, also in one that is born again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from distributed import Client, Worker, WorkerPlugin
from distributed.core import Status
from distributed.protocol.pickle import dumps, loads

from trinity_dask.cluster.context import forget_worker
from trinity_dask.cluster.guard import end_children, guard_worker
from trinity_dask.cluster.loop_watch import WatchLoop
from trinity_dask.registry import defined_in_main, take_over


class CancelRunning(WorkerPlugin):
    """Cancelling a future, or dropping it, cancels its coroutine and frees its slot.

    Dask alone lets a running coroutine run to its end. The task sees ``CancelledError``
    at its current ``await``; tasks that are not coroutines are not touched.
    """

    name = "trinity-cancel"
    idempotent = True

    def setup(self, worker: Worker) -> None:
        self.worker = worker

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        if start != "executing" or finish not in ("cancelled", "released"):
            return
        task = self.worker.state.tasks.get(key)
        if task is None or not getattr(task.run_spec, "is_coro", False):
            return
        for running in self.worker._async_instructions:
            if running.get_name() == f"execute({key!r})" and not running.done():
                # not at once: a coroutine that is cancelled before its first step never tells
                # the worker that it ended, and its slot would stay taken for good
                asyncio.get_running_loop().call_soon(running.cancel)
                return


class ProcessGuard(WorkerPlugin):
    """:func:`trinity_dask.cluster.guard.guard_worker` for workers that we did not start.

    When it is unregistered from a worker that lives on, what that worker started during
    the run is ended.
    """

    name = "trinity-guard"
    idempotent = True

    def setup(self, worker: Worker) -> None:
        self.guarded = guard_worker(worker)

    async def teardown(self, worker: Worker) -> None:
        # a closing worker ends its children at the end of its process
        if self.guarded and worker.status not in (Status.closing, Status.closed):
            await asyncio.to_thread(end_children)
        forget_worker(worker)


class CellCode(WorkerPlugin):
    """What the driver's cells registered, by value: no worker could import it.

    Another run's replaces it, so that an edited cell is what runs next.
    """

    name = "trinity-cells"

    def __init__(self, defined: Mapping[tuple[str, str], Any]) -> None:
        self._code: bytes = dumps(dict(defined))  # read by workers only

    def setup(self, worker: Worker) -> None:
        take_over(loads(self._code))


def send_cells(client: Client) -> None:
    """Give what this process's cells registered to all present and future workers.

    Raises:
        ValueError: one of them cannot be sent (names it).
    """
    defined = defined_in_main()
    for (kind, name), item in defined.items():
        try:
            dumps(item)
        except Exception as error:  # whatever the objects that it refers to say
            raise ValueError(
                f"{kind} {name!r} of a cell cannot be sent to the workers ({error}): it refers to "
                "something that lives in this process only; make that inside of it"
            ) from error
    if defined:
        client.register_plugin(CellCode(defined))


def register_plugins(client: Client) -> None:
    """Install the plugins in all present and future workers of a synchronous client."""
    for plugin in (ProcessGuard(), CancelRunning(), WatchLoop()):
        client.register_plugin(plugin)


def unregister_plugins(client: Client) -> None:
    present = client.run_on_scheduler(lambda dask_scheduler: [*dask_scheduler.worker_plugins])
    for plugin in (WatchLoop, CancelRunning, ProcessGuard, CellCode):
        if plugin.name in present:  # else another run has taken it away already
            with suppress(ValueError):
                client.unregister_worker_plugin(plugin.name)

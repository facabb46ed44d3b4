"""The loop watch of every worker, and the report it gives when asked.

Invariant: a worker answers :data:`OP` from its event loop; no answer in time means that the
loop is held up. Reports are plain values that fit into a message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from distributed import Scheduler, Worker, WorkerPlugin

from trinity_dask.cluster.alarms import guard_alarms, release_alarms
from trinity_dask.cluster.loop_watch import LoopWatch

log = logging.getLogger("trinity_dask.loop")

OP = "trinity_watch"

_reports: dict[str, Callable[[], Any]] = {}


def add_report(name: str, report: Callable[[], Any]) -> None:
    """Have this process's answers contain ``report()`` under ``name``."""
    _reports[name] = report


class WatchLoop(WorkerPlugin):
    """Starts a :class:`LoopWatch` in the worker and answers :data:`OP`."""

    name = "trinity-watch"
    idempotent = True

    def setup(self, worker: Worker) -> None:
        self.watch = LoopWatch(str(worker.name))
        self.watch.start()
        if worker.nanny or not Scheduler._instances:  # the process is the worker's own
            guard_alarms()
        worker.handlers[OP] = self.report

    def teardown(self, worker: Worker) -> None:
        self.watch.stop()
        release_alarms()
        worker.handlers.pop(OP, None)

    async def report(self, window_s: float, full: bool) -> dict[str, Any]:
        """The longest delay of the loop in the last ``window_s`` seconds; ``full``: all else."""
        found: dict[str, Any] = {"loop_lag_s": self.watch.max_lag_s(window_s)}
        for name, report in _reports.items() if full else ():
            try:
                found[name] = report()
            except Exception:
                log.exception("the report %r of %s failed", name, self.watch.name)
        return found

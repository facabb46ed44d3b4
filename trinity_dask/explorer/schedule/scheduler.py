"""The scheduler: decisions of :class:`SchedulerState`, carried out with Dask futures.

Invariant: nothing here polls. A waiter is woken when its batch moves, one timer stands for
the next deadline, workers that come and go are announced. Everything runs on one event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Optional

from distributed import Client

from trinity_dask.aio import Changes
from trinity_dask.cluster.context import worker_client
from trinity_dask.config.schema import Config
from trinity_dask.explorer.schedule.executor import Executor
from trinity_dask.explorer.schedule.lane_table import LaneTable
from trinity_dask.explorer.schedule.policy import Instruction, SchedulePolicy
from trinity_dask.explorer.schedule.state import SchedulerState
from trinity_dask.explorer.schedule.tasks import BatchId, BatchResult, Counts
from trinity_dask.explorer.schedule.worker_watch import WorkerWatch
from trinity_dask.workflows import Task

log = logging.getLogger("trinity_dask.scheduler")

SHOWN = 16
LATE_S = 1.0


class Scheduler:
    """Runs batches of tasks on the rollout and runner workers.

    The workers are found by their slots, each taking as many sub-tasks as its resource
    ``rollout`` (``runner``) says; ``slots`` bounds those in flight over all of them (None: no
    bound beyond that). ``client`` is an asynchronous client of the loop the scheduler is used
    on; None means that of the worker it runs in.

    Public: :meth:`start`, :meth:`stop`, :meth:`wait_for_lanes`; :meth:`schedule`,
    :meth:`get_results`, :meth:`abort_batch`, :meth:`set_slots`; ``state`` (batches, workers,
    attempts), ``lanes`` (what each lane does) and :meth:`status` to look at; ``changes`` to
    wait for anything of them; :attr:`executor` while it is started.
    """

    def __init__(
        self, cfg: Config, slots: Optional[int] = None, client: Optional[Client] = None
    ) -> None:
        self._cfg = cfg
        self._client = client
        self._policy = SchedulePolicy.from_config(cfg.explorer)
        self.state = SchedulerState(self._policy, slots)
        self.lanes = LaneTable()
        self.changes = Changes()
        self._executor: Optional[Executor] = None
        self.watch: Optional[WorkerWatch] = None

    # life -----------------------------------------------------------------------------
    async def start(self) -> None:
        """Find the workers and begin to hand out; calling it again changes nothing."""
        if self._executor is not None:
            return
        client = self._client or await worker_client()
        self.changes.failure = None
        self._executor = Executor(self._cfg, self.state, client, self.lanes, self.changes)
        await self._executor.start()
        interval_s = self._cfg.explorer.runner_state_report_interval_s
        self.watch = WorkerWatch(client, interval_s, self.lanes.learn)
        self.watch.start()

    async def wait_for_lanes(self, n: int, timeout: float) -> None:
        """Until workers with ``n`` lanes in all are up.

        They come up one after another, and the first ones take whatever is scheduled before
        the others are there.

        Raises:
            TimeoutError: not within ``timeout`` seconds; says which workers are up.
        """

        def up() -> dict[str, int]:
            return {w.name: w.capacity for w in self.state.workers if w.up}

        if not await self.changes.until(lambda: sum(up().values()) >= n, timeout):
            known = ", ".join(f"{name}: {lanes}" for name, lanes in up().items()) or "none"
            raise TimeoutError(f"not {n} lanes after {timeout:g} s; workers that are up: {known}")

    async def stop(self) -> None:
        """Cancel and forget everything. The scheduler can be started again."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        if self.watch is not None:
            await self.watch.stop()
        for batch_id in list(self.state.batches):
            executor.apply(self.state.discard(batch_id, time.monotonic())[1])
        await executor.stop()
        self.changes.notify()

    @property
    def executor(self) -> Executor:
        """Raises RuntimeError while the scheduler is not started."""
        if self._executor is None:
            raise RuntimeError("the scheduler is not started; await start() first")
        return self._executor

    # batches --------------------------------------------------------------------------
    def schedule(self, tasks: Sequence[Task], batch_id: BatchId) -> None:
        """Queue tasks under ``batch_id`` and start what fits. An empty list is ignored.

        Raises:
            RuntimeError: not started, or results cannot be collected any more.
        """
        if self.changes.failure is not None:
            raise self.changes.failure
        executor, now = self.executor, time.monotonic()
        executor.apply(self.state.schedule(batch_id, tasks, now, executor.group_of))

    async def get_results(
        self,
        batch_id: BatchId,
        min_num: Optional[int] = None,
        timeout: Optional[float] = None,
        clear_timeout_tasks: bool = True,
        wait_after_min_s: Optional[float] = None,
        return_partial_tasks: Optional[bool] = None,
    ) -> BatchResult:
        """Results of a batch once all of its tasks are finished; takes them out.

        With ``min_num`` (tasks), ``wait_after_min_s`` (None: as configured) after that many
        are finished what is there is returned. After ``timeout`` seconds the same; with
        ``clear_timeout_tasks`` the rest is cancelled then, otherwise it goes on and a later
        call returns it. Finished runs of tasks that are cut off are kept, unless
        ``return_partial_tasks`` is False (None: as configured). An unknown batch gives an
        empty result at once.

        Raises:
            RuntimeError: the scheduler cannot collect results any more (says why).
        """
        state, until = self.state, self.changes.until
        deadline = None if timeout is None else time.monotonic() + timeout
        batch = state.batches.get(batch_id)
        if batch is not None and min_num is not None and min_num > len(batch.tasks):
            log.warning(
                "batch %s has %d tasks, fewer than min_num=%d; waiting for all of them",
                batch_id,
                len(batch.tasks),
                min_num,
            )
        in_time = await until(lambda: state.enough(batch_id, min_num), timeout)
        grace = self._policy.wait_after_min_s if wait_after_min_s is None else wait_after_min_s
        if in_time and grace > 0:
            if deadline is not None:
                grace = min(grace, max(deadline - time.monotonic(), 0.0))
            await until(lambda: state.enough(batch_id), grace)
        if clear_timeout_tasks and not state.enough(batch_id):
            # ask what runs for what it has, then cancel the rest
            cut, partial = state.cancel_unfinished, return_partial_tasks
            self._apply(cut(batch_id, time.monotonic(), partial, recall=True))
            await until(lambda: state.enough(batch_id), self._policy.recall_s)
            self._apply(cut(batch_id, time.monotonic(), partial, restart=not in_time))
        return state.drain(batch_id)

    async def abort_batch(
        self, batch_id: BatchId, return_partial_tasks: bool = False, restart_runners: bool = True
    ) -> Counts:
        """Cancel what is left of a batch; its final run counts.

        All of it is forgotten, unless ``return_partial_tasks``: then its finished runs can
        still be taken. ``restart_runners``: runner workers that execute a blocking workflow
        of it are killed and come back.
        """
        now = time.monotonic()
        if return_partial_tasks:
            self._apply(self.state.cancel_unfinished(batch_id, now, True, restart_runners))
            batch = self.state.batches.get(batch_id)
            return batch.counts if batch else Counts()
        counts, instructions = self.state.discard(batch_id, now, restart_runners)
        self._apply(instructions)
        self.changes.notify()
        return counts

    def set_slots(self, slots: Optional[int]) -> None:
        """Bound the sub-tasks in flight; starts what now fits."""
        self._apply(self.state.set_limit(slots, time.monotonic()))

    def _apply(self, instructions: Sequence[Instruction]) -> None:
        if self._executor is not None:
            self._executor.apply(instructions)

    # state ----------------------------------------------------------------------------
    @property
    def in_flight(self) -> int:
        return len(self.state.running)

    @property
    def pending(self) -> int:
        return len(self.state.pending)

    def status(self) -> dict[str, Any]:
        """``in_flight`` sub-tasks; ``runners``: states of the busiest lanes, the longest at work
        first; ``late_workers``: event loops more than a second behind, with the seconds."""
        lags = self.watch.lags() if self.watch is not None else {}
        late = {name: round(lag, 1) for name, lag in lags.items() if lag > LATE_S}
        busy = self.lanes.busy(SHOWN)
        return {"in_flight": self.in_flight, "runners": busy, "late_workers": late}

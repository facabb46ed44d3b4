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

from trinity_dask.cluster.context import worker_client
from trinity_dask.config.schema import Config
from trinity_dask.explorer.schedule.executor import Hands
from trinity_dask.explorer.schedule.outcome import Outcome, Status
from trinity_dask.explorer.schedule.policy import Instruction, SchedulePolicy
from trinity_dask.explorer.schedule.runner_table import RunnerTable, RunnerWrapper
from trinity_dask.explorer.schedule.state import SchedulerState
from trinity_dask.explorer.schedule.tasks import (
    BatchId,
    BatchResult,
    CompletedTaskResult,
    Counts,
    RunningTaskState,
    TaskWrapper,
    sort_batch_id,
)
from trinity_dask.explorer.schedule.waits import BatchWaits
from trinity_dask.explorer.schedule.worker_watch import WorkerWatch
from trinity_dask.workflows import Task

__all__ = [
    "BatchResult",
    "CompletedTaskResult",
    "RunnerWrapper",
    "RunningTaskState",
    "Scheduler",
    "TaskWrapper",
    "sort_batch_id",
]

log = logging.getLogger("trinity_dask.scheduler")


class Scheduler:
    """Runs batches of tasks on the rollout and runner workers.

    The workers are found by their slots, each taking as many sub-tasks as its resource
    ``rollout`` (``runner``) says; ``slots`` bounds those in flight over all of them (None: no
    bound beyond that). ``client`` is an asynchronous client of the loop the scheduler is used
    on; None means that of the worker it runs in.
    """

    def __init__(
        self, cfg: Config, slots: Optional[int] = None, client: Optional[Client] = None
    ) -> None:
        self._cfg = cfg
        self._client = client
        self._policy = SchedulePolicy.from_config(cfg.explorer)
        self.state = SchedulerState(self._policy, slots)
        self.runners = RunnerTable()
        self._waits = BatchWaits(self.state)
        self._hands: Optional[Hands] = None
        self.watch: Optional[WorkerWatch] = None

    # life -----------------------------------------------------------------------------
    async def start(self) -> None:
        """Find the workers and begin to hand out; calling it again changes nothing."""
        if self._hands is not None:
            return
        client = self._client or await worker_client()
        self._waits.failure = None
        self._hands = Hands(self._cfg, self.state, client, self.runners, self._waits)
        await self._hands.start()
        interval_s = self._cfg.explorer.runner_state_report_interval_s
        self.watch = WorkerWatch(client, interval_s, self.runners.learn)
        self.watch.start()

    async def wait_for_lanes(self, n: int, timeout: float) -> None:
        """Until workers with ``n`` lanes in all are up.

        They come up one after another, and the first ones take whatever is scheduled before
        the others are there.

        Raises:
            TimeoutError: not within ``timeout`` seconds; says which workers are up.
        """
        places = self.state.places
        deadline = time.monotonic() + timeout
        if not await self._waits.until(lambda: places.lanes_up >= n, deadline):
            up = ", ".join(f"{p.name}: {p.capacity}" for p in places if p.up) or "none"
            raise TimeoutError(f"not {n} lanes after {timeout:g} s; workers that are up: {up}")

    async def stop(self) -> None:
        """Cancel and forget everything. The scheduler can be started again."""
        hands, self._hands = self._hands, None
        if hands is None:
            return
        if self.watch is not None:
            await self.watch.stop()
        for batch_id in list(self.state.batches):
            hands.apply(self.state.discard(batch_id, time.monotonic())[1])
        await hands.stop()
        await self._waits.notify()

    # batches --------------------------------------------------------------------------
    def schedule(self, tasks: Sequence[Task], batch_id: BatchId) -> None:
        """Queue tasks under ``batch_id`` and start what fits. An empty list is ignored.

        Raises:
            RuntimeError: not started, or results cannot be collected any more.
        """
        self._waits.require_working()
        self._require_started().schedule(tasks, batch_id)

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
        deadline = None if timeout is None else time.monotonic() + timeout
        self._check_minimum(batch_id, min_num)
        complete = await self._waits.wait(batch_id, min_num, deadline)
        late = not complete and not self._waits.enough(batch_id, min_num)
        grace = self._policy.wait_after_min_s if wait_after_min_s is None else wait_after_min_s
        if not complete and not late and grace > 0:
            until = time.monotonic() + grace
            until = until if deadline is None else min(until, deadline)
            complete = await self._waits.wait(batch_id, None, until)
        if not complete and clear_timeout_tasks:
            await self._cut(batch_id, return_partial_tasks, late)
        return self.state.drain(batch_id)

    async def get_payload_results(
        self,
        batch_id: BatchId,
        min_num: Optional[int] = None,
        timeout: Optional[float] = None,
        clear_timeout_tasks: bool = True,
        return_partial_tasks: Optional[bool] = None,
    ) -> tuple[list[Status], list[bytes]]:
        """Statuses and payloads of a batch, in order of completion; see :meth:`get_results`."""
        result = await self.get_results(
            batch_id,
            min_num,
            timeout,
            clear_timeout_tasks,
            return_partial_tasks=return_partial_tasks,
        )
        return result.statuses, result.payloads

    async def get_statuses(
        self,
        batch_id: BatchId,
        min_num: Optional[int] = None,
        timeout: Optional[float] = None,
        clear_timeout_tasks: bool = True,
        return_partial_tasks: Optional[bool] = None,
    ) -> list[Status]:
        """Only the statuses of :meth:`get_payload_results`; the payloads are dropped."""
        return (
            await self.get_payload_results(
                batch_id, min_num, timeout, clear_timeout_tasks, return_partial_tasks
            )
        )[0]

    async def wait_all(
        self, timeout: Optional[float] = None, clear_timeout_tasks: bool = True
    ) -> None:
        """Until every batch is complete; results stay to be taken.

        Raises:
            TimeoutError: not within ``timeout`` seconds; with ``clear_timeout_tasks`` what is
                unfinished was cancelled.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for batch_id in list(self.state.batches):
            if await self._waits.wait(batch_id, None, deadline):
                continue
            left = [b.batch_id for b in self.state.batches.values() if not b.complete]
            if clear_timeout_tasks:
                for unfinished in left:
                    now = time.monotonic()
                    self._apply(self.state.cancel_unfinished(unfinished, now, restart=True))
            raise TimeoutError(f"batches {left} are not complete after {timeout:g} s")

    def drain_batch_payload_results(self, batch_id: BatchId) -> tuple[list[Status], list[bytes]]:
        """Take what is finished of a batch now, without waiting."""
        result = self.state.drain(batch_id)
        return result.statuses, result.payloads

    def discard_completed_results(self, batch_id: BatchId) -> None:
        """Forget the results of a batch that were not taken."""
        self.state.drain(batch_id)

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
        await self._waits.notify()
        return counts

    def has_step(self, batch_id: BatchId) -> bool:
        """Whether anything of the batch is pending, running or not yet taken."""
        return batch_id in self.state.batches

    def dynamic_timeout(self, timeout: Optional[float] = None) -> float:
        """Seconds that an attempt of a training task may take now.

        ``explorer.dynamic_timeout.ratio`` times the mean training sub-task, once enough
        batches are complete; at most ``timeout`` (None: ``explorer.max_timeout_s``).
        """
        limit = self.state.pace.limit_s()
        return limit if timeout is None else min(timeout, limit)

    def set_slots(self, slots: Optional[int]) -> None:
        """Bound the sub-tasks in flight; starts what now fits."""
        self._apply(self.state.set_limit(slots, time.monotonic()))

    # state ----------------------------------------------------------------------------
    @property
    def in_flight(self) -> int:
        return len(self.state.running)

    @property
    def pending(self) -> int:
        return len(self.state.pending)

    def get_key_state(self, key: str) -> dict[int, Any]:
        """One field of every runner that has it."""
        return {i: state[key] for i, state in self.get_all_state().items() if key in state}

    def get_runner_state(self, runner_id: int) -> dict[str, Any]:
        """What a runner does or did last; empty when it is unknown.

        ``workflow_id`` (batch/task/run), ``repeat_cnt``, ``model_version``, ``begin_time``,
        ``terminate_time`` (None: still running), ``running_time`` (seconds), and what the
        workflow stored itself.
        """
        runner = self.runners.get(runner_id)
        return {} if runner is None else dict(runner.update_state())

    def get_all_state(self) -> dict[int, dict[str, Any]]:
        """:meth:`get_runner_state` of all runners."""
        return self.runners.states()

    def print_all_state(self) -> None:
        """Log :meth:`get_all_state` as a table."""
        log.info("runners:\n%s", self.runners.render())

    # ----------------------------------------------------------------------------------
    def _require_started(self) -> Hands:
        if self._hands is None:
            raise RuntimeError("the scheduler is not started; await start() first")
        return self._hands

    def _apply(self, instructions: Sequence[Instruction]) -> None:
        if self._hands is not None:
            self._hands.apply(instructions)

    async def _cut(self, batch_id: BatchId, partial: Optional[bool], restart: bool) -> None:
        """Ask what runs for what it has, then cancel the rest."""
        now = time.monotonic()
        cut = self.state.cancel_unfinished
        self._apply(cut(batch_id, now, partial, recall=True))
        await self._waits.wait(batch_id, None, now + self._policy.recall_s)
        self._apply(cut(batch_id, time.monotonic(), partial, restart))

    def _check_minimum(self, batch_id: BatchId, min_num: Optional[int]) -> None:
        batch = self.state.batches.get(batch_id)
        if batch is not None and min_num is not None and min_num > len(batch.tasks):
            log.warning(
                "batch %s has %d tasks, fewer than min_num=%d; waiting for all of them",
                batch_id,
                len(batch.tasks),
                min_num,
            )

    def task_done_callback(self, attempt_id: int, outcome: Outcome, payload: bytes) -> None:
        """An attempt is done elsewhere: book its outcome as if its worker had reported it."""
        self._apply(self.state.finished(attempt_id, outcome, payload, time.monotonic()))

"""Trinity-RFT's scheduler: its calls and its tables, over those of the real one.

Invariant: nothing is scheduled and no result is kept here; every table is a view of the real
scheduler's state at that moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Optional

from trinity_dask.cluster.runners import kill_runner
from trinity_dask.compat.remote import outside_client
from trinity_dask.compat.workflow_runner import Status, WorkflowRunner, group_of_slot, loop_client
from trinity_dask.config.schema import Config
from trinity_dask.explorer.schedule.scheduler import Scheduler as RealScheduler
from trinity_dask.explorer.schedule.tasks import (
    AttemptOutcome,
    RunError,
    ScheduledTask,
    sort_batch_id,
)
from trinity_dask.explorer.schedule.workers import RUNNER
from trinity_dask.workflows import Task

__all__ = [
    "CompletedTaskResult",
    "RunnerWrapper",
    "RunningTaskState",
    "Scheduler",
    "TaskWrapper",
    "sort_batch_id",
]

log = logging.getLogger("trinity_dask.scheduler")

BatchId = int | str


@dataclass
class TaskWrapper:
    """A task of a batch. ``total_runs`` 0 means those of the task."""

    task: Task
    batch_id: BatchId
    sub_task_num: int = 1
    finished_sub_task_num: int = 0
    completed_runs: int = 0
    total_runs: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)
    experience_payloads: list[bytes] = field(default_factory=list)
    first_error: Optional[str] = None
    emitted: bool = False

    def __post_init__(self) -> None:
        self.total_runs = self.total_runs or self.task.repeat_times


@dataclass(frozen=True)
class CompletedTaskResult:
    """A finished task, with the payloads of its sub-tasks."""

    batch_id: BatchId
    task_id: BatchId
    status: Status
    experience_payloads: list[bytes] = field(default_factory=list)


@dataclass
class RunningTaskState:
    """A task that is being executed, and by whom."""

    task: TaskWrapper
    runner_id: int
    restart_runner_on_cancel: bool = True


class RunnerWrapper:
    """Runner ``runner_id``, which samples from engine ``rollout_model_id``."""

    def __init__(
        self,
        runner_id: int,
        rollout_model_id: int,
        auxiliary_model_ids: Sequence[int],
        config: Config,
        lanes: Any = None,
        worker: Optional[str] = None,
    ) -> None:
        self.runner_id = runner_id
        self.rollout_model_id = rollout_model_id
        self.auxiliary_model_ids = list(auxiliary_model_ids)
        self.config = config
        self.retry_times = config.explorer.max_retry_times
        self.timeout = config.explorer.max_timeout_s
        self.state: dict[str, Any] = {}
        self._lanes, self._worker = lanes, worker
        self._ids = (rollout_model_id, self.auxiliary_model_ids, runner_id)
        self.runner = WorkflowRunner(config, *self._ids, worker)

    async def prepare(self) -> None:
        await self.runner.prepare()

    async def update_state(self) -> None:
        """Bring ``state`` up to date; ``running_time`` is the seconds since ``begin_time``."""
        if self._lanes is not None:
            self.state = self._lanes.states().get(self.runner_id, {})
            return
        self.state = await self.runner.get_runner_state()
        self.state["running_time"] = time.time() - (self.state["begin_time"] or time.time())

    async def run_with_retry(
        self,
        task: TaskWrapper,
        repeat_times: int,
        run_id_base: int,
        timeout: float,
        collect_partial_runs: bool,
    ) -> tuple[Status, bytes, int, float]:
        """Run a task on this runner, outside of any batch, until its runs succeed (or, with
        ``collect_partial_runs``, some do), ``explorer.max_retry_times`` times more at most.

        Returns status (its last metrics dict is ``time/task_execution``), payload, runner id
        and seconds. ``timeout`` bounds each attempt.
        """
        started = time.monotonic()
        for _ in range(self.retry_times + 1):
            outcome, payload = await self.runner.attempt(
                task.task, task.batch_id, repeat_times, run_id_base, collect_partial_runs, timeout
            )
            status = outcome.status
            some = collect_partial_runs and status.completed_runs > 0
            if status.ok or some or not outcome.retryable:
                break
        seconds = time.monotonic() - started
        metrics = [*status.metrics, {"time/task_execution": seconds}]
        whole = Status(status.completed_runs, status.total_runs, metrics, status.message)
        return whole, payload, self.runner_id, seconds

    async def restart_runner(self) -> None:
        """Kill the runner worker's process; its nanny starts it again. Beside an engine there
        is no process of the runner's own: its next attempt begins anew anyway."""
        if group_of_slot(self.runner.worker) == RUNNER:
            await kill_runner(await loop_client(), self.runner.worker)
        self.runner = WorkflowRunner(self.config, *self._ids, self._worker)


class Scheduler:
    """Made from ``config``; finds its workers in :meth:`start`. ``real`` is the scheduler that
    it stands for (None: one of its own, on the default client's event loop)."""

    def __init__(self, config: Config, real: Optional[RealScheduler] = None) -> None:
        self.config = config
        self.real = real or RealScheduler(config, client=outside_client())
        self.max_retry_times = config.explorer.max_retry_times
        self.max_repeat_times = config.explorer.max_repeat_times_per_runner
        self.default_timeout = config.explorer.max_timeout_s * (self.max_retry_times + 1)
        self.running = real is not None
        # executions that the caller began himself, for task_done_callback
        self.running_task_state_map: dict[asyncio.Future[Any], RunningTaskState] = {}

    async def start(self) -> None:
        """Idempotent."""
        await self.real.start()
        self.running = True

    async def stop(self) -> None:
        """Cancel and forget everything; it can be started again."""
        self.running = False
        await self.real.stop()

    # batches --------------------------------------------------------------------------
    def schedule(self, tasks: Sequence[Task], batch_id: BatchId) -> None:
        """Queue tasks under a train step, or ``"<step>/<taskset>"``. Empty: ignored."""
        self.real.schedule(tasks, batch_id)

    async def get_payload_results(
        self,
        batch_id: BatchId,
        min_num: Optional[int] = None,
        timeout: Optional[float] = None,
        clear_timeout_tasks: bool = True,
        return_partial_tasks: bool = False,
    ) -> tuple[list[Status], list[bytes]]:
        """Statuses and payloads of a batch once ``min_num`` (None: all) of its tasks are
        finished, or after ``timeout`` seconds; see the real ``get_results``. Takes them out."""
        result = await self.real.get_results(
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
        return_partial_tasks: bool = False,
    ) -> list[Status]:
        """The statuses of :meth:`get_payload_results`; the payloads are dropped."""
        arguments = (min_num, timeout, clear_timeout_tasks, return_partial_tasks)
        return (await self.get_payload_results(batch_id, *arguments))[0]

    async def wait_all(
        self, timeout: Optional[float] = None, clear_timeout_tasks: bool = True
    ) -> None:
        """Until every batch is complete; results stay to be taken.

        Raises:
            TimeoutError: no task ended for ``timeout`` seconds (None: ``default_timeout``); with
                ``clear_timeout_tasks`` what is unfinished was cancelled.
        """
        limit, batches = timeout or self.default_timeout, self.real.state.batches

        def left() -> int:
            return sum(batch.unfinished_tasks for batch in batches.values())

        def fewer(before: int) -> bool:
            return left() < before

        while before := left():
            if not await self.real.changes.until(partial(fewer, before), limit):
                unfinished = [b.batch_id for b in batches.values() if not b.complete]
                for batch_id in unfinished if clear_timeout_tasks else ():
                    await self.real.abort_batch(batch_id, return_partial_tasks=True)
                raise TimeoutError(f"batches {unfinished} are not complete: {limit:g} s passed")

    async def drain_batch_payload_results(
        self, batch_id: BatchId
    ) -> tuple[list[Status], list[bytes]]:
        """Take what is finished of a batch now."""
        result = self.real.state.drain(batch_id)
        return result.statuses, result.payloads

    def discard_completed_results(self, batch_id: BatchId) -> None:
        """Forget what is finished of a batch."""
        self.real.state.drain(batch_id)

    async def abort_batch(
        self, batch_id: BatchId, return_partial_tasks: bool = False, restart_runners: bool = True
    ) -> None:
        """Cancel what is left of a batch; with ``return_partial_tasks`` its finished runs can
        still be taken. ``restart_runners``: those that execute a blocking workflow of it."""
        await self.real.abort_batch(batch_id, return_partial_tasks, restart_runners)

    def has_step(self, batch_id: BatchId) -> bool:
        """Whether anything of the batch is pending, running or not yet taken."""
        return batch_id in self.real.state.batches

    def dynamic_timeout(self, timeout: Optional[float] = None) -> float:
        """Seconds that an attempt of a training task may take now, at most ``timeout``."""
        limit = self.real.state.pace.limit_s()
        return limit if timeout is None else min(timeout, limit)

    def task_done_callback(self, async_task: asyncio.Future[Any]) -> None:
        """An execution in ``running_task_state_map`` (a task of ``run_with_retry``) has ended: it
        takes the place of the attempt at the same task that is out. None: it changes nothing."""
        running, state = self.running_task_state_map.pop(async_task), self.real.state
        wrapper, now = running.task, time.monotonic()
        known = (wrapper.batch_id, wrapper.task.task_id)
        for attempt_id, attempt in list(state.running.items()):
            task = attempt.sub_task.task
            if (task.batch_id, task.task_id) != known:
                continue
            if async_task.cancelled() or async_task.exception() is not None:
                error = RunError("Cancelled" if async_task.cancelled() else "Failed", "see the log")
                instructions = state.failed(attempt_id, error, now)
            else:
                status, payload, _, seconds = async_task.result()
                outcome = AttemptOutcome(status, (), seconds)
                instructions = state.finished(attempt_id, outcome, payload, now)
            self.real.executor.apply(instructions)
            return

    # tables ---------------------------------------------------------------------------
    @property
    def runners(self) -> dict[int, RunnerWrapper]:
        engines = [w.name for w in self.real.state.workers if w.group != RUNNER] or ["engine-0"]
        found = {}
        for worker in self.real.state.workers:
            for lane in worker.lanes:
                own = worker.name if worker.group != RUNNER else engines[lane % len(engines)]
                engine = int(own.rpartition("-")[2])
                found[lane] = RunnerWrapper(
                    lane, engine, [], self.config, self.real.lanes, worker.name
                )
        return found

    @property
    def runner_num(self) -> int:
        return len(self.runners)

    @property
    def busy_runners(self) -> dict[int, RunningTaskState]:
        return {
            attempt.lane: RunningTaskState(_wrapper(attempt.sub_task.task), attempt.lane)
            for attempt in self.real.state.running.values()
            if not attempt.ended
        }

    @property
    def idle_runners(self) -> set[int]:
        return {lane for worker in self.real.state.workers if worker.up for lane in worker.lanes
                if lane not in worker.running}  # fmt: skip

    @property
    def pending_tasks(self) -> dict[BatchId, deque[tuple[TaskWrapper, int, int]]]:
        """Task, repeat times and first run of each sub-task that waits, by batch."""
        out = {id(attempt.sub_task) for attempt in self.real.state.running.values()}
        return self._sub_tasks(lambda sub: not sub.finished and id(sub) not in out)

    @property
    def running_tasks(self) -> dict[BatchId, deque[tuple[TaskWrapper, int, int]]]:
        """As :attr:`pending_tasks`, of those that are executed."""
        out = {id(attempt.sub_task) for attempt in self.real.state.running.values()}
        return self._sub_tasks(lambda sub: id(sub) in out)

    def _sub_tasks(self, wanted: Any) -> dict[BatchId, Any]:
        found: dict[BatchId, Any] = {}
        for batch in self.real.state.batches.values():
            for task in batch.tasks:
                for sub in filter(wanted, task.sub_tasks):
                    row = (_wrapper(task), sub.repeat_times, sub.run_id_base)
                    found.setdefault(batch.batch_id, deque()).append(row)
        return found

    @property
    def task_num_map(self) -> dict[BatchId, int]:
        return {batch_id: len(batch.tasks) for batch_id, batch in self.real.state.batches.items()}

    # runner states --------------------------------------------------------------------
    def get_all_state(self) -> dict[int, dict[str, Any]]:
        """``workflow_id`` (batch/task/run), ``repeat_cnt``, ``model_version``, ``begin_time``,
        ``terminate_time`` (None: still running), ``running_time`` (seconds) and what the
        workflow stored itself, of every runner that has done something."""
        return {i: state for i, state in self.real.lanes.states().items() if state}

    def get_runner_state(self, runner_id: int) -> dict[str, Any]:
        """Of one runner; empty when it is unknown."""
        return self.get_all_state().get(runner_id, {})

    def get_key_state(self, key: str) -> dict[int, Any]:
        """One field of every runner that has it."""
        return {i: state[key] for i, state in self.get_all_state().items() if key in state}

    def print_all_state(self) -> None:
        """Log :meth:`get_all_state` as an aligned table."""
        states = self.get_all_state()
        keys = dict.fromkeys(key for state in states.values() for key in state)
        rows = [["runner_id", *keys]]
        rows += [[str(i), *(str(s.get(k, "-")) for k in keys)] for i, s in states.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (" | ".join(map(str.ljust, row, widths)) for row in rows)
        log.info("runners:\n%s", "\n".join(lines))


def _wrapper(task: ScheduledTask) -> TaskWrapper:
    subs = task.sub_tasks
    outcomes = [sub.outcome for sub in subs if sub.outcome is not None]
    errors = [str(error) for outcome in outcomes for error in outcome.errors]
    return TaskWrapper(
        replace(task.task, batch_id=task.batch_id, task_id=task.task_id),
        task.batch_id,
        len(subs),
        sum(sub.finished for sub in subs),
        sum(outcome.status.completed_runs for outcome in outcomes),
        task.total_runs,
        [metric for outcome in outcomes for metric in outcome.status.metrics],
        [sub.payload for sub in subs if sub.payload is not None],
        next(iter(errors), None),
        task.emitted,
    )

"""Runs the workflow of a task as often as asked, and says how each run ended.

Invariant: nothing that user code does (raise, return nonsense, hang, block, cancel itself)
leaves this module other than as data in the outcome; every experience that leaves it carries
its batch, task and run, and the model version that made it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Optional

from trinity_dask.cluster.loop_watch import current_watch, no_exit
from trinity_dask.experience import Experience
from trinity_dask.experience.payload import encode
from trinity_dask.explorer.rollout.baseline import greedy_task, with_baseline
from trinity_dask.explorer.rollout.lanes import Lanes, plain
from trinity_dask.explorer.rollout.recall import (
    Recalled,
    until_recalled,
    wait_recallable,
    was_recalled,
)
from trinity_dask.explorer.rollout.running import SETTLE_S, bounded, describe, outcome_of, stop
from trinity_dask.explorer.rollout.runs import Attempt, Runs, checked, stamp
from trinity_dask.explorer.rollout.thread_model import run_async_in_thread
from trinity_dask.explorer.schedule.outcome import Outcome, Status
from trinity_dask.registry import LoadError
from trinity_dask.rewards import REWARD_FUNCTIONS
from trinity_dask.workflows import WORKFLOWS, PartialGroupError, Task, Workflow
from trinity_dask.workflows.threads import abandoned_threads, run_in_thread

CONCURRENT_MODES = ("sequential", "asynchronous", "multi-threading")
MAX_IDLE_INSTANCES = 64

__all__ = ["CONCURRENT_MODES", "Outcome", "Status", "WorkflowRunner", "workflow_class"]


class SiblingFailed(RuntimeError):
    """A run that was given up because another run of its group had failed."""


class WorkflowRunner:
    """Executes tasks; safe to use for many tasks at once on one event loop.

    ``make_model`` builds the model wrapper for a task's ``rollout_args``; every instance of
    a workflow has a wrapper of its own, so histories and states never mix. ``name`` is that
    of the worker.

    Raises:
        ValueError: unknown ``concurrent_mode``.
    """

    def __init__(
        self,
        make_model: Callable[[dict[str, Any]], Any],
        concurrent_mode: str = "asynchronous",
        auxiliary_models: Sequence[Any] = (),
        name: str = "runner",
    ) -> None:
        if concurrent_mode not in CONCURRENT_MODES:
            raise ValueError(
                f"explorer.concurrent_mode {concurrent_mode!r} is unknown; use one of "
                f"{', '.join(CONCURRENT_MODES)}"
            )
        self.name = name
        self._make_model = make_model
        self._mode = concurrent_mode
        self._auxiliary = list(auxiliary_models)
        self._classes: dict[tuple[str, Optional[str]], type[Workflow]] = {}
        self._idle: dict[type[Workflow], list[Workflow]] = {}
        self._lanes = Lanes(name)

    # what a sub-task calls ------------------------------------------------------------
    async def prepare(self) -> None:
        """Make one model, so that a wrong configuration shows before the first task.

        Raises:
            ValueError: the model's configuration cannot be used.
        """
        self._make_model({})

    async def run_task(
        self,
        task: Task,
        batch_id: int | str,
        repeat_times: int = 1,
        run_id_base: int = 0,
        collect_partial_runs: bool = True,
        timeout_s: Optional[float] = None,
        runner_id: Optional[int] = None,
    ) -> tuple[Status, bytes]:
        """Run ``task`` ``repeat_times`` times; the status, and the payload with the experiences.

        The payload's header is the whole outcome. An eval task's payload has no rows.
        Never raises for anything the workflow or its reward does.
        """
        started = time.monotonic()
        deadline = None if timeout_s is None else started + timeout_s
        workflow_id = f"{batch_id}/{task.task_id}/{run_id_base}"
        with self._lanes.occupied(workflow_id, repeat_times, runner_id) as lane:
            attempt = Attempt(task, repeat_times, run_id_base, collect_partial_runs, deadline, lane)
            runs = await self._all_runs_and_baseline(attempt)
            versions, state = lane.versions(), lane.state()
        for experience in runs.experiences:
            stamp(experience, task, batch_id, versions)
        seconds = time.monotonic() - started
        outcome = runs.outcome(repeat_times, seconds, self._facts(state, seconds))
        kept = [] if task.is_eval else runs.experiences
        return outcome.status, encode(kept, outcome.to_header())

    async def is_alive(self) -> bool:
        return True

    def get_runner_state(self) -> list[dict[str, Any]]:
        """One row per runner (lane) that has run something, the last or present sub-task.

        ``runner_id``, ``workflow_id`` (batch/task/run), ``model_version``, ``repeat_cnt``,
        ``begin_time`` and ``terminate_time`` (epoch seconds, None while it runs),
        ``running_time`` (s), and what the workflow set with ``model.set_workflow_state``.
        """
        return self._lanes.states()

    def _facts(self, state: dict[str, Any], seconds: float) -> dict[str, Any]:
        watch = current_watch()
        return {
            **plain(state),
            "worker": self.name,
            "abandoned_threads": abandoned_threads(),
            "loop_lag_s": 0.0 if watch is None else round(watch.max_lag_s(seconds), 3),
        }

    # the runs -------------------------------------------------------------------------
    async def _all_runs_and_baseline(self, attempt: Attempt) -> Runs:
        if not attempt.task.greedy_baseline or attempt.task.is_eval:
            return await self._all_runs(attempt)
        greedy = replace(attempt, task=greedy_task(attempt.task), n=1, base=0)
        jobs = [asyncio.ensure_future(self._all_runs(a)) for a in (attempt, greedy)]
        try:
            await asyncio.wait(jobs)
        except asyncio.CancelledError:
            await stop(list(jobs))
            raise
        return with_baseline(jobs[0].result(), jobs[1].result(), attempt.n)

    async def _all_runs(self, attempt: Attempt) -> Runs:
        try:
            cls = await self._workflow_class(attempt.task)
            if cls.can_repeat:
                return await self._repeatable(cls, attempt)
            if self._mode == "sequential" or attempt.n == 1:
                return await self._one_by_one(cls, attempt)
            return await self._together(cls, attempt)
        except Exception as error:  # whatever user code does is data
            retryable = not isinstance(error, LoadError)
            return Runs(errors=[describe(error)] * attempt.n, retryable=retryable)

    async def _workflow_class(self, task: Task) -> type[Workflow]:
        """The task's workflow class. User code is imported in a thread: that may take long."""
        key = (task.workflow, task.reward_fn)
        if key not in self._classes:
            try:
                cls = await asyncio.to_thread(_import, *key)
            except LoadError:  # a few libraries can be imported in a main thread only
                cls = workflow_class(task.workflow)
            self._classes[key] = cls
        return self._classes[key]

    async def _repeatable(self, cls: type[Workflow], attempt: Attempt) -> Runs:
        """All runs by one call of one instance."""
        started = time.monotonic()
        runs = Runs()
        workflow = self._take(cls, attempt, attempt.base)
        workflow.set_repeat_times(attempt.n, attempt.base)
        try:
            found = await self._call(workflow, attempt)
        except PartialGroupError as partial:
            found = checked(partial.experiences, attempt.task, allow_empty=True)
            runs.errors = [describe(error) for error in partial.errors]
        self._give_back(workflow)
        runs.add_group(found, attempt.n, attempt.base, time.monotonic() - started)
        return runs

    async def _one_by_one(self, cls: type[Workflow], attempt: Attempt) -> Runs:
        runs = Runs()
        for index in range(attempt.n):
            started = time.monotonic()
            try:
                if index and attempt.left_s == 0:
                    raise TimeoutError("not started: the time of its attempt was over")
                found = await until_recalled(self._single(cls, attempt, attempt.base + index))
            except Exception as error:  # a failed run is data
                runs.errors.append(describe(error))
                if not attempt.partial:
                    skipped = SiblingFailed("not started: an earlier run of its group failed")
                    runs.errors += [describe(skipped)] * (attempt.n - index - 1)
                    break
            else:
                runs.add(found, time.monotonic() - started)
        return runs

    async def _together(self, cls: type[Workflow], attempt: Attempt) -> Runs:
        """Each run on its own instance; at the deadline, finished runs are kept."""
        numbers = range(attempt.base, attempt.base + attempt.n)
        children = [asyncio.ensure_future(self._timed(cls, attempt, run)) for run in numbers]
        when = asyncio.ALL_COMPLETED if attempt.partial else asyncio.FIRST_EXCEPTION
        left = attempt.left_s
        # every run keeps the deadline by itself; this is for one that ignores its end
        limit = None if left is None else left + 2 * SETTLE_S
        _, late = await wait_recallable(children, limit, when)
        await stop(list(late))
        runs = Runs()
        for child in children:
            try:
                if child in late and was_recalled():
                    raise Recalled
                if child in late:
                    raise SiblingFailed("given up: another run of its group failed")
                found, seconds = outcome_of(child, attempt.task.workflow)
            except Exception as error:  # a failed run is data
                runs.errors.append(describe(error))
            else:
                runs.add(found, seconds)
        return runs

    async def _timed(
        self, cls: type[Workflow], attempt: Attempt, run: int
    ) -> tuple[list[Experience], float]:
        started = time.monotonic()
        return await self._single(cls, attempt, run), time.monotonic() - started

    async def _single(self, cls: type[Workflow], attempt: Attempt, run: int) -> list[Experience]:
        workflow = self._take(cls, attempt, run)
        found = await self._call(workflow, attempt)
        self._give_back(workflow)
        for experience in found:
            experience.eid.run = run
        return found

    async def _call(self, workflow: Workflow, attempt: Attempt) -> list[Experience]:
        """One run of one instance, where it may block without harm."""
        left = attempt.left_s
        workflow.time_limit_s = left
        name = f"workflow {attempt.task.workflow}"
        if not workflow.is_async:
            value = await run_in_thread(workflow.run, timeout_s=left, name=name)
        elif self._mode == "multi-threading" and not workflow.can_repeat:
            value = await run_async_in_thread(workflow, timeout_s=left, name=name)
        else:
            value = await bounded(_run_async(workflow), left, name)
        return checked(value, attempt.task)

    # instances ------------------------------------------------------------------------
    def _take(self, cls: type[Workflow], attempt: Attempt, run: int) -> Workflow:
        """An idle instance, reset to the task, or a new one; its history and state are empty."""
        with no_exit():  # the constructor and reset are user code too
            workflow = self._reused(cls, attempt.task) or self._new(cls, attempt.task)
        attempt.lane.add_model(workflow.model)
        workflow.model.begin_run(f"{attempt.task.batch_id}/{attempt.task.task_id}/{run}")
        return workflow

    def _reused(self, cls: type[Workflow], task: Task) -> Optional[Workflow]:
        idle = self._idle.get(cls)
        workflow = idle.pop() if idle else None
        if workflow is None or workflow.task.rollout_args != task.rollout_args:
            return None
        workflow.model.clean_workflow_state()
        workflow.reset(task)
        return workflow

    def _new(self, cls: type[Workflow], task: Task) -> Workflow:
        return cls(task, self._make_model(task.rollout_args), self._auxiliary)

    def _give_back(self, workflow: Workflow) -> None:
        """Keep a healthy instance for the next task; after a failure it is never reused."""
        if not workflow.can_reset:
            return
        idle = self._idle.setdefault(type(workflow), [])
        if len(idle) < MAX_IDLE_INSTANCES:
            idle.append(workflow)


async def _run_async(workflow: Workflow) -> Any:
    """Here, so that also the call that makes the coroutine happens inside the bounded task."""
    return await workflow.run_async()


def _import(workflow: str, reward_fn: Optional[str]) -> type[Workflow]:
    if reward_fn is not None:
        with suppress(LoadError):  # said when the workflow asks for it
            REWARD_FUNCTIONS.get(reward_fn)
    return workflow_class(workflow)


def workflow_class(name: str) -> type[Workflow]:
    """The workflow class that ``name`` means. Raises LoadError when there is none."""
    cls = WORKFLOWS.get(name)
    if not (isinstance(cls, type) and issubclass(cls, Workflow)):
        raise LoadError(f"workflow {name!r} is {cls!r}, not a subclass of Workflow")
    return cls

"""Runs the workflow of a task as often as asked, and says how each run ended.

Invariant: nothing that user code does (raise, return nonsense, hang, cancel itself) leaves
this module other than as data in the outcome; every experience that leaves it carries its
batch, task and run, and the model version that made it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from trinity_dask.experience import Experience
from trinity_dask.experience.payload import encode
from trinity_dask.explorer.metrics import TIME_RUN, reduce_metrics
from trinity_dask.explorer.running import bounded, describe, outcome_of, stop
from trinity_dask.explorer.status import Outcome, RunError, Status
from trinity_dask.explorer.thread_model import run_async_in_thread
from trinity_dask.workflows import WORKFLOWS, PartialGroupError, Task, Workflow
from trinity_dask.workflows.loading import LoadError, load_object
from trinity_dask.workflows.threads import run_in_thread

CONCURRENT_MODES = ("sequential", "asynchronous", "multi-threading")
MAX_IDLE_INSTANCES = 64

__all__ = ["CONCURRENT_MODES", "Outcome", "Status", "WorkflowRunner"]


@dataclass
class Runs:
    """What several runs came to: a metrics dict per run (or experience), an error per failure."""

    experiences: list[Experience] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    errors: list[RunError] = field(default_factory=list)
    retryable: bool = True

    def add(self, experiences: list[Experience], seconds: float) -> None:
        """One successful run."""
        self.experiences += experiences
        reduced = reduce_metrics(e.metrics for e in experiences)
        self.metrics.append({**reduced, TIME_RUN: seconds})


class WorkflowRunner:
    """Executes tasks; safe to use for many tasks at once on one event loop.

    ``make_model`` builds the model wrapper for a task's ``rollout_args``.

    Raises:
        ValueError: unknown ``concurrent_mode``.
    """

    def __init__(
        self,
        make_model: Callable[[dict[str, Any]], Any],
        concurrent_mode: str = "asynchronous",
        auxiliary_models: Sequence[Any] = (),
    ) -> None:
        if concurrent_mode not in CONCURRENT_MODES:
            raise ValueError(
                f"explorer.concurrent_mode {concurrent_mode!r} is unknown; use one of "
                f"{', '.join(CONCURRENT_MODES)}"
            )
        self._make_model = make_model
        self._mode = concurrent_mode
        self._auxiliary = list(auxiliary_models)
        self._classes: dict[str, type[Workflow]] = {}
        self._idle: dict[type[Workflow], list[Workflow]] = {}
        self._running: dict[str, dict[str, Any]] = {}

    # what a sub-task calls ------------------------------------------------------------
    async def run_task(
        self,
        task: Task,
        batch_id: int | str,
        repeat_times: int = 1,
        run_id_base: int = 0,
        collect_partial_runs: bool = True,
        timeout_s: Optional[float] = None,
    ) -> tuple[Status, bytes]:
        """Run ``task`` ``repeat_times`` times; the status, and the payload with the experiences.

        The payload's header is the whole outcome. An eval task's payload has no rows.
        Never raises for anything the workflow or its reward does.
        """
        started = time.monotonic()
        workflow_id = f"{batch_id}/{task.task_id}/{run_id_base}"
        self._running[workflow_id] = {"workflow_id": workflow_id, "begin_time": time.time()}
        try:
            deadline = None if timeout_s is None else started + timeout_s
            runs = await self._all_runs(
                task, repeat_times, run_id_base, collect_partial_runs, deadline
            )
        finally:
            del self._running[workflow_id]
        outcome = _outcome(runs, repeat_times, time.monotonic() - started)
        for experience in runs.experiences:
            _stamp(experience, task, batch_id)
        kept = [] if task.is_eval else runs.experiences
        return outcome.status, encode(kept, outcome.to_header())

    async def is_alive(self) -> bool:
        return True

    def get_runner_state(self) -> list[dict[str, Any]]:
        """What is being run: ``workflow_id`` (batch/task/run), ``begin_time``, ``running_time``."""
        now = time.time()
        return [{**s, "running_time": now - s["begin_time"]} for s in self._running.values()]

    # the runs -------------------------------------------------------------------------
    async def _all_runs(
        self, task: Task, n: int, base: int, partial: bool, deadline: Optional[float]
    ) -> Runs:
        try:
            cls = self._workflow_class(task)
            if cls.can_repeat:
                return await self._repeatable(cls, task, n, base, deadline)
            if self._mode == "sequential" or n == 1:
                return await self._one_by_one(cls, task, n, base, partial, deadline)
            return await self._together(cls, task, n, base, partial, deadline)
        except Exception as error:  # whatever user code does is data
            retryable = not isinstance(error, LoadError)
            return Runs(errors=[describe(error)] * n, retryable=retryable)

    def _workflow_class(self, task: Task) -> type[Workflow]:
        known = self._classes.get(task.workflow)
        if known is not None:
            return known
        cls = load_object(task.workflow, WORKFLOWS)
        if not (isinstance(cls, type) and issubclass(cls, Workflow)):
            raise LoadError(f"workflow {task.workflow!r} is {cls!r}, not a subclass of Workflow")
        self._classes[task.workflow] = cls
        return cls

    async def _repeatable(
        self, cls: type[Workflow], task: Task, n: int, base: int, deadline: Optional[float]
    ) -> Runs:
        """All runs by one call of one instance."""
        started = time.monotonic()
        runs = Runs()
        workflow = self._take(cls, task)
        workflow.set_repeat_times(n, base)
        try:
            found = await self._call(workflow, deadline)
        except PartialGroupError as partial:
            found = _checked(partial.experiences, task, allow_empty=True)
            runs.errors = [describe(error) for error in partial.errors]
        self._give_back(workflow)
        _number_runs(found, n, base)
        seconds = time.monotonic() - started
        runs.experiences = found
        runs.metrics = [{**e.metrics, TIME_RUN: seconds} for e in found]
        return runs

    async def _one_by_one(
        self, cls: type[Workflow], task: Task, n: int, base: int, partial: bool, deadline: Any
    ) -> Runs:
        runs = Runs()
        for index in range(n):
            started = time.monotonic()
            try:
                found = await self._single(cls, task, base + index, deadline)
            except Exception as error:  # a failed run is data
                missing = 1 if partial else n - index
                runs.errors += [describe(error)] * missing
                if not partial:
                    break
            else:
                runs.add(found, time.monotonic() - started)
        return runs

    async def _together(
        self, cls: type[Workflow], task: Task, n: int, base: int, partial: bool, deadline: Any
    ) -> Runs:
        """Each run on its own instance; at the deadline, finished runs are kept."""
        started = time.monotonic()
        children: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._single(cls, task, base + i, deadline)) for i in range(n)
        ]
        when = asyncio.ALL_COMPLETED if partial else asyncio.FIRST_EXCEPTION
        try:
            _, late = await asyncio.wait(children, timeout=_left(deadline), return_when=when)
        except asyncio.CancelledError:
            await stop(children)
            raise
        await stop(list(late))
        runs = Runs()
        for child in children:
            try:
                if child in late:
                    raise TimeoutError("given up: its deadline passed or another run failed")
                found = outcome_of(child, task.workflow)
            except Exception as error:  # a failed run is data
                runs.errors.append(describe(error))
            else:
                runs.add(found, time.monotonic() - started)
        return runs

    async def _single(
        self, cls: type[Workflow], task: Task, run: int, deadline: Optional[float]
    ) -> list[Experience]:
        workflow = self._take(cls, task)
        found = await self._call(workflow, deadline)
        self._give_back(workflow)
        for experience in found:
            experience.eid.run = run
        return found

    async def _call(self, workflow: Workflow, deadline: Optional[float]) -> list[Experience]:
        """One run of one instance, where it may block without harm."""
        left = _left(deadline)
        workflow.time_limit_s = left
        name = workflow.task.workflow
        if not workflow.is_async:
            value = await run_in_thread(workflow.run, timeout_s=left, name=name)
        elif self._mode == "multi-threading" and not workflow.can_repeat:
            value = await run_async_in_thread(workflow, timeout_s=left, name=name)
        else:
            value = await bounded(workflow.run_async(), left, f"workflow {name}")
        return _checked(value, workflow.task)

    # instances ------------------------------------------------------------------------
    def _take(self, cls: type[Workflow], task: Task) -> Workflow:
        """An idle instance, reset to ``task``, or a new one."""
        idle = self._idle.get(cls)
        if idle:
            workflow = idle.pop()
            if workflow.task.rollout_args == task.rollout_args:
                workflow.reset(task)
                return workflow
        return cls(task, self._model_for(task), self._auxiliary)

    def _model_for(self, task: Task) -> Any:
        return self._make_model(task.rollout_args)

    def _give_back(self, workflow: Workflow) -> None:
        """Keep a healthy instance for the next task; after a failure it is never reused."""
        if not workflow.can_reset:
            return
        idle = self._idle.setdefault(type(workflow), [])
        if len(idle) < MAX_IDLE_INSTANCES:
            idle.append(workflow)


def _left(deadline: Optional[float]) -> Optional[float]:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def _checked(value: Any, task: Task, allow_empty: bool = False) -> list[Experience]:
    """``value`` if it is what a workflow must return. Raises TypeError or ValueError."""
    if not isinstance(value, list) or not all(isinstance(e, Experience) for e in value):
        what = type(value).__name__
        raise TypeError(f"workflow {task.workflow!r} returned {what}, not a list of Experience")
    for experience in value:
        experience.check()
    if not value and not allow_empty:
        raise ValueError(f"workflow {task.workflow!r} returned no experience")
    return value


def _number_runs(found: list[Experience], n: int, base: int) -> None:
    """Check the run numbers; a workflow that left them all at 0 gets them in order."""
    runs = {e.eid.run for e in found}
    if runs == {0} and len(found) == n and (n > 1 or base):
        for index, experience in enumerate(found):
            experience.eid.run = base + index
    elif not all(base <= run < base + n for run in runs):
        raise ValueError(
            f"experiences carry run numbers {sorted(runs)}; this group has runs {base} to "
            f"{base + n - 1} (see Workflow.set_repeat_times)"
        )


def _outcome(runs: Runs, n: int, seconds: float) -> Outcome:
    completed = n - len(runs.errors)
    message = None
    if runs.errors:
        message = f"{completed}/{n} runs completed successfully; first error: {runs.errors[0]}"
    status = Status(completed, n, runs.metrics, message)
    return Outcome(status, tuple(runs.errors), seconds, runs.retryable)


def _stamp(experience: Experience, task: Task, batch_id: int | str) -> None:
    eid = experience.eid
    eid.batch = batch_id
    if eid.task == "":
        eid.task = task.task_id
    info = experience.info
    if experience.versions is not None:
        oldest, newest = int(experience.versions.min()), int(experience.versions.max())
        info["model_version"], info["model_version_drift"] = oldest, newest - oldest
    info["use_count"] = 0
    info["task_index"] = task.index

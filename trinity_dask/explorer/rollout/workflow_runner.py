"""Runs the workflow of a task as often as asked, and says how each run ended.

Invariant: nothing that user code does (raise, return nonsense, hang, block, cancel itself)
leaves this module other than as data in the outcome. A run is counted once, as completed or by
its error; every experience carries its batch, task and run, and the model version that made
it. The greedy run that a group's rewards are compared with (ReMax, arXiv 2310.10505) is no
experience: only its reward leaves, in ``info["reward_baseline"]`` of those of the group.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Optional

from trinity_dask.cluster.loop_watch import Interrupted, current_watch, user_task
from trinity_dask.config.fields import choices_of
from trinity_dask.config.schema import ExplorerConfig
from trinity_dask.experience import Experience
from trinity_dask.experience.schema import encode, peek_header
from trinity_dask.explorer.metrics import TIME_RUN, reduce_metrics
from trinity_dask.explorer.rollout.lanes import Lane, Lanes
from trinity_dask.explorer.rollout.user_code import (
    SETTLE_S,
    Recalled,
    as_run_error,
    run_async_in_thread,
    stop,
    until_recalled,
    wait_recallable,
    was_recalled,
)
from trinity_dask.explorer.schedule.tasks import AttemptOutcome, RunError, Status
from trinity_dask.registry import LoadError
from trinity_dask.rewards import REWARD_FUNCTIONS
from trinity_dask.workflows import WORKFLOWS, PartialGroupError, Task, Workflow
from trinity_dask.workflows.threads import abandoned_threads, run_in_thread

CONCURRENT_MODES = choices_of(ExplorerConfig, "concurrent_mode")
MAX_IDLE_INSTANCES = 64
MISSING_RUN = "MissingRun"
BASELINE = "reward_baseline"


class SiblingFailed(RuntimeError):
    """A run that was given up because another run of its group had failed."""


class RunCancelled(RuntimeError):
    """User code raised ``CancelledError`` although nobody had cancelled it."""


class LoopBlocked(TimeoutError):
    """Asynchronous user code that held the event loop until it was interrupted."""


@dataclass(frozen=True)
class Attempt:
    """``n`` runs of ``task`` from number ``base`` on, until ``deadline`` (monotonic clock).

    Without ``partial`` the first failed run ends the others.
    """

    task: Task
    n: int
    base: int
    partial: bool
    deadline: Optional[float]
    lane: Lane

    @property
    def left_s(self) -> Optional[float]:
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)


@dataclass
class Runs:
    """What several runs came to: experiences and metrics of each completed one, an error of each
    failed one; ``baseline`` is the reward of the greedy run beside them."""

    completed: list[tuple[list[Experience], dict[str, float]]] = field(default_factory=list)
    errors: list[RunError] = field(default_factory=list)
    retryable: bool = True
    baseline: Optional[float] = None


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

    async def run_task(
        self,
        task: Task,
        batch_id: int | str,
        repeat_times: int = 1,
        run_id_base: int = 0,
        collect_partial_runs: bool = True,
        timeout_s: Optional[float] = None,
        lane_number: Optional[int] = None,
    ) -> tuple[Status, bytes]:
        """Run ``task`` ``repeat_times`` times; the status, and the payload with the experiences.

        The payload's header is the whole outcome. An eval task's payload has no rows, unless they
        are to be kept. The model
        versions before and after the runs stand in for those of an experience that does not
        know the version of its tokens. Never raises for anything the workflow or its reward does.
        """
        started, n = time.monotonic(), repeat_times
        deadline = None if timeout_s is None else started + timeout_s
        workflow_id = f"{batch_id}/{task.task_id}/{run_id_base}"
        with self._lanes.occupied(workflow_id, n, lane_number) as lane:
            attempt = Attempt(task, n, run_id_base, collect_partial_runs, deadline, lane)
            compared = task.greedy_baseline and not task.is_eval
            runs = await (self._with_baseline(attempt) if compared else self._all_runs(attempt))
            of_model, state = lane.versions(), lane.state()
        experiences = [e for found, _ in runs.completed for e in found]
        for experience in experiences:
            eid, versions = experience.eid, of_model
            eid.batch, eid.task = batch_id, eid.task if eid.task != "" else task.task_id
            experience.metrics = experience.metrics or {}
            versions = experience.version_span or versions
            if versions is not None:
                first, last = versions
                experience.info |= {"model_version": first, "model_version_drift": last - first}
            experience.info |= {"use_count": 0, "task_index": task.index}
        metrics = [metrics for _, metrics in runs.completed]
        if runs.baseline is not None:
            for holder in (*(e.info for e in experiences), *metrics):
                holder[BASELINE] = runs.baseline
        seconds, watch = time.monotonic() - started, current_watch()
        facts = {
            **state,
            "worker": self.name,
            "abandoned_threads": abandoned_threads(),
            "loop_lag_s": 0.0 if watch is None else round(watch.max_lag_s(seconds), 3),
        }
        message, completed = None, n - len(runs.errors)
        if runs.errors:
            message = f"{completed}/{n} runs completed successfully; first error: {runs.errors[0]}"
        status = Status(completed, n, metrics, message)
        tokens = sum(int(e.action_mask.sum()) for e in experiences if e.action_mask is not None)
        outcome = AttemptOutcome(status, tuple(runs.errors), seconds, runs.retryable, facts, tokens)
        return status, encode(experiences if task.wants_rows else [], header_of(outcome))

    def get_runner_state(self) -> list[dict[str, Any]]:
        """One row per lane (Trinity-RFT's runner) that has run something, its last or present
        sub-task.

        ``runner_id``, ``workflow_id`` (batch/task/run), ``model_version``, ``repeat_cnt``,
        ``begin_time`` and ``terminate_time`` (epoch seconds, None while it runs),
        ``running_time`` (s), and what the workflow set with ``model.set_workflow_state``.
        """
        return self._lanes.states()

    # the runs -------------------------------------------------------------------------
    async def _with_baseline(self, attempt: Attempt) -> Runs:
        """The runs, with the reward of a run at temperature 0: that of its last experience.

        Without it the group is of no use to its algorithm, so then all runs count as failed.
        """
        task = attempt.task
        cold = {**task.rollout_args, "temperature": 0.0}
        once = replace(task, rollout_args=cold, repeat_times=1, greedy_baseline=False)
        greedy_attempt = replace(attempt, task=once, n=1, base=0)
        jobs = [asyncio.ensure_future(self._all_runs(a)) for a in (attempt, greedy_attempt)]
        try:
            await asyncio.wait(jobs)
        except asyncio.CancelledError:
            await stop(jobs)
            raise
        runs, greedy = (job.result() for job in jobs)
        if greedy.errors:
            return Runs(errors=[greedy.errors[0]] * attempt.n, retryable=greedy.retryable)
        # of a run of several experiences the mean, as in the statistics of groups
        rewards = [float(e.reward) for e in greedy.completed[-1][0] if e.reward is not None]
        if not rewards:
            error = RunError("ValueError", "the greedy baseline run came back without a reward")
            return Runs(errors=[error] * attempt.n)
        runs.baseline = fmean(rewards)
        return runs

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
            return Runs(errors=[as_run_error(error)] * attempt.n, retryable=retryable)

    async def _workflow_class(self, task: Task) -> type[Workflow]:
        """The task's workflow class. User code is imported in a thread: that may take long."""

        def load() -> type[Workflow]:
            if task.reward_fn is not None:
                with suppress(LoadError):  # said when the workflow asks for it
                    REWARD_FUNCTIONS.get(task.reward_fn)
            return workflow_class(task.workflow)

        key = (task.workflow, task.reward_fn)
        if key not in self._classes:
            try:
                cls = await asyncio.to_thread(load)
            except LoadError:  # a few libraries can be imported in a main thread only
                cls = workflow_class(task.workflow)
            self._classes[key] = cls
        return self._classes[key]

    async def _repeatable(self, cls: type[Workflow], attempt: Attempt) -> Runs:
        """All runs by one call of one instance; a run without experience is an error.

        A workflow that left all run numbers at 0 gets them in order, one experience a run.
        Steps of one run stay together: they are told by their different ``eid.step``.

        Raises:
            Recalled: the batch is cut off; what is done of the one call is in nobody's hands.
            ValueError: an experience carries a number that is not of these runs.
        """
        started, runs = time.monotonic(), Runs()
        n, base = attempt.n, attempt.base
        workflow = await self._take(cls, attempt, base)
        workflow.set_repeat_times(n, base)
        try:
            found = await until_recalled(self._call(workflow, attempt))
        except PartialGroupError as partial:
            found = checked_experiences(partial.experiences, attempt.task, allow_empty=True)
            runs.errors = [as_run_error(error) for error in partial.errors]
        self._give_back(workflow)
        if {e.eid.run for e in found} == {0}:
            one_each = len(found) <= n and len({e.eid.step for e in found}) == 1
            for index, experience in enumerate(found):
                if n == 1 or one_each:
                    experience.eid.run = base if n == 1 else base + index
        by_run: dict[int, list[Experience]] = {}
        for experience in found:
            by_run.setdefault(experience.eid.run, []).append(experience)
        numbers = sorted(by_run)
        if not all(base <= run < base + n for run in numbers):
            raise ValueError(
                f"{len(found)} experiences carry run numbers {numbers}; this group "
                f"has runs {base} to {base + n - 1} (see Workflow.set_repeat_times)"
            )
        seconds = time.monotonic() - started
        for run in numbers:
            reduced = reduce_metrics(e.metrics or {} for e in by_run[run])
            runs.completed.append((by_run[run], {**reduced, TIME_RUN: seconds}))
        lost = n - len(numbers) - len(runs.errors)
        if lost > 0:
            message = (
                f"{n} runs were asked for and {len(found)} experiences came back, with the run "
                f"numbers {numbers}; a workflow with can_repeat returns experiences of "
                f"every run, with the numbers {base} to {base + n - 1} in eid.run"
            )
            runs.errors += [RunError(MISSING_RUN, message)] * lost
        return runs

    async def _one_by_one(self, cls: type[Workflow], attempt: Attempt) -> Runs:
        runs = Runs()
        for index in range(attempt.n):
            try:
                if index and attempt.left_s == 0:
                    raise TimeoutError("not started: the time of its attempt was over")
                single = self._single(cls, attempt, attempt.base + index)
                runs.completed.append(await until_recalled(single))
            except Exception as error:  # a failed run is data
                runs.errors.append(as_run_error(error, attempt.base + index))
                if not attempt.partial:
                    skipped = SiblingFailed("not started: an earlier run of its group failed")
                    later = range(attempt.base + index + 1, attempt.base + attempt.n)
                    runs.errors += [as_run_error(skipped, run) for run in later]
                    break
        return runs

    async def _together(self, cls: type[Workflow], attempt: Attempt) -> Runs:
        """Each run on its own instance; at the deadline, finished runs are kept."""
        numbers = range(attempt.base, attempt.base + attempt.n)
        children = [asyncio.ensure_future(self._single(cls, attempt, run)) for run in numbers]
        when = asyncio.ALL_COMPLETED if attempt.partial else asyncio.FIRST_EXCEPTION
        left = attempt.left_s
        # every run keeps the deadline by itself; this is for one that ignores its end
        limit = None if left is None else left + 2 * SETTLE_S
        late = await wait_recallable(children, limit, when)
        await stop(list(late))
        runs = Runs()
        for run, child in zip(numbers, children, strict=True):
            try:
                if child in late and was_recalled():
                    raise Recalled
                if child in late:
                    raise SiblingFailed("given up: another run of its group failed")
                if child.cancelled():
                    raise RunCancelled(f"{attempt.task.workflow} was cancelled from within")
                runs.completed.append(child.result())
            except Exception as error:  # a failed run is data
                runs.errors.append(as_run_error(error, run))
        return runs

    async def _single(
        self, cls: type[Workflow], attempt: Attempt, run: int
    ) -> tuple[list[Experience], dict[str, float]]:
        """Experiences and metrics of one run."""
        started = time.monotonic()
        workflow = await self._take(cls, attempt, run)
        found = await self._call(workflow, attempt)
        self._give_back(workflow)
        for experience in found:
            experience.eid.run = run
        reduced = reduce_metrics(e.metrics or {} for e in found)
        return found, {**reduced, TIME_RUN: time.monotonic() - started}

    async def _call(self, workflow: Workflow, attempt: Attempt) -> list[Experience]:
        """One run of one instance, where it may block without harm.

        Raises:
            TimeoutError: it was not done at the deadline, and was cancelled or is left alone.
            LoopBlocked: the same, and it had to be interrupted, because it did not await.
            RunCancelled: it cancelled itself.
            Exception: whatever it raised, or what :func:`checked_experiences` says.
        """
        left, what = attempt.left_s, f"workflow {attempt.task.workflow}"
        workflow.time_limit_s = left
        if not workflow.is_async:
            value = await run_in_thread(workflow.run, timeout_s=left, name=what)
            return checked_experiences(value, attempt.task)
        if self._mode == "multi-threading" and not workflow.can_repeat:
            value = await run_async_in_thread(workflow, timeout_s=left, name=what)
            return checked_experiences(value, attempt.task)

        async def run() -> Any:
            return await workflow.run_async()  # the call itself is user code, too

        return checked_experiences(await self._on_loop(run(), left, what), attempt.task)

    async def _on_loop(
        self, work: Coroutine[Any, Any, Any], left: Optional[float], what: str
    ) -> Any:
        """The result of user code that runs on the loop. Raises as :meth:`_call`."""
        child = user_task(work, None if left is None else time.monotonic() + left, what)
        try:
            done, _ = await asyncio.wait({child}, timeout=left)
        except asyncio.CancelledError:
            await stop([child])
            raise
        if not done:
            await stop([child])
            raise TimeoutError(f"{what} did not return within {left:g} s")
        if child.cancelled():
            raise RunCancelled(f"{what} was cancelled from within")
        try:
            return child.result()
        except Interrupted:
            raise LoopBlocked(
                f"{what} held the event loop without an await and was interrupted at its deadline;"
                " blocking code belongs into a thread (asyncio.to_thread) or into a workflow that "
                "is not async"
            ) from None

    # instances ------------------------------------------------------------------------
    async def _take(self, cls: type[Workflow], attempt: Attempt, run: int) -> Workflow:
        """An idle instance, reset to the task, or a new one; its history and state are empty.

        Constructor and reset are user code: they have the attempt's time, and may block where
        ``run`` may. Raises as :meth:`_call`.
        """
        task, idle, left = attempt.task, self._idle.get(cls), attempt.left_s
        known = idle.pop() if idle else None
        if known is not None and known.task.rollout_args != task.rollout_args:
            known = None
        model = self._make_model(task.rollout_args) if known is None else known.model

        def make() -> Workflow:
            if known is None:
                # by name: Trinity-RFT's workflows take nothing else
                return cls(task=task, model=model, auxiliary_models=self._auxiliary)
            model.clean_workflow_state()
            known.reset(task)
            return known

        async def made() -> Workflow:
            return make()

        what = f"{'making' if known is None else 'resetting'} workflow {task.workflow}"
        if cls.is_async:
            workflow = await self._on_loop(made(), left, what)
        else:
            workflow = await run_in_thread(make, timeout_s=left, name=what)
        attempt.lane.add_model(workflow.model)
        workflow.model.begin_run(f"{task.batch_id}/{task.task_id}/{run}")
        return workflow

    def _give_back(self, workflow: Workflow) -> None:
        """Keep a healthy instance for the next task; after a failure it is never reused."""
        idle = self._idle.setdefault(type(workflow), [])
        if workflow.can_reset and len(idle) < MAX_IDLE_INSTANCES:
            idle.append(workflow)


def checked_experiences(value: Any, task: Task, allow_empty: bool = False) -> list[Experience]:
    """``value`` if it is what a workflow must return. Raises TypeError or ValueError."""
    what = f"workflow {task.workflow!r} returned"
    if not isinstance(value, list) or not all(isinstance(e, Experience) for e in value):
        raise TypeError(f"{what} {type(value).__name__}, not a list of Experience")
    for experience in value:
        experience.check()
        for name in experience.metrics or {}:
            if not isinstance(name, str):
                raise TypeError(
                    f"{what} a metric named {name!r}, of type {type(name).__name__}; names of "
                    f"metrics are strings, for example {str(name)!r}"
                )
    if not value and not allow_empty:
        raise ValueError(f"{what} no experience")
    return value


def workflow_class(name: str) -> type[Workflow]:
    """The workflow class that ``name`` means. Raises LoadError when there is none."""
    cls = WORKFLOWS.get(name)
    if not (isinstance(cls, type) and issubclass(cls, Workflow)):
        raise LoadError(f"workflow {name!r} is {cls!r}, not a subclass of Workflow")
    return cls


# the outcome in the header of a payload -------------------------------------------------
def header_of(outcome: AttemptOutcome) -> dict[str, Any]:
    """As JSON-able values, for :func:`~trinity_dask.experience.schema.encode`."""
    status = outcome.status
    return {
        "completed_runs": status.completed_runs,
        "total_runs": status.total_runs,
        "metrics": status.metrics,
        "message": status.message,
        "errors": [[e.type, e.message, e.traceback, e.run] for e in outcome.errors],
        "seconds": outcome.seconds,
        "retryable": outcome.retryable,
        "runner": outcome.runner,
        "response_tokens": outcome.response_tokens,
    }


def outcome_of(payload: bytes) -> AttemptOutcome:
    """The outcome in a payload's header; the rows are not touched.

    Raises:
        ValueError: ``payload`` is none, or not of an attempt.
    """
    header = peek_header(payload)
    try:
        status = Status(
            *(header[k] for k in ("completed_runs", "total_runs", "metrics", "message"))
        )
        errors = tuple(RunError(*error) for error in header["errors"])
        more = header["seconds"], header["retryable"], header.get("runner", {})
        tokens = int(header.get("response_tokens", 0))
    except KeyError as error:
        raise ValueError(f"not the payload of a sub-task: {error!r}") from error
    return AttemptOutcome(status, errors, *more, tokens)

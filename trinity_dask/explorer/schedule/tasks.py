"""The scheduler's records: tasks, the sub-tasks they are split into, and their results.

Invariant: a task is finished exactly once, when its last sub-task is; each of its runs is
then counted as succeeded, failed or cancelled.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from trinity_dask.explorer.schedule.outcome import Outcome, RunError, Status

BatchId = int | str


def sort_batch_id(batch_id: BatchId) -> tuple[float, int]:
    """Order of batches: train step n, then the evals of step n (``"n/name"``), then n + 1.

    Ids that start with no number come last.
    """
    if isinstance(batch_id, int):
        return (batch_id, 0)
    digits = re.match(r"\d+", batch_id)
    return (int(digits.group()), 1) if digits else (math.inf, 1)


@dataclass(frozen=True)
class Counts:
    """Runs of a batch: every scheduled one ends in exactly one of the other three."""

    scheduled: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.scheduled + other.scheduled,
            self.succeeded + other.succeeded,
            self.failed + other.failed,
            self.cancelled + other.cancelled,
        )

    @property
    def in_flight(self) -> int:
        return self.scheduled - self.succeeded - self.failed - self.cancelled


@dataclass
class SubTask:
    """``repeat_times`` runs of a task from run ``run_id_base`` on: what is submitted at once.

    ``attempts`` counts executions that were held against it; ``group`` is the group of
    places where it may run.
    """

    task: TaskWrapper
    repeat_times: int
    run_id_base: int
    attempts: int = 0
    group: str = ""
    outcome: Optional[Outcome] = None
    payload: Optional[bytes] = None
    cancelled: bool = False

    @property
    def finished(self) -> bool:
        return self.outcome is not None or self.cancelled

    @property
    def name(self) -> str:
        """``batch/task/run``: how logs and runner states call it."""
        return f"{self.task.batch_id}/{self.task.task_id}/{self.run_id_base}"


@dataclass
class TaskWrapper:
    """A task of a batch, with what its sub-tasks have reported so far."""

    task: Any
    batch_id: BatchId
    task_id: BatchId
    total_runs: int
    is_eval: bool = False
    sub_tasks: list[SubTask] = field(default_factory=list)
    emitted: bool = False

    def split(self, max_repeat_times: Optional[int]) -> list[SubTask]:
        """Make the sub-tasks: at most ``max_repeat_times`` runs each (None: one sub-task)."""
        size = max_repeat_times or self.total_runs
        self.sub_tasks = [
            SubTask(self, min(size, self.total_runs - base), base)
            for base in range(0, self.total_runs, size)
        ]
        return self.sub_tasks

    def cut_missing(self, sub_task: SubTask, outcome: Outcome, error_type: str) -> Outcome:
        """Runs that failed with ``error_type`` were cut off: they become a cancelled sub-task.

        Returns the outcome of the others.
        """
        errors = tuple(e for e in outcome.errors if e.type != error_type)
        cut = len(outcome.errors) - len(errors)
        if cut == 0:
            return outcome
        base = sub_task.run_id_base + sub_task.repeat_times - cut
        self.sub_tasks.append(SubTask(self, cut, base, sub_task.attempts, cancelled=True))
        sub_task.repeat_times -= cut
        status = replace(outcome.status, total_runs=sub_task.repeat_times)
        return replace(outcome, status=status, errors=errors)

    def replace_missing(self, sub_task: SubTask, outcome: Outcome) -> SubTask:
        """Close ``sub_task`` with its finished runs; a new sub-task makes the others again.

        The new runs get numbers of their own, since nobody knows which numbers the missing
        ones had.
        """
        completed = outcome.status.completed_runs
        missing = sub_task.repeat_times - completed
        sub_task.repeat_times = completed
        status = Status(completed, completed, outcome.status.metrics)
        sub_task.outcome = Outcome(status, (), outcome.seconds)
        base = max(self.total_runs, *(s.run_id_base + s.repeat_times for s in self.sub_tasks))
        again = SubTask(self, missing, base, sub_task.attempts, sub_task.group)
        self.sub_tasks.append(again)
        return again

    @property
    def sub_task_num(self) -> int:
        return len(self.sub_tasks)

    @property
    def finished_sub_task_num(self) -> int:
        return sum(sub.finished for sub in self.sub_tasks)

    @property
    def finished(self) -> bool:
        return all(sub.finished for sub in self.sub_tasks)

    @property
    def completed_runs(self) -> int:
        return sum(sub.outcome.status.completed_runs for sub in self.sub_tasks if sub.outcome)

    @property
    def cancelled_runs(self) -> int:
        return sum(sub.repeat_times for sub in self.sub_tasks if sub.cancelled)

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [m for sub in self.sub_tasks if sub.outcome for m in sub.outcome.status.metrics]

    @property
    def experience_payloads(self) -> list[bytes]:
        return [sub.payload for sub in self.sub_tasks if sub.payload is not None]

    @property
    def errors(self) -> list[RunError]:
        return [e for sub in self.sub_tasks if sub.outcome for e in sub.outcome.errors]

    @property
    def first_error(self) -> Optional[RunError]:
        return next(iter(self.errors), None)

    @property
    def seconds(self) -> list[float]:
        return [sub.outcome.seconds for sub in self.sub_tasks if sub.outcome]


@dataclass(frozen=True)
class CompletedTaskResult:
    """A finished task: its status (one metrics dict) and the payloads of its sub-tasks."""

    batch_id: BatchId
    task_id: BatchId
    status: Status
    experience_payloads: list[bytes]


@dataclass
class RunningTaskState:
    """A sub-task that is being executed, where, and when it is given up.

    ``started`` and ``deadline`` are seconds of the scheduler's clock. ``runner_id`` is the
    lane of ``place`` that it occupies. With ``restart_runner_on_cancel`` a cancelled batch
    may have the runner worker restarted that executes this.
    """

    sub_task: SubTask
    place: str
    runner_id: int
    started: float
    deadline: float
    timeout_s: float
    restart_runner_on_cancel: bool = True
    ended: bool = False  # it has left its worker; only its payload is outstanding

    @property
    def task(self) -> TaskWrapper:
        return self.sub_task.task


@dataclass(frozen=True)
class BatchResult:
    """What a batch came to.

    ``statuses`` (one per finished task, in order of completion), ``payloads`` of all their
    sub-tasks, run ``counts`` of the whole batch so far, number of failed runs by error type,
    the first error, the number of attempts that were repeated, and whether nothing of the
    batch is outstanding.
    """

    batch_id: BatchId
    statuses: list[Status]
    payloads: list[bytes]
    counts: Counts
    failures: dict[str, int]
    first_error: Optional[RunError] = None
    retries: int = 0
    complete: bool = True


@dataclass
class BatchState:
    """A batch from its scheduling until its results are taken.

    Its ``deadline`` is set when its turn has come, so that waiting behind another batch
    costs it nothing.
    """

    batch_id: BatchId
    is_eval: bool = False
    deadline: Optional[float] = None
    tasks: list[TaskWrapper] = field(default_factory=list)
    unfinished_tasks: int = 0
    counts: Counts = Counts()
    results: list[CompletedTaskResult] = field(default_factory=list)
    completed_tasks: int = 0  # finished ones with runs that are of use
    failures: Counter[str] = field(default_factory=Counter)
    first_error: Optional[RunError] = None
    retries: int = 0
    cut: bool = False  # nothing of it is started any more

    @property
    def complete(self) -> bool:
        return self.unfinished_tasks == 0

    def take_results(self) -> BatchResult:
        """What is finished and was not taken yet."""
        results, self.results = self.results, []
        return BatchResult(
            self.batch_id,
            [result.status for result in results],
            [payload for result in results for payload in result.experience_payloads],
            self.counts,
            dict(self.failures),
            self.first_error,
            self.retries,
            self.complete,
        )

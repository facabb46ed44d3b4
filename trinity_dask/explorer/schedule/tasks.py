"""The scheduler's records: tasks, the sub-tasks they are split into, and how these ended.

Invariant: a task is finished exactly once, when its last sub-task is; each of its runs is
then counted as succeeded, failed or cancelled. A status is data: it is made where the runs
happened and travels unchanged.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Optional

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
class RunError:
    """Why a run failed: exception type, message, and the end of its traceback; which run it was,
    where that is known."""

    type: str
    message: str
    traceback: str = ""
    run: Optional[int] = None

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True)
class Status:
    """How ``total_runs`` runs of one task ended.

    ``metrics`` holds one dict per run (or per experience, for repeating workflows) until
    the runs of a task are put together; after that exactly one. ``message`` is None when
    ``ok``.
    """

    completed_runs: int
    total_runs: int
    metrics: list[dict[str, float]] = field(default_factory=list)
    message: Optional[str] = None

    @property
    def ok(self) -> bool:
        return self.completed_runs == self.total_runs


@dataclass(frozen=True)
class AttemptOutcome:
    """What one attempt at a sub-task reported.

    ``errors`` has one entry per failed run. ``retryable`` is false when another attempt
    must fail in the same way (a workflow that does not exist). ``runner`` is the last state of
    its lane (see ``WorkflowRunner.get_runner_state``), with ``worker`` (its name),
    ``abandoned_threads`` (of its process: given up, and still running) and ``loop_lag_s`` (the
    longest delay of the worker's event loop meanwhile). ``response_tokens``: what it sampled.
    """

    status: Status
    errors: tuple[RunError, ...] = ()
    seconds: float = 0.0
    retryable: bool = True
    runner: dict[str, Any] = field(default_factory=dict)
    response_tokens: int = 0

    @classmethod
    def all_failed(cls, n: int, error: RunError, retryable: bool = True) -> AttemptOutcome:
        """Of an attempt at ``n`` runs that came back with nothing."""
        return cls(Status(0, n, [], str(error)), (error,) * n, retryable=retryable)


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


@dataclass(frozen=True)
class FailedRun:
    """A run that counts as failed, by the error of its last attempt; ``earlier`` has one error of
    each attempt before. ``prompt`` and ``source`` are those of its task ("" where it has none)."""

    batch_id: BatchId
    task_id: BatchId
    run: Optional[int]
    attempts: int
    error: RunError
    earlier: tuple[str, ...] = ()
    prompt: str = ""
    source: str = ""


@dataclass
class SubTask:
    """``repeat_times`` runs of a task from run ``run_id_base`` on: what is submitted at once.

    ``attempts`` counts executions that were held against it; ``group`` is the group of
    workers on which it may run.
    """

    task: ScheduledTask
    repeat_times: int
    run_id_base: int
    attempts: int = 0
    group: str = ""
    outcome: Optional[AttemptOutcome] = None
    payload: Optional[bytes] = None
    cancelled: bool = False
    earlier: tuple[str, ...] = ()  # an error of each attempt that another one followed

    @property
    def finished(self) -> bool:
        return self.outcome is not None or self.cancelled

    @property
    def name(self) -> str:
        """``batch/task/run``: how logs and runner states call it."""
        return f"{self.task.batch_id}/{self.task.task_id}/{self.run_id_base}"


@dataclass
class ScheduledTask:
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

    def cut_missing(
        self, sub_task: SubTask, outcome: AttemptOutcome, error_type: str
    ) -> AttemptOutcome:
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

    def replace_missing(self, sub_task: SubTask, outcome: AttemptOutcome) -> SubTask:
        """Close ``sub_task`` with its finished runs; a new sub-task makes the others again.

        The new runs get numbers of their own, since nobody knows which numbers the missing
        ones had.
        """
        completed = outcome.status.completed_runs
        missing = sub_task.repeat_times - completed
        sub_task.repeat_times = completed
        status = Status(completed, completed, outcome.status.metrics)
        sub_task.outcome = AttemptOutcome(status, (), outcome.seconds)
        base = max(self.total_runs, *(s.run_id_base + s.repeat_times for s in self.sub_tasks))
        again = SubTask(self, missing, base, sub_task.attempts, sub_task.group)
        again.earlier = sub_task.earlier
        self.sub_tasks.append(again)
        return again


@dataclass
class RunningAttempt:
    """A sub-task that is being executed, and the lane of the worker that it occupies.

    ``started`` is in seconds of the scheduler's clock; ``timeout_s`` later its time is over.
    """

    sub_task: SubTask
    worker: str
    lane: int
    started: float
    timeout_s: float
    ended: bool = False  # it has left its worker; only its payload is outstanding
    asked: bool = False  # its worker, whether it has begun
    queued: bool = False  # it had not when its worker was asked: it does nothing there yet


@dataclass(frozen=True)
class BatchResult:
    """What a batch came to.

    ``statuses`` (one per finished task, in order of completion), ``payloads`` of all their
    sub-tasks, run ``counts`` of the whole batch so far, number of failed runs by error type,
    the first error, the number of attempts that were repeated, whether nothing of the
    batch is outstanding, and the first of the failed runs.
    """

    batch_id: BatchId
    statuses: list[Status]
    payloads: list[bytes]
    counts: Counts
    failures: dict[str, int]
    first_error: Optional[RunError] = None
    retries: int = 0
    complete: bool = True
    failed_runs: tuple[FailedRun, ...] = ()


@dataclass
class BatchState:
    """A batch from its scheduling until its results are taken.

    Its ``deadline`` is set when its turn has come, so that waiting behind another batch
    costs it nothing.
    """

    batch_id: BatchId
    is_eval: bool = False
    deadline: Optional[float] = None
    tasks: list[ScheduledTask] = field(default_factory=list)
    unfinished_tasks: int = 0
    counts: Counts = Counts()
    statuses: list[Status] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    completed_tasks: int = 0  # finished ones with runs that are of use
    failures: Counter[str] = field(default_factory=Counter)
    first_error: Optional[RunError] = None
    retries: int = 0
    failed_runs: list[FailedRun] = field(default_factory=list)
    cut: bool = False  # nothing of it is started any more

    @property
    def complete(self) -> bool:
        return self.unfinished_tasks == 0

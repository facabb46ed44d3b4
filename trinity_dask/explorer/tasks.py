"""The scheduler's records: tasks, the sub-tasks they are split into, and their results.

Invariant: a task is finished exactly once, when its last sub-task is; each of its runs is
then counted as succeeded, failed or cancelled.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Optional

from trinity_dask.explorer.status import Outcome, RunError, Status

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
    """``repeat_times`` runs of a task from run ``run_id_base`` on: what is submitted at once."""

    task: TaskWrapper
    repeat_times: int
    run_id_base: int
    attempts: int = 0
    outcome: Optional[Outcome] = None
    payload: Optional[bytes] = None
    cancelled: bool = False

    @property
    def finished(self) -> bool:
        return self.outcome is not None or self.cancelled


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
    def errors(self) -> list[RunError]:
        return [e for sub in self.sub_tasks if sub.outcome for e in sub.outcome.errors]

    @property
    def seconds(self) -> list[float]:
        return [sub.outcome.seconds for sub in self.sub_tasks if sub.outcome]


@dataclass(frozen=True)
class CompletedTaskResult:
    """A finished task: its status (one metrics dict) and the payloads of its sub-tasks."""

    batch_id: BatchId
    task_id: BatchId
    status: Status
    payloads: list[bytes]


@dataclass(frozen=True)
class RunningTaskState:
    """A sub-task that is being executed, and when it is given up (clock of the scheduler)."""

    sub_task: SubTask
    started: float
    deadline: float


@dataclass
class BatchState:
    """A batch from its scheduling until its results are taken."""

    batch_id: BatchId
    deadline: float
    is_eval: bool = False
    tasks: list[TaskWrapper] = field(default_factory=list)
    unfinished_tasks: int = 0
    counts: Counts = Counts()
    results: list[CompletedTaskResult] = field(default_factory=list)
    emitted: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first_error: Optional[RunError] = None
    retries: int = 0

    @property
    def complete(self) -> bool:
        return self.unfinished_tasks == 0


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

"""The scheduler's decisions: events in, instructions out; no I/O, no clock, no Dask.

Invariant: every run of every scheduled task ends in exactly one of succeeded, failed and
cancelled; at most ``slots`` attempts execute at any time; an event about an attempt that is
not out any more (it was cancelled, lost or given up) changes nothing.

Two deadlines, kept apart: that of an attempt costs the attempt, and a retry still has its
own full time; that of a batch cancels what is left of the batch.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

from trinity_dask.explorer.metrics import task_metrics
from trinity_dask.explorer.status import Outcome, RunError, Status
from trinity_dask.explorer.tasks import (
    BatchId,
    BatchResult,
    BatchState,
    CompletedTaskResult,
    Counts,
    RunningTaskState,
    SubTask,
    TaskWrapper,
    sort_batch_id,
)

WORKER_LOST = "WorkerLost"
ATTEMPT_TIMEOUT = "AttemptTimeout"


@dataclass(frozen=True)
class SchedulePolicy:
    """The rules. Times in seconds.

    ``attempt_timeout_s`` is enforced where the attempt runs; ``attempt_slack_s`` later the
    scheduler gives up an attempt that did not even report that.
    """

    max_attempts: int = 3
    attempt_timeout_s: float = 1800.0
    attempt_slack_s: float = 30.0
    batch_timeout_s: float = 5460.0
    max_repeat_times_per_runner: Optional[int] = None
    keep_partial: bool = True


@dataclass(frozen=True)
class Submit:
    """Execute a sub-task; report with the attempt's number."""

    attempt_id: int
    sub_task: SubTask


@dataclass(frozen=True)
class Cancel:
    """Stop an attempt; its report, should it still come, is ignored."""

    attempt_id: int


@dataclass(frozen=True)
class Progress:
    """A task of the batch was finished; ``complete`` when it was the last one."""

    batch_id: BatchId
    complete: bool


Instruction = Submit | Cancel | Progress


class SchedulerState:
    """Batches, their sub-tasks, and the attempts that are out.

    Every event method takes ``now`` (seconds of any steady clock) and returns the
    instructions that follow from the event, in the order to carry them out.
    """

    def __init__(self, policy: SchedulePolicy, slots: int) -> None:
        self.policy = policy
        self.slots = slots
        self.batches: dict[BatchId, BatchState] = {}
        self.running: dict[int, RunningTaskState] = {}
        self._ended: set[int] = set()  # of those running: only their payload is outstanding
        self._pending: dict[BatchId, deque[SubTask]] = {}
        self._order: list[tuple[tuple[float, int], int, BatchId]] = []
        self._attempt_ids = itertools.count(1)
        self._arrivals = itertools.count()

    # events ---------------------------------------------------------------------------
    def schedule(self, batch_id: BatchId, tasks: Sequence[Any], now: float) -> list[Instruction]:
        """Tasks join a batch (made when new). A task has ``repeat_times`` and ``is_eval``."""
        if not tasks:
            return []
        batch = self.batches.get(batch_id) or self._new_batch(batch_id, tasks[0].is_eval, now)
        for task in tasks:
            wrapper = TaskWrapper(
                task, batch_id, len(batch.tasks), task.repeat_times, batch.is_eval
            )
            batch.tasks.append(wrapper)
            self._pending[batch_id].extend(wrapper.split(self.policy.max_repeat_times_per_runner))
        batch.unfinished_tasks += len(tasks)
        batch.counts += Counts(scheduled=sum(task.repeat_times for task in tasks))
        return self._fill(now)

    def ended(self, attempt_ids: Iterable[int], now: float) -> list[Instruction]:
        """Attempts have left their workers; their slots are free while payloads are fetched."""
        self._ended |= self.running.keys() & set(attempt_ids)
        return self._fill(now)

    def finished(
        self, attempt_id: int, outcome: Outcome, payload: Optional[bytes], now: float
    ) -> list[Instruction]:
        """An attempt reported; its payload is kept if the outcome is final."""
        attempt = self._out(attempt_id)
        if attempt is None:
            return []
        sub_task = attempt.sub_task
        if self._try_again(sub_task, outcome):
            self._pending[sub_task.task.batch_id].appendleft(sub_task)
            self.batches[sub_task.task.batch_id].retries += 1
            return self._fill(now)
        sub_task.outcome = outcome
        sub_task.payload = payload if outcome.status.completed_runs else None
        return [*self._fill(now), *self._settle(sub_task.task)]

    def lost(self, attempt_id: int, error: RunError, now: float) -> list[Instruction]:
        """The worker of an attempt died or the attempt vanished: costs one attempt."""
        attempt = self.running.get(attempt_id)
        if attempt is None:
            return []
        lost = Outcome.lost(attempt.sub_task.repeat_times, error)
        return self.finished(attempt_id, lost, None, now)

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed: attempts and batches whose deadlines are over are given up."""
        instructions: list[Instruction] = []
        for batch in [b for b in self.batches.values() if not b.complete and b.deadline <= now]:
            instructions += self.cancel_unfinished(batch.batch_id, now)
        for attempt_id, attempt in list(self.running.items()):
            if attempt.deadline <= now:
                limit = self.policy.attempt_timeout_s
                error = RunError(ATTEMPT_TIMEOUT, f"no report {limit:g} s after its start")
                instructions += [Cancel(attempt_id), *self.lost(attempt_id, error, now)]
        return instructions

    def set_slots(self, slots: int, now: float) -> list[Instruction]:
        """Workers came or went. Attempts already out are not touched."""
        self.slots = slots
        return self._fill(now)

    def cancel_unfinished(self, batch_id: BatchId, now: float) -> list[Instruction]:
        """Give up what is not finished; finished runs of cut tasks are kept as results."""
        batch = self.batches.get(batch_id)
        if batch is None or batch.complete:
            return []
        self._drop_pending(batch_id)
        instructions: list[Instruction] = []
        for attempt_id, attempt in list(self.running.items()):
            if attempt.sub_task.task.batch_id == batch_id:
                self._out(attempt_id)
                instructions.append(Cancel(attempt_id))
        for wrapper in batch.tasks:
            if not wrapper.emitted:
                for sub_task in wrapper.sub_tasks:
                    sub_task.cancelled = sub_task.outcome is None
                instructions += self._settle(wrapper)
        return [*instructions, *self._fill(now)]

    def discard(self, batch_id: BatchId, now: float) -> tuple[Counts, list[Instruction]]:
        """Cancel and forget a batch; returns its final counts."""
        instructions = self.cancel_unfinished(batch_id, now)
        batch = self.batches.get(batch_id)
        counts = batch.counts if batch else Counts()
        self._forget(batch_id)
        return counts, instructions

    # queries --------------------------------------------------------------------------
    def drain(self, batch_id: BatchId) -> BatchResult:
        """Take the results of a batch; a complete batch is forgotten. Unknown: empty."""
        batch = self.batches.get(batch_id)
        if batch is None:
            return BatchResult(batch_id, [], [], Counts(), {})
        results, batch.results = batch.results, []
        if batch.complete:
            self._forget(batch_id)
        return BatchResult(
            batch_id,
            [result.status for result in results],
            [payload for result in results for payload in result.payloads],
            batch.counts,
            dict(batch.failures),
            batch.first_error,
            batch.retries,
            batch.complete,
        )

    def next_deadline(self) -> Optional[float]:
        """When :meth:`tick` is due next, or None."""
        deadlines = [attempt.deadline for attempt in self.running.values()]
        deadlines += [batch.deadline for batch in self.batches.values() if not batch.complete]
        return min(deadlines, default=None)

    @property
    def busy(self) -> int:
        """Slots in use."""
        return len(self.running) - len(self._ended)

    @property
    def pending_count(self) -> int:
        return sum(len(queue) for queue in self._pending.values())

    # ----------------------------------------------------------------------------------
    def _new_batch(self, batch_id: BatchId, is_eval: bool, now: float) -> BatchState:
        batch = BatchState(batch_id, now + self.policy.batch_timeout_s, is_eval)
        self.batches[batch_id] = batch
        self._pending[batch_id] = deque()
        insort(self._order, (sort_batch_id(batch_id), next(self._arrivals), batch_id))
        return batch

    def _fill(self, now: float) -> list[Instruction]:
        """Start sub-tasks while slots are free: batches in order, first come in a batch."""
        instructions: list[Instruction] = []
        free = self.slots - self.busy
        for _, _, batch_id in self._order:
            queue = self._pending[batch_id]
            while queue and free > 0:
                instructions.append(self._start(queue.popleft(), now))
                free -= 1
        return instructions

    def _out(self, attempt_id: int) -> Optional[RunningTaskState]:
        """Take an attempt off the books; None when it is not on them."""
        self._ended.discard(attempt_id)
        return self.running.pop(attempt_id, None)

    def _start(self, sub_task: SubTask, now: float) -> Submit:
        attempt_id = next(self._attempt_ids)
        sub_task.attempts += 1
        limit = self.policy.attempt_timeout_s + self.policy.attempt_slack_s
        self.running[attempt_id] = RunningTaskState(sub_task, now, now + limit)
        return Submit(attempt_id, sub_task)

    def _try_again(self, sub_task: SubTask, outcome: Outcome) -> bool:
        status = outcome.status
        good_enough = status.ok or (self.policy.keep_partial and status.completed_runs > 0)
        left = sub_task.attempts < self.policy.max_attempts
        return left and outcome.retryable and not good_enough

    def _settle(self, wrapper: TaskWrapper) -> list[Instruction]:
        """Emit the task if its last sub-task has ended."""
        if wrapper.emitted or not wrapper.finished:
            return []
        wrapper.emitted = True
        batch = self.batches[wrapper.batch_id]
        kept = self._kept_runs(wrapper)
        cancelled = wrapper.cancelled_runs
        failed = wrapper.total_runs - kept - cancelled
        batch.counts += Counts(succeeded=kept, failed=failed, cancelled=cancelled)
        self._note_failures(batch, wrapper, failed)
        if kept or not cancelled:
            batch.results.append(_result(wrapper, kept))
            batch.emitted += 1
        _release(wrapper)
        batch.unfinished_tasks -= 1
        return [Progress(batch.batch_id, batch.complete)]

    def _kept_runs(self, wrapper: TaskWrapper) -> int:
        completed = wrapper.completed_runs
        if completed < wrapper.total_runs and not self.policy.keep_partial:
            return 0
        return completed

    @staticmethod
    def _note_failures(batch: BatchState, wrapper: TaskWrapper, failed: int) -> None:
        errors = wrapper.errors[:failed]
        batch.failures.update(error.type for error in errors)
        if failed > len(errors):  # successful runs of a group that was dropped as a whole
            batch.failures["PartialGroupDropped"] += failed - len(errors)
        if errors and batch.first_error is None:
            batch.first_error = errors[0]

    def _drop_pending(self, batch_id: BatchId) -> None:
        if batch_id in self._pending:
            self._pending[batch_id].clear()

    def _forget(self, batch_id: BatchId) -> None:
        self.batches.pop(batch_id, None)
        self._pending.pop(batch_id, None)
        self._order = [entry for entry in self._order if entry[2] != batch_id]


def _result(wrapper: TaskWrapper, kept: int) -> CompletedTaskResult:
    runs = [m for sub in wrapper.sub_tasks if sub.outcome for m in sub.outcome.status.metrics]
    metrics = task_metrics(runs if kept else [], wrapper.seconds, wrapper.is_eval)
    status = Status(kept, wrapper.total_runs, [metrics], _message(wrapper, kept))
    payloads = [sub.payload for sub in wrapper.sub_tasks if sub.payload is not None]
    return CompletedTaskResult(wrapper.batch_id, wrapper.task_id, status, payloads if kept else [])


def _message(wrapper: TaskWrapper, kept: int) -> Optional[str]:
    if kept == wrapper.total_runs:
        return None
    summary = f"{wrapper.completed_runs}/{wrapper.total_runs} runs completed successfully"
    errors = wrapper.errors
    return f"{summary}; first error: {errors[0]}" if errors else summary


def _release(wrapper: TaskWrapper) -> None:
    """A finished task keeps no payloads: its result owns them now."""
    wrapper.task = None
    for sub_task in wrapper.sub_tasks:
        sub_task.payload = None
        if sub_task.outcome is not None:
            status = replace(sub_task.outcome.status, metrics=[])
            sub_task.outcome = replace(sub_task.outcome, status=status, errors=())

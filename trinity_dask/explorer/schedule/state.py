"""The scheduler's decisions: events in, instructions out; no I/O, no clock, no Dask.

Invariant: every run of every scheduled task ends in exactly one of succeeded, failed and
cancelled; a worker never executes more sub-tasks than it has lanes; an event about an attempt
that is not out any more (it was cancelled, lost or given up) changes nothing.

Two deadlines, kept apart: that of an attempt costs the attempt, and a retry still has its
own full time; that of a batch cancels what is left of the batch. An attempt's time runs from when
it was handed to its worker; where it may have waited there, the worker is asked before it is over.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Optional

from trinity_dask.explorer.metrics import task_metrics
from trinity_dask.explorer.schedule.pending import Pending
from trinity_dask.explorer.schedule.policy import (
    REPLACE,
    Ask,
    Cancel,
    Emit,
    Instruction,
    Pace,
    Recall,
    Restart,
    SchedulePolicy,
    Submit,
)
from trinity_dask.explorer.schedule.tasks import (
    AttemptOutcome,
    BatchId,
    BatchResult,
    BatchState,
    Counts,
    FailedRun,
    RunError,
    RunningAttempt,
    ScheduledTask,
    Status,
    SubTask,
)
from trinity_dask.explorer.schedule.workers import GROUPS, ROLLOUT, RUNNER, Workers, no_worker

WORKER_LOST = "WorkerLost"
ATTEMPT_TIMEOUT = "AttemptTimeout"
RECALLED = "Recalled"  # the error of a run that was not finished when its batch was cut off
GROUP_DROPPED = "PartialGroupDropped"
SPARE_DEADLINES = 64
ASK_S = 15.0  # for a worker to say whether an attempt has begun


class SchedulerState:
    """Batches, their sub-tasks, the workers, and the attempts that are out.

    Every event method takes ``now`` (seconds of any steady clock) and returns the
    instructions that follow from the event, in the order to carry them out. ``limit`` bounds
    the sub-tasks in execution over all workers (None: their lanes alone do).
    """

    def __init__(self, policy: SchedulePolicy, limit: Optional[int] = None) -> None:
        self.policy = policy
        self.limit = limit
        self.pace = Pace(policy)
        self.workers = Workers()
        self.batches: dict[BatchId, BatchState] = {}
        self.running: dict[int, RunningAttempt] = {}
        self.pending = Pending()
        self._deadlines = _Deadlines()
        self._look_again: Optional[float] = None
        self._attempt_ids = itertools.count(1)

    # events: batches ------------------------------------------------------------------
    def schedule(
        self,
        batch_id: BatchId,
        tasks: Sequence[Any],
        now: float,
        group_of: Callable[[Any], str] = lambda task: ROLLOUT,
    ) -> list[Instruction]:
        """Tasks join a batch (made when new). A task has ``repeat_times`` and ``is_eval``.

        ``group_of`` says where a task may run; a task of group ``""`` waits for
        :meth:`route`.
        """
        if not tasks:
            return []
        batch = self.batches.get(batch_id)
        if batch is None:
            batch = self.batches[batch_id] = BatchState(batch_id, tasks[0].is_eval)
        for task in tasks:
            number, n = len(batch.tasks), task.repeat_times
            scheduled = ScheduledTask(task, batch_id, number, n, batch.is_eval)
            batch.tasks.append(scheduled)
            sub_tasks = scheduled.split(self.policy.max_repeat_times_per_runner)
            self.pending.extend(batch_id, sub_tasks, group_of(task))
        batch.unfinished_tasks += len(tasks)
        batch.counts += Counts(scheduled=sum(task.repeat_times for task in tasks))
        return self._fill(now)

    def route(self, workflow: str, group: str, now: float) -> list[Instruction]:
        """It has become known where the sub-tasks of a workflow may run."""
        self.pending.route(workflow, group)
        return self._fill(now)

    def cancel_unfinished(
        self,
        batch_id: BatchId,
        now: float,
        partial: Optional[bool] = None,
        restart: bool = False,
        recall: bool = False,
    ) -> list[Instruction]:
        """Give up what is not finished.

        Finished runs of cut tasks are kept as results unless ``partial`` is False (None: as
        the policy says). With ``restart``, runner workers that execute one of them are
        killed, since a blocking workflow does not notice that it was cancelled. With
        ``recall``, attempts at several runs are not cancelled but asked for what they have
        finished; a later call cancels those that did not answer.
        """
        batch = self.batches.get(batch_id)
        if batch is None or batch.complete:
            return []
        if partial is None:
            partial = self.policy.return_partial_tasks
        batch.cut = True
        self.pending.clear(batch_id)
        recall = recall and partial and self.policy.keep_partial
        instructions: list[Instruction] = []
        blocked: dict[str, None] = {}  # an ordered set
        for attempt_id, attempt in list(self.running.items()):
            if attempt.sub_task.task.batch_id != batch_id:
                continue
            if recall and (attempt.ended or attempt.sub_task.repeat_times > 1):
                instructions.append(Recall(attempt_id))
                continue
            self._out(attempt_id)
            instructions.append(Cancel(attempt_id))
            if restart and self._may_block(attempt):
                blocked[attempt.worker] = None
        for worker in blocked:
            instructions += self._restart(worker)
        awaited = {id(attempt.sub_task) for attempt in self.running.values()}
        for task in batch.tasks:
            if not task.emitted:
                for sub_task in task.sub_tasks:
                    sub_task.cancelled |= sub_task.outcome is None and id(sub_task) not in awaited
                instructions += self._settle(task, partial)
        return [*instructions, *self._fill(now)]

    def discard(
        self, batch_id: BatchId, now: float, restart: bool = False
    ) -> tuple[Counts, list[Instruction]]:
        """Cancel and forget a batch; returns its final counts."""
        instructions = self.cancel_unfinished(batch_id, now, restart=restart)
        batch = self.batches.pop(batch_id, None)
        self.pending.forget(batch_id)
        return batch.counts if batch else Counts(), instructions

    # events: attempts -----------------------------------------------------------------
    def started(self, attempt_ids: Iterable[int], now: float) -> list[Instruction]:
        """Attempts were handed to their workers: their time runs from now on."""
        for attempt_id in attempt_ids:
            attempt = self.running.get(attempt_id)
            if attempt is not None and not attempt.ended:
                attempt.started = now
                due = now + attempt.timeout_s + self.policy.attempt_slack_s
                self._deadlines.set(attempt_id, due)
        return []

    def begun(self, ran_s: Mapping[int, Optional[float]], now: float) -> list[Instruction]:
        """What a worker says of attempts: for how many seconds each has run; None: not begun."""
        for attempt_id, seconds in ran_s.items():
            attempt = self.running.get(attempt_id)
            if attempt is None or attempt.ended:
                continue
            attempt.queued = seconds is None
            limit = attempt.timeout_s + self.policy.attempt_slack_s
            left = limit if seconds is None else limit - seconds
            attempt.asked = left <= 0  # or it is asked again, when that is over
            attempt.started = now if seconds is None else now - seconds
            self._deadlines.set(attempt_id, now + max(left, 0.0))
        return self.tick(now)

    def ended(self, attempt_ids: Iterable[int], now: float) -> list[Instruction]:
        """Attempts have left their workers; their lanes are free while payloads are fetched."""
        for attempt_id in attempt_ids:
            attempt = self.running.get(attempt_id)
            if attempt is not None and not attempt.ended:
                attempt.ended = True
                self._deadlines.set(attempt_id, now + self.policy.fetch_timeout_s)
                self.workers[attempt.worker].give_back(attempt.lane)
        return self._fill(now)

    def finished(
        self, attempt_id: int, outcome: AttemptOutcome, payload: Optional[bytes], now: float
    ) -> list[Instruction]:
        """An attempt reported; its payload is kept if the outcome is final.

        A runner worker on which it left user code running, which only the end of its process
        can stop, is restarted; a rollout worker never, its engine is worth more.
        """
        attempt = self._out(attempt_id)
        if attempt is None:
            return []
        worker = self.workers[attempt.worker]
        worker.response_tokens += outcome.response_tokens
        if outcome.status.ok:
            worker.observe(outcome.seconds)
        instructions = self._conclude(attempt.sub_task, outcome, payload)
        if outcome.runner.get("abandoned_threads", 0) > 0 and worker.group == RUNNER and worker.up:
            instructions += self._restart(attempt.worker)
        return [*self._fill(now), *instructions]

    def failed(self, attempt_id: int, error: RunError, now: float) -> list[Instruction]:
        """An attempt vanished or could not run: costs one attempt."""
        attempt = self._out(attempt_id)
        if attempt is None:
            return []
        lost = AttemptOutcome.all_failed(attempt.sub_task.repeat_times, error)
        instructions = self._conclude(attempt.sub_task, lost, None)
        return [*self._fill(now), *instructions]

    # events: workers ------------------------------------------------------------------
    def worker_up(
        self, name: str, capacity: int, now: float, group: str = ROLLOUT
    ) -> list[Instruction]:
        """A worker takes ``capacity`` sub-tasks at a time from now on."""
        instructions = self.worker_lost(name, now)
        self.workers.up(name, capacity, group)
        return [*instructions, *self._fill(now)]

    def worker_lost(self, name: str, now: float) -> list[Instruction]:
        """A worker died: costs each sub-task on it one attempt."""
        self.workers.down(name)
        instructions: list[Instruction] = []
        for attempt_id in self._on(name):
            sub_task = self.running[attempt_id].sub_task
            self._out(attempt_id)
            error = RunError(WORKER_LOST, f"the worker of {name} died")
            lost = AttemptOutcome.all_failed(sub_task.repeat_times, error)
            instructions += [Cancel(attempt_id), *self._conclude(sub_task, lost, None)]
        return [*instructions, *self._fill(now)]

    def worker_left(self, name: str, now: float) -> list[Instruction]:
        """A worker is about to leave: its sub-tasks start again elsewhere, at no cost to them.
        What has ended there is still fetched."""
        self.workers.down(name)
        instructions: list[Instruction] = []
        for attempt_id in self._on(name):
            attempt = self.running[attempt_id]
            if attempt.ended:
                continue
            self._out(attempt_id)
            instructions.append(Cancel(attempt_id))
            sub_task = attempt.sub_task
            if self.batches[sub_task.task.batch_id].cut:
                error = RunError(WORKER_LOST, f"the worker of {name} left")
                lost = AttemptOutcome.all_failed(sub_task.repeat_times, error)
                instructions += self._conclude(sub_task, lost, None)
            else:
                sub_task.attempts -= 1
                self.pending.push_front(sub_task)
        return [*instructions, *self._fill(now)]

    def set_limit(self, limit: Optional[int], now: float) -> list[Instruction]:
        """Attempts already out are not touched."""
        self.limit = limit
        return self._fill(now)

    # events: time ---------------------------------------------------------------------
    def tick(self, now: float) -> list[Instruction]:
        """Time has passed: attempts and batches whose deadlines are over are given up."""
        instructions: list[Instruction] = []
        for batch in list(self.batches.values()):
            if batch.deadline is not None and batch.deadline <= now and not batch.complete:
                instructions += self._cut(batch, now)
        for attempt_id in self._deadlines.over(now):
            attempt = self.running.get(attempt_id)
            if attempt is not None and self._may_wait(attempt):
                attempt.asked = True
                self._deadlines.set(attempt_id, now + ASK_S)
                instructions.append(Ask(attempt_id))
            elif attempt is not None:  # not given up with a worker that was restarted
                # it did not even report that its time was over
                what = f"no report {attempt.timeout_s:g} s after its start; it was stopped"
                self._out(attempt_id)
                instructions.append(Cancel(attempt_id))
                if self._may_block(attempt):
                    instructions += self._restart(attempt.worker)
                error = RunError(ATTEMPT_TIMEOUT, what)
                lost = AttemptOutcome.all_failed(attempt.sub_task.repeat_times, error)
                instructions += self._conclude(attempt.sub_task, lost, None)
        return [*instructions, *self._fill(now)]

    def next_deadline(self) -> Optional[float]:
        """When :meth:`tick` is due next, or None."""
        dues = [b.deadline for b in self.batches.values() if not b.complete and b.deadline]
        dues += [due for due in (self._deadlines.first(), self._look_again) if due is not None]
        return min(dues, default=None)

    # queries --------------------------------------------------------------------------
    def enough(self, batch_id: BatchId, min_num: Optional[int] = None) -> bool:
        """Whether nothing of a batch is outstanding (an unknown one: so it is), or ``min_num``
        tasks (None: never) are finished with at least one good run."""
        batch = self.batches.get(batch_id)
        if batch is None or batch.complete:
            return True
        return min_num is not None and batch.completed_tasks >= min_num

    def drain(self, batch_id: BatchId) -> BatchResult:
        """Take the results of a batch; a complete batch is forgotten. Unknown: empty."""
        batch = self.batches.get(batch_id)
        if batch is None:
            return BatchResult(batch_id, [], [], Counts(), {})
        if batch.complete:
            # one that over-rollout cut short has told how long its sub-tasks take, too
            self.pace.completed_steps += not batch.is_eval and batch.counts.succeeded > 0
            del self.batches[batch_id]
            self.pending.forget(batch_id)
        statuses, batch.statuses = batch.statuses, []
        payloads, batch.payloads = batch.payloads, []
        return BatchResult(
            batch_id,
            statuses,
            payloads,
            batch.counts,
            dict(batch.failures),
            batch.first_error,
            batch.retries,
            batch.complete,
            tuple(batch.failed_runs),
        )

    @property
    def busy(self) -> int:
        """Lanes in use."""
        return sum(len(worker.running) for worker in self.workers)

    # starting -------------------------------------------------------------------------
    def _fill(self, now: float) -> list[Instruction]:
        """Start sub-tasks while lanes are free."""
        instructions: list[Instruction] = []
        room = sum(worker.free for worker in self.workers)
        if self.limit is not None:
            room = min(room, self.limit - self.busy)
        self._look_again = None
        for group in GROUPS:
            while room > 0 and (waiting := self.pending.count(group)):
                worker = self.workers.choose(group, waiting, now)
                if worker is None:
                    self._look_again = self.workers.look_again(group, now)
                    break
                sub_task = self.pending.pop(group)
                assert sub_task is not None
                instructions.append(self._start(sub_task, worker.name, now))
                room -= 1
        # the time of the first batch in order runs, whether anything of it runs or not
        for batch_id in self.pending.batches():
            batch = self.batches[batch_id]
            if not batch.complete:
                if batch.deadline is None:
                    batch.deadline = now + self.policy.batch_timeout_s
                break
        return instructions

    def _start(self, sub_task: SubTask, worker: str, now: float) -> Submit:
        attempt_id = next(self._attempt_ids)
        sub_task.attempts += 1
        batch = self.batches[sub_task.task.batch_id]
        if batch.deadline is None:
            batch.deadline = now + self.policy.batch_timeout_s
        limit = self.pace.limit_s(batch.is_eval)
        lane = self.workers[worker].take(now)
        self.running[attempt_id] = RunningAttempt(sub_task, worker, lane, now, limit)
        self._deadlines.set(attempt_id, now + limit + self.policy.attempt_slack_s)
        return Submit(attempt_id, sub_task, worker, lane, limit)

    # ending ---------------------------------------------------------------------------
    def _out(self, attempt_id: int) -> Optional[RunningAttempt]:
        """Take an attempt off the books; None when it is not on them."""
        attempt = self.running.pop(attempt_id, None)
        self._deadlines.drop(attempt_id)
        if attempt is not None and not attempt.ended:  # an ended one's lane may be another's now
            self.workers[attempt.worker].give_back(attempt.lane)
        return attempt

    def _on(self, worker: str) -> list[int]:
        """Attempts on a worker, last first, so that they queue up in their order."""
        return [a for a, attempt in reversed(self.running.items()) if attempt.worker == worker]

    def _conclude(
        self, sub_task: SubTask, outcome: AttemptOutcome, payload: Optional[bytes]
    ) -> list[Instruction]:
        """Another attempt, or the end of the sub-task."""
        batch = self.batches[sub_task.task.batch_id]
        if not batch.is_eval:
            self.pace.sub_task_done(outcome)
        if batch.cut:
            outcome = sub_task.task.cut_missing(sub_task, outcome, RECALLED)
        elif self.policy.tries_again(sub_task, outcome):
            batch.retries += 1
            sub_task.earlier += tuple(map(str, outcome.errors[-1:]))
            if outcome.status.completed_runs and self.policy.partial_group == REPLACE:
                sub_task.payload = payload
                sub_task = sub_task.task.replace_missing(sub_task, outcome)
            self.pending.push_front(sub_task)
            return []
        sub_task.outcome = outcome
        sub_task.payload = payload if outcome.status.completed_runs else None
        return self._settle(sub_task.task, True)

    def _settle(self, task: ScheduledTask, keep_cut: bool) -> list[Instruction]:
        """Emit a task if its last sub-task has ended: its runs are counted, its result joins
        its batch, and its sub-tasks hold no payloads any more.

        ``keep_cut``: the finished runs of a group that was cut off are of use.
        """
        if task.emitted or not all(sub.finished for sub in task.sub_tasks):
            return []
        task.emitted = True
        batch, total = self.batches[task.batch_id], task.total_runs
        outcomes = [sub.outcome for sub in task.sub_tasks if sub.outcome is not None]
        errors = [error for outcome in outcomes for error in outcome.errors]
        kept = completed = sum(outcome.status.completed_runs for outcome in outcomes)
        cancelled = sum(sub.repeat_times for sub in task.sub_tasks if sub.cancelled)
        if kept < total and not (self.policy.keep_partial and (keep_cut or not cancelled)):
            kept = 0
        if cancelled:  # finished runs of a cut group that is not wanted go the way of the rest
            cancelled += completed - kept
        failed = total - kept - cancelled
        batch.counts += Counts(succeeded=kept, failed=failed, cancelled=cancelled)
        batch.failures.update(error.type for error in errors[:failed])
        if failed > len(errors):  # successful runs of a group that was dropped as a whole
            batch.failures[GROUP_DROPPED] += failed - len(errors)
        self._remember_failed(batch, task, failed)
        if failed and errors and batch.first_error is None:
            batch.first_error = errors[0]
        if kept or not cancelled:
            runs = [m for outcome in outcomes for m in outcome.status.metrics if kept]
            metrics = task_metrics(runs, [o.seconds for o in outcomes], task.is_eval)
            message = None
            if kept < total:
                message = f"{completed}/{total} runs completed successfully"
                message += f"; first error: {errors[0]}" if errors else ""
            batch.statuses.append(Status(kept, total, [metrics], message))
            batch.payloads += [s.payload for s in task.sub_tasks if kept and s.payload is not None]
            batch.completed_tasks += kept > 0
        task.task = None
        for sub in task.sub_tasks:
            sub.payload = None
            if sub.outcome is not None:
                status = replace(sub.outcome.status, metrics=[])
                sub.outcome = replace(sub.outcome, status=status, errors=())
        batch.unfinished_tasks -= 1
        return [Emit(batch.batch_id, batch.complete)]

    def _remember_failed(self, batch: BatchState, task: ScheduledTask, failed: int) -> None:
        """The ``failed`` runs of a task one by one, as far as the batch may have more of them."""
        room = min(self.policy.failed_runs - len(batch.failed_runs), failed)
        if room <= 0:
            return
        asked = getattr(task.task, "task_desc", None)
        prompt = (
            asked if isinstance(asked, str) or asked is None else json.dumps(asked, default=str)
        )
        facts: dict[str, Any] = {
            "prompt": prompt or "",
            "source": str(getattr(task.task, "source", "")),
        }
        found: list[FailedRun] = []
        for sub in task.sub_tasks:
            errors = sub.outcome.errors if sub.outcome is not None else ()
            all_of_them = len(errors) == sub.repeat_times
            for index, error in enumerate(errors):
                known = sub.run_id_base + index if all_of_them else None
                run = known if error.run is None else error.run
                more: dict[str, Any] = {
                    "attempts": sub.attempts,
                    "error": error,
                    "earlier": sub.earlier,
                }
                found.append(FailedRun(task.batch_id, task.task_id, run, **more, **facts))
        dropped = RunError(GROUP_DROPPED, "finished, but another run of its group failed")
        attempts = max((sub.attempts for sub in task.sub_tasks), default=1)
        whole = FailedRun(task.batch_id, task.task_id, None, attempts, dropped, **facts)
        found += [whole] * (failed - len(found))
        batch.failed_runs += found[:room]

    def _cut(self, batch: BatchState, now: float) -> list[Instruction]:
        """The batch's time is over: once its attempts are asked back, then they are cancelled."""
        if batch.first_error is None and not any(worker.up for worker in self.workers):
            batch.first_error = no_worker(self.workers, self.policy.batch_timeout_s)
        recall = not batch.cut
        batch.deadline = now + self.policy.recall_s
        cancel = self.cancel_unfinished
        instructions = cancel(batch.batch_id, now, restart=not recall, recall=recall)
        if recall and not any(isinstance(i, Recall) for i in instructions):
            instructions += cancel(batch.batch_id, now, restart=True)
        return instructions

    def _may_wait(self, attempt: RunningAttempt) -> bool:
        """Whether it may not have begun: other explorers' sub-tasks use the same runners."""
        runs = self.workers[attempt.worker].group == RUNNER
        return runs and not attempt.ended and not attempt.asked

    def _may_block(self, attempt: RunningAttempt) -> bool:
        """Whether it may go on in its worker when it is cancelled."""
        runs = self.workers[attempt.worker].group == RUNNER
        return runs and not attempt.ended and not attempt.queued

    def _restart(self, worker: str) -> list[Instruction]:
        """Kill a worker; what else runs there starts again elsewhere, at no cost to it."""
        instructions: list[Instruction] = [Restart(worker)]
        self.workers.down(worker)
        for attempt_id in self._on(worker):
            sub_task = self.running[attempt_id].sub_task
            self._out(attempt_id)
            sub_task.attempts -= 1
            self.pending.push_front(sub_task)
            instructions.append(Cancel(attempt_id))
        return instructions


class _Deadlines:
    """The earliest of many deadlines by number, in seconds of the caller's clock.

    The memory is in proportion to the deadlines that stand, not to those there were.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._due: dict[int, float] = {}

    def set(self, number: int, due: float) -> None:
        self._due[number] = due
        heapq.heappush(self._heap, (due, number))
        if len(self._heap) > 2 * len(self._due) + SPARE_DEADLINES:
            self._heap = [(when, which) for which, when in self._due.items()]
            heapq.heapify(self._heap)

    def drop(self, number: int) -> None:
        self._due.pop(number, None)

    def first(self) -> Optional[float]:
        """The earliest deadline that stands, or None."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def over(self, now: float) -> list[int]:
        """Numbers whose deadline has passed, earliest first. They stay until dropped."""
        return [n for n, due in sorted(self._due.items(), key=lambda item: item[1]) if due <= now]

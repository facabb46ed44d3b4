"""The scheduler's decisions: events in, instructions out; no I/O, no clock, no Dask.

Invariant: every run of every scheduled task ends in exactly one of succeeded, failed and
cancelled; a place never executes more sub-tasks than it has lanes; an event about an attempt
that is not out any more (it was cancelled, lost or given up) changes nothing.

Two deadlines, kept apart: that of an attempt costs the attempt, and a retry still has its
own full time; that of a batch cancels what is left of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

from trinity_dask.explorer.schedule.deadlines import Deadlines
from trinity_dask.explorer.schedule.outcome import Outcome, RunError
from trinity_dask.explorer.schedule.pending import Pending
from trinity_dask.explorer.schedule.places import GROUPS, ROLLOUT, RUNNER, Places, no_place
from trinity_dask.explorer.schedule.policy import (
    REPLACE,
    Cancel,
    Emit,
    Instruction,
    Pace,
    Recall,
    Restart,
    SchedulePolicy,
    Submit,
)
from trinity_dask.explorer.schedule.results import settle
from trinity_dask.explorer.schedule.tasks import (
    BatchId,
    BatchResult,
    BatchState,
    Counts,
    RunningTaskState,
    SubTask,
    TaskWrapper,
)

WORKER_LOST = "WorkerLost"
ATTEMPT_TIMEOUT = "AttemptTimeout"
RECALLED = "Recalled"  # the error of a run that was not finished when its batch was cut off


class SchedulerState:
    """Batches, their sub-tasks, the places, and the attempts that are out.

    Every event method takes ``now`` (seconds of any steady clock) and returns the
    instructions that follow from the event, in the order to carry them out. ``limit`` bounds
    the sub-tasks in execution over all places (None: the places alone do).
    """

    def __init__(self, policy: SchedulePolicy, limit: Optional[int] = None) -> None:
        self.policy = policy
        self.limit = limit
        self.pace = Pace(policy)
        self.places = Places()
        self.batches: dict[BatchId, BatchState] = {}
        self.running: dict[int, RunningTaskState] = {}
        self.pending = Pending()
        self._deadlines = Deadlines()
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
        batch = self.batches.get(batch_id) or self._new_batch(batch_id, tasks[0].is_eval)
        for task in tasks:
            wrapper = TaskWrapper(
                task, batch_id, len(batch.tasks), task.repeat_times, batch.is_eval
            )
            batch.tasks.append(wrapper)
            sub_tasks = wrapper.split(self.policy.max_repeat_times_per_runner)
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
        instructions = self._cancel_running(batch_id, restart, recall)
        awaited = {id(attempt.sub_task) for attempt in self.running.values()}
        for wrapper in batch.tasks:
            if not wrapper.emitted:
                for sub_task in wrapper.sub_tasks:
                    sub_task.cancelled |= sub_task.outcome is None and id(sub_task) not in awaited
                instructions += self._settle(wrapper, partial)
        return [*instructions, *self._fill(now)]

    def discard(
        self, batch_id: BatchId, now: float, restart: bool = False
    ) -> tuple[Counts, list[Instruction]]:
        """Cancel and forget a batch; returns its final counts."""
        instructions = self.cancel_unfinished(batch_id, now, restart=restart)
        batch = self.batches.get(batch_id)
        counts = batch.counts if batch else Counts()
        self._forget(batch_id)
        return counts, instructions

    # events: attempts -----------------------------------------------------------------
    def started(self, attempt_ids: Iterable[int], now: float) -> list[Instruction]:
        """Attempts were handed to their workers: their time runs from now on."""
        for attempt_id in attempt_ids:
            attempt = self.running.get(attempt_id)
            if attempt is not None and not attempt.ended:
                attempt.started = now
                self._set_deadline(attempt_id, attempt)
        return []

    def ended(self, attempt_ids: Iterable[int], now: float) -> list[Instruction]:
        """Attempts have left their workers; their lanes are free while payloads are fetched."""
        for attempt_id in attempt_ids:
            attempt = self.running.get(attempt_id)
            if attempt is not None and not attempt.ended:
                attempt.ended = True
                self._deadlines.set(attempt_id, now + self.policy.fetch_timeout_s)
                self.places[attempt.place].give_back(attempt.runner_id)
        return self._fill(now)

    def finished(
        self, attempt_id: int, outcome: Outcome, payload: Optional[bytes], now: float
    ) -> list[Instruction]:
        """An attempt reported; its payload is kept if the outcome is final."""
        attempt = self.running.get(attempt_id)
        if attempt is None:
            return []
        if outcome.status.ok:
            self.places[attempt.place].observe(outcome.seconds)
        self._out(attempt_id)
        instructions = self._conclude(attempt.sub_task, outcome, payload)
        place = self.places[attempt.place]
        if outcome.restart_runner and place.group == RUNNER and place.up:
            instructions += self._restart(attempt.place)
        return [*self._fill(now), *instructions]

    def failed(self, attempt_id: int, error: RunError, now: float) -> list[Instruction]:
        """An attempt vanished or could not run: costs one attempt."""
        attempt = self._out(attempt_id)
        if attempt is None:
            return []
        lost = Outcome.lost(attempt.sub_task.repeat_times, error)
        instructions = self._conclude(attempt.sub_task, lost, None)
        return [*self._fill(now), *instructions]

    # events: places -------------------------------------------------------------------
    def place_up(
        self, name: str, capacity: int, now: float, group: str = ROLLOUT
    ) -> list[Instruction]:
        """A worker takes ``capacity`` sub-tasks at a time from now on."""
        instructions = self.place_lost(name, now)
        self.places.up(name, capacity, group)
        return [*instructions, *self._fill(now)]

    def place_lost(self, name: str, now: float, forever: bool = False) -> list[Instruction]:
        """A worker died: costs each sub-task on it one attempt."""
        self.places.down(name)
        instructions: list[Instruction] = []
        for attempt_id in reversed(self._at(name)):  # so that they queue up in their order
            instructions.append(Cancel(attempt_id))
            error = RunError(WORKER_LOST, f"the worker of {name} died")
            attempt = self._out(attempt_id)
            assert attempt is not None
            lost = Outcome.lost(attempt.sub_task.repeat_times, error)
            instructions += self._conclude(attempt.sub_task, lost, None)
        if forever:
            self.places.forget(name)
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
            if attempt_id in self.running:  # not given up with a worker that was restarted
                instructions += self._give_up(attempt_id, now)
        return [*instructions, *self._fill(now)]

    def next_deadline(self) -> Optional[float]:
        """When :meth:`tick` is due next, or None."""
        dues = [b.deadline for b in self.batches.values() if not b.complete and b.deadline]
        dues += [due for due in (self._deadlines.first(), self._look_again) if due is not None]
        return min(dues, default=None)

    # queries --------------------------------------------------------------------------
    def drain(self, batch_id: BatchId) -> BatchResult:
        """Take the results of a batch; a complete batch is forgotten. Unknown: empty."""
        batch = self.batches.get(batch_id)
        if batch is None:
            return BatchResult(batch_id, [], [], Counts(), {})
        if batch.complete:
            self.pace.completed_steps += not batch.is_eval and not batch.counts.cancelled
            self._forget(batch_id)
        return batch.take_results()

    @property
    def busy(self) -> int:
        """Lanes in use."""
        return self.places.busy

    # ----------------------------------------------------------------------------------
    def _new_batch(self, batch_id: BatchId, is_eval: bool) -> BatchState:
        batch = self.batches[batch_id] = BatchState(batch_id, is_eval)
        self.pending.add_batch(batch_id)
        return batch

    def _fill(self, now: float) -> list[Instruction]:
        """Start sub-tasks while lanes are free."""
        instructions: list[Instruction] = []
        room = self.places.room(self.limit)
        self._look_again = None
        for group in GROUPS:
            while room > 0 and (waiting := self.pending.count(group)):
                place = self.places.choose(group, waiting, now)
                if place is None:
                    self._look_again = self.places.look_again(group, now)
                    break
                sub_task = self.pending.pop(group)
                assert sub_task is not None
                instructions.append(self._start(sub_task, place.name, now))
                room -= 1
        self._start_clock(now)
        return instructions

    def _start_clock(self, now: float) -> None:
        """The time of the first batch in order runs, whether anything of it runs or not."""
        for batch_id in self.pending.batches():
            batch = self.batches[batch_id]
            if not batch.complete:
                if batch.deadline is None:
                    batch.deadline = now + self.policy.batch_timeout_s
                return

    def _start(self, sub_task: SubTask, place: str, now: float) -> Submit:
        attempt_id = next(self._attempt_ids)
        sub_task.attempts += 1
        batch = self.batches[sub_task.task.batch_id]
        if batch.deadline is None:
            batch.deadline = now + self.policy.batch_timeout_s
        limit = self.pace.limit_s(batch.is_eval)
        lane = self.places[place].take(now)
        attempt = RunningTaskState(sub_task, place, lane, now, 0.0, limit)
        self.running[attempt_id] = attempt
        self._set_deadline(attempt_id, attempt)
        return Submit(attempt_id, sub_task, place, lane, limit)

    def _set_deadline(self, attempt_id: int, attempt: RunningTaskState) -> None:
        attempt.deadline = attempt.started + attempt.timeout_s + self.policy.attempt_slack_s
        self._deadlines.set(attempt_id, attempt.deadline)

    def _out(self, attempt_id: int) -> Optional[RunningTaskState]:
        """Take an attempt off the books; None when it is not on them."""
        attempt = self.running.pop(attempt_id, None)
        self._deadlines.drop(attempt_id)
        if attempt is not None and not attempt.ended:  # an ended one's lane may be another's now
            self.places[attempt.place].give_back(attempt.runner_id)
        return attempt

    def _at(self, place: str) -> list[int]:
        return [a for a, attempt in self.running.items() if attempt.place == place]

    def _conclude(
        self, sub_task: SubTask, outcome: Outcome, payload: Optional[bytes]
    ) -> list[Instruction]:
        """Another attempt, or the end of the sub-task."""
        batch = self.batches[sub_task.task.batch_id]
        if not batch.is_eval:
            self.pace.sub_task_done(outcome)
        if batch.cut:
            outcome = sub_task.task.cut_missing(sub_task, outcome, RECALLED)
        elif self.policy.tries_again(sub_task, outcome):
            batch.retries += 1
            if outcome.status.completed_runs and self.policy.partial_group == REPLACE:
                sub_task.payload = payload
                sub_task = sub_task.task.replace_missing(sub_task, outcome)
            self.pending.push_front(sub_task)
            return []
        sub_task.outcome = outcome
        sub_task.payload = payload if outcome.status.completed_runs else None
        return self._settle(sub_task.task, True)

    def _settle(self, wrapper: TaskWrapper, partial: bool) -> list[Instruction]:
        """Emit the task if its last sub-task has ended."""
        if wrapper.emitted or not wrapper.finished:
            return []
        batch = self.batches[wrapper.batch_id]
        settle(batch, wrapper, self.policy.keep_partial, partial)
        return [Emit(batch.batch_id, batch.complete)]

    # giving up ------------------------------------------------------------------------
    def _cut(self, batch: BatchState, now: float) -> list[Instruction]:
        """The batch's time is over: once its attempts are asked back, then they are cancelled."""
        if batch.first_error is None and not any(place.up for place in self.places):
            batch.first_error = no_place(self.places, self.policy.batch_timeout_s)
        recall = not batch.cut
        batch.deadline = now + self.policy.recall_s
        cancel = self.cancel_unfinished
        instructions = cancel(batch.batch_id, now, restart=not recall, recall=recall)
        if recall and not any(isinstance(i, Recall) for i in instructions):
            instructions += cancel(batch.batch_id, now, restart=True)
        return instructions

    def _cancel_running(self, batch_id: BatchId, restart: bool, recall: bool) -> list[Instruction]:
        instructions: list[Instruction] = []
        blocked: dict[str, None] = {}  # an ordered set
        for attempt_id, attempt in list(self.running.items()):
            if attempt.task.batch_id != batch_id:
                continue
            if recall and (attempt.ended or attempt.sub_task.repeat_times > 1):
                instructions.append(Recall(attempt_id))
            else:
                self._out(attempt_id)
                instructions.append(Cancel(attempt_id))
                if restart and self._may_block(attempt):
                    blocked[attempt.place] = None
        for place in blocked:
            instructions += self._restart(place)
        return instructions

    def _may_block(self, attempt: RunningTaskState) -> bool:
        on_runner = self.places[attempt.place].group == RUNNER
        return on_runner and attempt.restart_runner_on_cancel and not attempt.ended

    def _give_up(self, attempt_id: int, now: float) -> list[Instruction]:
        """An attempt did not even report that its time was over."""
        attempt = self._out(attempt_id)
        assert attempt is not None
        limit = attempt.timeout_s
        error = RunError(ATTEMPT_TIMEOUT, f"no report {limit:g} s after its start; it was stopped")
        instructions: list[Instruction] = [Cancel(attempt_id)]
        if self._may_block(attempt):
            instructions += self._restart(attempt.place)
        lost = Outcome.lost(attempt.sub_task.repeat_times, error)
        return [*instructions, *self._conclude(attempt.sub_task, lost, None)]

    def _restart(self, place: str) -> list[Instruction]:
        """Kill a worker; what else runs there starts again elsewhere, at no cost to it."""
        instructions: list[Instruction] = [Restart(place)]
        self.places.down(place)
        for attempt_id in reversed(self._at(place)):
            attempt = self._out(attempt_id)
            assert attempt is not None
            attempt.sub_task.attempts -= 1
            self.pending.push_front(attempt.sub_task)
            instructions.append(Cancel(attempt_id))
        return instructions

    def _forget(self, batch_id: BatchId) -> None:
        self.batches.pop(batch_id, None)
        self.pending.forget(batch_id)

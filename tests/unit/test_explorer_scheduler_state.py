"""The scheduler's decisions, without a cluster and without a clock.

Invariant: every scenario ends with the counts of the batch adding up.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.explorer.scheduler_state import (
    Cancel,
    Progress,
    SchedulePolicy,
    SchedulerState,
    Submit,
)
from trinity_dask.explorer.status import Outcome, RunError, Status
from trinity_dask.explorer.tasks import Counts, sort_batch_id
from trinity_dask.workflows import Task

ERROR = RunError("ValueError", "boom")


def outcome(completed: int, total: int, retryable: bool = True) -> Outcome:
    metrics = [{"reward": float(i)} for i in range(completed)]
    status = Status(completed, total, metrics, None if completed == total else str(ERROR))
    return Outcome(status, (ERROR,) * (total - completed), 0.5, retryable)


def tasks(n: int, repeat_times: int = 1, is_eval: bool = False) -> list[Task]:
    return [Task("w", repeat_times=repeat_times, is_eval=is_eval) for _ in range(n)]


def submitted(instructions) -> list[Submit]:
    return [i for i in instructions if isinstance(i, Submit)]


def make(slots: int = 4, **policy) -> SchedulerState:
    return SchedulerState(SchedulePolicy(**policy), slots)


def test_batches_are_ordered_by_step_and_train_comes_before_its_eval():
    ids = ["x", "3/eval", 10, 3, "10/a", 2]
    assert sorted(ids, key=sort_batch_id) == [2, 3, "3/eval", 10, "10/a", "x"]


def test_a_slot_is_given_to_the_first_task_of_the_first_batch():
    state = make(slots=1)
    first = submitted(state.schedule(2, tasks(2), 0.0))
    state.schedule("1/eval", tasks(1, is_eval=True), 0.0)
    state.schedule(1, tasks(1), 0.0)
    order = []
    out = first
    while out:
        wrapper = out[0].sub_task.task
        order.append((wrapper.batch_id, wrapper.task_id))
        out = submitted(state.finished(out[0].attempt_id, outcome(1, 1), b"p", 0.0))
    assert order == [(2, 0), (1, 0), ("1/eval", 0), (2, 1)]


@pytest.mark.parametrize(
    ("repeat", "limit", "sizes", "bases"),
    [(8, 2, [2, 2, 2, 2], [0, 2, 4, 6]), (5, 2, [2, 2, 1], [0, 2, 4]), (5, None, [5], [0])],
)
def test_a_group_is_split_into_sub_tasks(repeat, limit, sizes, bases):
    state = make(slots=10, max_repeat_times_per_runner=limit)
    out = submitted(state.schedule(1, tasks(1, repeat), 0.0))
    assert [s.sub_task.repeat_times for s in out] == sizes
    assert [s.sub_task.run_id_base for s in out] == bases


def test_a_split_task_gives_one_status_with_the_metrics_of_all_its_runs():
    state = make(max_repeat_times_per_runner=2)
    out = submitted(state.schedule(1, tasks(1, 4), 0.0))
    for submit in out:
        state.finished(submit.attempt_id, outcome(2, 2), b"p", 1.0)
    result = state.drain(1)
    (status,) = result.statuses
    assert status.ok
    assert status.metrics == [{"reward": 0.5, "time/task_execution": 0.5}]
    assert result.payloads == [b"p", b"p"]
    assert state.drain(1).statuses == []


def test_fault_03_a_failed_attempt_is_tried_again_and_then_counted():
    state = make(max_attempts=3)
    (out,) = submitted(state.schedule(1, tasks(1, 2), 0.0))
    for _ in range(2):
        (out,) = submitted(state.finished(out.attempt_id, outcome(0, 2), b"", 1.0))
    last = state.finished(out.attempt_id, outcome(0, 2), b"", 1.0)
    assert last == [Progress(1, True)]
    result = state.drain(1)
    assert result.counts == Counts(2, 0, 2, 0)
    assert result.failures == {"ValueError": 2}
    assert result.first_error == ERROR
    assert result.retries == 2
    assert result.payloads == []


def test_what_can_never_work_is_not_tried_again():
    state = make(max_attempts=3)
    (out,) = submitted(state.schedule(1, tasks(1), 0.0))
    state.finished(out.attempt_id, outcome(0, 1, retryable=False), b"", 1.0)
    assert state.drain(1).counts == Counts(1, 0, 1, 0)


def test_fault_02_a_partial_group_is_kept_without_another_attempt():
    state = make(keep_partial=True)
    (out,) = submitted(state.schedule(1, tasks(1, 8), 0.0))
    state.finished(out.attempt_id, outcome(7, 8), b"seven", 1.0)
    result = state.drain(1)
    assert result.counts == Counts(8, 7, 1, 0)
    assert result.payloads == [b"seven"]
    assert "7/8 runs completed" in str(result.statuses[0].message)


def test_fault_02_a_partial_group_is_dropped_whole_when_the_policy_says_so():
    state = make(keep_partial=False, max_attempts=2, max_repeat_times_per_runner=4)
    one, two = submitted(state.schedule(1, tasks(1, 8), 0.0))
    state.finished(one.attempt_id, outcome(4, 4), b"four", 1.0)
    (again,) = submitted(state.finished(two.attempt_id, outcome(3, 4), b"", 1.0))
    state.finished(again.attempt_id, outcome(3, 4), b"three", 1.0)
    result = state.drain(1)
    assert result.counts == Counts(8, 0, 8, 0)
    assert result.payloads == []
    assert result.failures == {"ValueError": 1, "PartialGroupDropped": 7}


def test_fault_13_a_lost_worker_costs_one_attempt():
    state = make(max_attempts=2)
    (out,) = submitted(state.schedule(1, tasks(1), 0.0))
    (again,) = submitted(state.lost(out.attempt_id, RunError("WorkerLost", "gone"), 1.0))
    assert state.finished(out.attempt_id, outcome(1, 1), b"late", 2.0) == []
    state.finished(again.attempt_id, outcome(1, 1), b"p", 2.0)
    assert state.drain(1).counts == Counts(1, 1, 0, 0)


def test_an_attempt_that_hangs_costs_its_own_time_and_the_retry_has_its_own():
    state = make(max_attempts=2, attempt_timeout_s=10, attempt_slack_s=5, batch_timeout_s=100)
    (out,) = submitted(state.schedule(1, tasks(1), 0.0))
    assert state.next_deadline() == 15.0
    assert state.tick(14.9) == []
    cancel, again = state.tick(15.0)
    assert cancel == Cancel(out.attempt_id)
    assert isinstance(again, Submit)
    assert state.next_deadline() == 30.0
    assert state.finished(out.attempt_id, outcome(1, 1), b"late", 16.0) == []
    state.finished(again.attempt_id, outcome(1, 1), b"p", 29.0)
    assert state.drain(1).counts == Counts(1, 1, 0, 0)


def test_the_deadline_of_a_batch_cancels_the_rest_and_keeps_finished_runs():
    state = make(slots=3, batch_timeout_s=50, max_repeat_times_per_runner=2)
    a, b, _ = submitted(state.schedule(1, tasks(2, 4), 0.0))
    state.finished(a.attempt_id, outcome(2, 2), b"half", 10.0)
    out = state.tick(50.0)
    assert {i.attempt_id for i in out if isinstance(i, Cancel)} >= {b.attempt_id}
    assert out[-1] == Progress(1, True)
    result = state.drain(1)
    assert result.counts == Counts(8, 2, 0, 6)
    assert result.payloads == [b"half"]
    assert state.next_deadline() is None


def test_lost_slots_stop_new_attempts_and_new_slots_start_them():
    state = make(slots=2)
    out = submitted(state.schedule(1, tasks(4), 0.0))
    assert len(out) == 2
    state.set_slots(1, 0.0)
    assert state.finished(out[0].attempt_id, outcome(1, 1), b"", 1.0) == [Progress(1, False)]
    assert len(submitted(state.set_slots(3, 1.0))) == 2


def test_a_slot_is_free_as_soon_as_its_attempt_has_ended():
    state = make(slots=1)
    (first,) = submitted(state.schedule(1, tasks(2), 0.0))
    (second,) = submitted(state.ended([first.attempt_id], 1.0))
    assert state.ended([first.attempt_id], 1.0) == []
    state.finished(first.attempt_id, outcome(1, 1), b"", 2.0)
    state.finished(second.attempt_id, outcome(1, 1), b"", 2.0)
    assert state.drain(1).counts == Counts(2, 2, 0, 0)
    assert state.busy == 0


def test_abort_forgets_a_batch_and_reports_its_counts():
    state = make(slots=2)
    out = submitted(state.schedule(1, tasks(3), 0.0))
    state.finished(out[0].attempt_id, outcome(1, 1), b"", 1.0)
    counts, instructions = state.discard(1, 2.0)
    assert counts == Counts(3, 1, 0, 2)
    assert sum(isinstance(i, Cancel) for i in instructions) == 2
    assert state.batches == {}
    assert state.running == {}


def test_decisions_import_neither_dask_nor_torch():
    code = (
        "import sys, trinity_dask.explorer.scheduler_state;"
        "print([m for m in ('torch', 'dask', 'distributed') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# --- any order of events ------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["schedule", "ended", "ok", "part", "fail", "lost", "tick", "slots", "cancel"]
        ),
        st.integers(0, 7),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(1, 5), st.booleans(), st.sampled_from([None, 1, 2]))
def test_every_run_ends_in_exactly_one_way(events, slots, keep, limit):
    state = make(
        slots=slots,
        max_attempts=2,
        attempt_timeout_s=5,
        attempt_slack_s=1,
        batch_timeout_s=20,
        keep_partial=keep,
        max_repeat_times_per_runner=limit,
    )
    driver = Driver(state)
    for kind, number in events:
        driver.step(kind, number)
        driver.check()
    driver.settle()


class Driver:
    """Applies random events and follows the instructions like the I/O shell would."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.now = 0.0
        self.batch = 0
        self.out: dict[int, Submit] = {}
        self.runs: dict[int, int] = {}
        self.drained: dict[int, Counts] = {}

    def step(self, kind: str, number: int) -> None:
        attempts = list(self.out)
        if kind == "schedule":
            self._schedule(number)
        elif kind == "slots":
            self.follow(self.state.set_slots(number, self.now))
        elif kind == "cancel":
            self.follow(self.state.cancel_unfinished(number, self.now))
        elif kind == "ended":
            self.follow(self.state.ended(attempts[:number], self.now))
        elif kind == "tick":
            self.now += number
            self.follow(self.state.tick(self.now))
        elif attempts:
            self._report(kind, attempts[number % len(attempts)])

    def _schedule(self, number: int) -> None:
        self.batch += 1
        made = tasks(1 + number % 3, 1 + number % 4)
        self.runs[self.batch] = sum(t.repeat_times for t in made)
        self.follow(self.state.schedule(self.batch, made, self.now))

    def _report(self, kind: str, attempt: int) -> None:
        total = self.out.pop(attempt).sub_task.repeat_times
        completed = {"ok": total, "part": total // 2, "fail": 0, "lost": 0}[kind]
        if kind == "lost":
            self.follow(self.state.lost(attempt, ERROR, self.now))
        else:
            self.follow(self.state.finished(attempt, outcome(completed, total), b"p", self.now))

    def follow(self, instructions) -> None:
        for instruction in instructions:
            if isinstance(instruction, Submit):
                assert instruction.attempt_id not in self.out
                self.out[instruction.attempt_id] = instruction
                assert self.state.busy <= self.state.slots
            elif isinstance(instruction, Cancel):
                self.out.pop(instruction.attempt_id, None)

    def check(self) -> None:
        assert set(self.out) == set(self.state.running)
        assert 0 <= self.state.busy <= len(self.out)
        for batch_id, batch in self.state.batches.items():
            assert batch.counts.scheduled == self.runs[batch_id]
            assert batch.counts.in_flight >= 0
            assert batch.complete == (batch.counts.in_flight == 0)

    def settle(self) -> None:
        """Answer everything; then nothing may be left in flight."""
        self.follow(self.state.set_slots(3, self.now))
        while self.out:
            self._report("ok", next(iter(self.out)))
            self.check()
        for batch_id in list(self.state.batches):
            result = self.state.drain(batch_id)
            assert result.complete
            assert result.counts.scheduled == self.runs[batch_id]
            assert result.counts.in_flight == 0
            assert sum(s.completed_runs for s in result.statuses) == result.counts.succeeded
        assert self.state.batches == {}
        assert self.state.pending_count == 0

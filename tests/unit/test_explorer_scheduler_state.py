"""The scheduler's decisions, without a cluster and without a clock.

Invariant: every scenario ends with the counts of the batch adding up.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.explorer.schedule.policy import (
    Ask,
    Cancel,
    Emit,
    Recall,
    Restart,
    SchedulePolicy,
    Submit,
)
from trinity_dask.explorer.schedule.state import ASK_S, RECALLED, WORKER_LOST, SchedulerState
from trinity_dask.explorer.schedule.tasks import (
    AttemptOutcome,
    Counts,
    RunError,
    Status,
    sort_batch_id,
)
from trinity_dask.explorer.schedule.workers import NO_WORKER, RUNNER
from trinity_dask.workflows import Task

ERROR = RunError("ValueError", "boom")


def outcome(completed: int, total: int, retryable: bool = True) -> AttemptOutcome:
    metrics = [{"reward": float(i)} for i in range(completed)]
    status = Status(completed, total, metrics, None if completed == total else str(ERROR))
    return AttemptOutcome(status, (ERROR,) * (total - completed), 0.5, retryable)


def tasks(n: int, repeat_times: int = 1, is_eval: bool = False) -> list[Task]:
    return [Task("w", repeat_times=repeat_times, is_eval=is_eval) for _ in range(n)]


def submitted(instructions) -> list[Submit]:
    return [i for i in instructions if isinstance(i, Submit)]


def make(slots: int = 4, workers: int = 1, group: str = "rollout", **policy) -> SchedulerState:
    """With ``slots`` lanes at each of the workers engine-0, engine-1, ..."""
    state = SchedulerState(SchedulePolicy(**policy))
    for index in range(workers):
        state.worker_up(f"engine-{index}", slots, 0.0, group)
    return state


def runs_of(instructions) -> list[tuple[int | str, int]]:
    return [(s.sub_task.task.batch_id, s.sub_task.task.task_id) for s in submitted(instructions)]


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
    assert last == [Emit(1, True)]
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
    state = make(partial_group="keep")
    (out,) = submitted(state.schedule(1, tasks(1, 8), 0.0))
    state.finished(out.attempt_id, outcome(7, 8), b"seven", 1.0)
    result = state.drain(1)
    assert result.counts == Counts(8, 7, 1, 0)
    assert result.payloads == [b"seven"]
    assert "7/8 runs completed" in str(result.statuses[0].message)


def test_fault_02_a_partial_group_is_dropped_whole_when_the_policy_says_so():
    state = make(partial_group="drop", max_attempts=2, max_repeat_times_per_runner=4)
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
    (again,) = submitted(state.failed(out.attempt_id, RunError("WorkerLost", "gone"), 1.0))
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
    assert Recall(b.attempt_id) in state.tick(50.0)
    out = state.tick(60.0)
    assert Cancel(b.attempt_id) in out
    assert out[-1] == Emit(1, True)
    result = state.drain(1)
    assert result.counts == Counts(8, 2, 0, 6)
    assert result.payloads == [b"half"]
    assert state.next_deadline() is None


def test_lost_slots_stop_new_attempts_and_new_slots_start_them():
    state = make(slots=4)
    state.set_limit(2, 0.0)
    out = submitted(state.schedule(1, tasks(4), 0.0))
    assert len(out) == 2
    state.set_limit(1, 0.0)
    assert state.finished(out[0].attempt_id, outcome(1, 1), b"", 1.0) == [Emit(1, False)]
    assert len(submitted(state.set_limit(3, 1.0))) == 2


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
        "import sys, trinity_dask.explorer.schedule.state;"
        "print([m for m in ('torch', 'dask', 'distributed') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# --- deadlines ----------------------------------------------------------------------------
def test_waiting_behind_another_batch_costs_a_batch_none_of_its_time():
    state = make(slots=1, batch_timeout_s=50)
    (first,) = submitted(state.schedule(1, tasks(1), 0.0))
    state.schedule(2, tasks(1), 0.0)
    assert state.tick(49.0) == []
    (second,) = submitted(state.finished(first.attempt_id, outcome(1, 1), b"p", 49.0))
    assert state.tick(60.0) == []
    state.finished(second.attempt_id, outcome(1, 1), b"p", 98.0)
    assert state.drain(2).counts == Counts(1, 1, 0, 0)


def test_a_batch_that_no_worker_takes_ends_at_its_deadline_and_says_why():
    state = SchedulerState(SchedulePolicy(batch_timeout_s=50))
    assert state.schedule(1, tasks(2), 0.0) == []
    assert state.next_deadline() == 50.0
    state.tick(50.0)
    result = state.drain(1)
    assert result.counts == Counts(2, 0, 0, 2)
    assert result.first_error.type == NO_WORKER


def test_the_dynamic_timeout_follows_training_sub_tasks_and_leaves_evals_alone():
    state = make(dynamic_ratio=3.0, attempt_timeout_s=100.0, max_attempts=1)
    (evaluation,) = submitted(state.schedule("0/eval", tasks(1, is_eval=True), 0.0))
    state.finished(evaluation.attempt_id, outcome(1, 1), b"", 1.0)
    state.drain("0/eval")
    pace = state.pace
    assert (pace.total_running_time_s, pace.total_completed_sub_tasks) == (0.0, 0)
    for submit in submitted(state.schedule(1, tasks(4), 0.0)):
        assert submit.timeout_s == 100.0
        state.finished(submit.attempt_id, outcome(1, 1), b"", 1.0)
    assert pace.limit_s() == 100.0  # the batch counts when its results are taken
    state.drain(1)
    (train,) = submitted(state.schedule(2, tasks(1), 2.0))
    (evaluation,) = submitted(state.schedule("2/eval", tasks(1, is_eval=True), 2.0))
    assert (train.timeout_s, evaluation.timeout_s) == (1.5, 100.0)


def test_a_batch_that_was_cut_measures_and_one_without_a_result_does_not():
    """With over-rollout every batch is cut."""
    state = make(slots=2, dynamic_ratio=3.0)
    state.schedule(1, tasks(2), 0.0)
    state.cancel_unfinished(1, 1.0)
    state.drain(1)
    assert state.pace.completed_steps == 0
    first, _ = submitted(state.schedule(2, tasks(2), 0.0))
    state.finished(first.attempt_id, outcome(1, 1), b"", 1.0)
    state.cancel_unfinished(2, 1.0)
    state.drain(2)
    assert state.pace.completed_steps == 1


def test_the_dynamic_timeout_grows_again_when_tasks_get_longer():
    state = make(slots=8, dynamic_ratio=3.0, attempt_timeout_s=100.0, max_attempts=1)
    for submit in submitted(state.schedule(1, tasks(8), 0.0)):
        state.finished(submit.attempt_id, replace(outcome(1, 1), seconds=1.0), b"", 1.0)
    state.drain(1)
    for batch in range(2, 12):  # tasks of four seconds from now on
        for submit in submitted(state.schedule(batch, tasks(8), 10.0)):
            took, good = min(submit.timeout_s, 4.0), submit.timeout_s >= 4.0
            ended = replace(outcome(int(good), 1), seconds=took)
            state.finished(submit.attempt_id, ended, b"", 10.0 + took)
        state.drain(batch)
    assert state.pace.limit_s() > 4.0


def test_fast_failures_never_lower_the_dynamic_timeout():
    state = make(slots=8, dynamic_ratio=3.0, attempt_timeout_s=100.0, max_attempts=1)
    for submit in submitted(state.schedule(1, tasks(2, 4), 0.0)):
        state.finished(submit.attempt_id, replace(outcome(4, 4), seconds=10.0), b"", 10.0)
    state.drain(1)
    assert state.pace.limit_s() == 30.0
    for completed, total in ((0, 4), (2, 4), (0, 1)):
        (out,) = submitted(state.schedule(2, tasks(1, total), 20.0))
        quick = replace(outcome(completed, total), seconds=0.01)
        state.finished(out.attempt_id, quick, b"", 20.0)
    assert state.pace.limit_s() == 30.0
    (out,) = submitted(state.schedule(2, tasks(1, 4), 20.0))  # three runs, and one gave up late
    state.finished(out.attempt_id, replace(outcome(3, 4), seconds=25.0), b"", 45.0)
    assert state.pace.limit_s() == 45.0


def test_tasks_without_a_good_run_do_not_count_for_the_minimum_of_over_rollout():
    state = make(slots=4, max_attempts=1)
    one, two, three, four = submitted(state.schedule(1, tasks(4, 2), 0.0))
    for failed in (one, two):
        state.finished(failed.attempt_id, outcome(0, 2), b"", 1.0)
    assert not state.enough(1, 1)
    state.finished(three.attempt_id, outcome(1, 2), b"one", 1.0)
    assert state.enough(1, 1)
    assert not state.enough(1, 2)
    assert not state.enough(1)
    state.finished(four.attempt_id, outcome(0, 2), b"", 1.0)
    assert state.batches[1].completed_tasks == 1
    assert state.enough(1)  # nothing more comes: the wait ends
    assert [s.completed_runs for s in state.drain(1).statuses] == [0, 0, 1, 0]


# --- partial groups -----------------------------------------------------------------------
def test_fault_02_a_failed_run_is_replaced_by_a_new_one():
    state = make(partial_group="replace", max_attempts=2)
    (out,) = submitted(state.schedule(1, tasks(1, 8), 0.0))
    (again,) = submitted(state.finished(out.attempt_id, outcome(6, 8), b"six", 1.0))
    assert (again.sub_task.repeat_times, again.sub_task.run_id_base) == (2, 8)
    state.finished(again.attempt_id, outcome(2, 2), b"two", 2.0)
    result = state.drain(1)
    assert result.counts == Counts(8, 8, 0, 0)
    assert result.payloads == [b"six", b"two"]
    assert result.statuses[0].ok


def test_a_run_that_cannot_be_replaced_is_counted_and_the_others_are_kept():
    state = make(partial_group="replace", max_attempts=2)
    (out,) = submitted(state.schedule(1, tasks(1, 8), 0.0))
    (again,) = submitted(state.finished(out.attempt_id, outcome(6, 8), b"six", 1.0))
    state.finished(again.attempt_id, outcome(1, 2), b"one", 2.0)
    result = state.drain(1)
    assert result.counts == Counts(8, 7, 1, 0)
    assert result.payloads == [b"six", b"one"]
    assert "7/8 runs" in str(result.statuses[0].message)


def test_a_group_that_is_cut_off_counts_with_its_finished_runs_unless_told_otherwise():
    for partial, succeeded, payloads in ((None, 2, [b"half"]), (False, 0, [])):
        state = make(max_repeat_times_per_runner=2)
        half, _ = submitted(state.schedule(1, tasks(1, 4), 0.0))
        state.finished(half.attempt_id, outcome(2, 2), b"half", 1.0)
        state.cancel_unfinished(1, 2.0, partial)
        result = state.drain(1)
        assert result.counts == Counts(4, succeeded, 0, 4 - succeeded)
        assert result.payloads == payloads


def test_attempts_of_a_batch_that_is_cut_bring_the_runs_they_have():
    state = make(slots=2, max_repeat_times_per_runner=None)
    group, _ = submitted(state.schedule(1, [*tasks(1, 4), *tasks(2)], 0.0))
    instructions = state.cancel_unfinished(1, 1.0, recall=True)
    assert [i.attempt_id for i in instructions if isinstance(i, Recall)] == [group.attempt_id]
    assert state.batches[1].counts == Counts(6, 0, 0, 2)  # one running, one waiting
    late = RunError(RECALLED, "late")
    report = AttemptOutcome(Status(1, 4, [{"reward": 1.0}]), (ERROR, late, late), 0.5)
    assert state.finished(group.attempt_id, report, b"one", 2.0) == [Emit(1, True)]
    result = state.drain(1)
    assert result.counts == Counts(6, 1, 1, 4)
    assert result.payloads == [b"one"]


def test_attempts_that_do_not_answer_a_recall_are_cancelled():
    state = make(batch_timeout_s=50, recall_s=5)
    (out,) = submitted(state.schedule(1, tasks(1, 4), 0.0))
    assert state.tick(50.0) == [Recall(out.attempt_id)]
    assert state.next_deadline() == 55.0
    assert state.tick(55.0) == [Cancel(out.attempt_id), Emit(1, True)]
    assert state.drain(1).counts == Counts(4, 0, 0, 4)


# --- workers -------------------------------------------------------------------------------
def test_fault_13_a_dead_worker_costs_its_own_sub_tasks_one_attempt_and_nobody_else_any():
    state = make(slots=2, workers=2, max_attempts=2)
    out = submitted(state.schedule(1, tasks(6), 0.0))
    dead = [s for s in out if s.worker == "engine-0"]
    assert len(dead) == 2
    instructions = state.worker_lost("engine-0", 1.0)
    assert {i.attempt_id for i in instructions} == {s.attempt_id for s in dead}
    assert state.batches[1].retries == 2
    # its sub-tasks are the next ones, in their order, on the worker that is left
    (survivor, _) = [s for s in out if s.worker == "engine-1"]
    after = state.finished(survivor.attempt_id, outcome(1, 1), b"p", 2.0)
    assert runs_of(after) == [runs_of([dead[0]])[0]]
    again = submitted(state.worker_up("engine-0", 2, 3.0))
    assert runs_of(again)[0] == runs_of([dead[1]])[0]


def test_a_worker_that_dies_with_every_attempt_fails_its_sub_task_in_the_end():
    state = make(slots=1, max_attempts=2)
    state.schedule(1, tasks(1), 0.0)
    state.worker_lost("engine-0", 1.0)
    state.worker_up("engine-0", 1, 2.0)
    assert Emit(1, True) in state.worker_lost("engine-0", 3.0)
    result = state.drain(1)
    assert result.counts == Counts(1, 0, 1, 0)
    assert result.failures == {WORKER_LOST: 1}


def test_equal_workers_share_the_work_equally():
    state = make(slots=16, workers=4)
    out = submitted(state.schedule(1, tasks(20), 0.0))
    assert Counter(s.worker for s in out) == {f"engine-{i}": 5 for i in range(4)}


def test_runner_ids_belong_to_one_lane_of_one_worker():
    state = make(slots=2, workers=2)
    out = submitted(state.schedule(1, tasks(4), 0.0))
    lanes = {s.lane: s.worker for s in out}
    assert sorted(lanes) == [0, 1, 2, 3]
    state.worker_lost("engine-1", 1.0)
    again = submitted(state.worker_up("engine-1", 2, 2.0))
    assert all(lanes[s.lane] == s.worker for s in again)


def measured(state: SchedulerState, worker: str, seconds: float) -> None:
    for _ in range(8):
        state.workers[worker].observe(seconds)


def test_near_the_end_a_slow_worker_is_left_idle_and_taken_if_the_fast_one_stops():
    state = make(slots=1, workers=2)
    measured(state, "engine-0", 1.0)
    measured(state, "engine-1", 3.0)
    out = submitted(state.schedule(1, tasks(2), 0.0))
    # the second task ends at 2 on the fast one, at 3 on the slow one
    assert [s.worker for s in out] == ["engine-0"]
    assert state.next_deadline() == pytest.approx(1.0)
    assert submitted(state.tick(1.0)) == []
    assert [s.worker for s in submitted(state.tick(6.0))] == ["engine-1"]


def test_a_slow_worker_takes_what_the_fast_one_could_not_have_done_by_then():
    state = make(slots=1, workers=2)
    measured(state, "engine-0", 1.0)
    measured(state, "engine-1", 3.0)
    out = submitted(state.schedule(1, tasks(8), 0.0))
    assert [s.worker for s in out] == ["engine-0", "engine-1"]


# --- runner workers -----------------------------------------------------------------------
def on_runners(slots: int, **policy) -> SchedulerState:
    state = SchedulerState(SchedulePolicy(attempt_timeout_s=5, attempt_slack_s=1, **policy))
    state.worker_up("runner-0", slots, 0.0, RUNNER)
    return state


def to_runner(task: Task) -> str:
    return RUNNER


def test_fault_10_what_does_not_end_is_killed_and_its_neighbours_lose_nothing():
    state = on_runners(2, max_attempts=1)
    stuck, _ = submitted(state.schedule(1, tasks(1), 0.0, to_runner)) + submitted(
        state.schedule(2, tasks(1), 3.0, to_runner)
    )
    assert state.tick(6.0) == [Ask(stuck.attempt_id)]  # whether it has begun
    instructions = state.begun({stuck.attempt_id: 6.0}, 6.0)
    assert Restart("runner-0") in instructions
    assert Cancel(stuck.attempt_id) in instructions
    assert state.drain(1).failures == {"AttemptTimeout": 1}
    # the neighbour has had its only attempt, and gets it again
    (again,) = submitted(state.worker_up("runner-0", 2, 7.0, RUNNER))
    state.finished(again.attempt_id, outcome(1, 1), b"p", 8.0)
    assert state.drain(2).counts == Counts(1, 1, 0, 0)


def test_an_attempt_that_waits_at_a_shared_runner_loses_none_of_its_time():
    state = on_runners(1, max_attempts=1)
    (waits,) = submitted(state.schedule(1, tasks(1), 0.0, to_runner))
    assert state.tick(6.0) == [Ask(waits.attempt_id)]
    assert state.begun({waits.attempt_id: None}, 7.0) == []
    assert state.next_deadline() == 13.0
    assert state.tick(13.0) == [Ask(waits.attempt_id)]
    assert state.begun({waits.attempt_id: 2.0}, 14.0) == []  # it began at 12
    assert state.next_deadline() == 18.0
    state.finished(waits.attempt_id, outcome(1, 1), b"p", 17.0)
    assert state.drain(1).counts == Counts(1, 1, 0, 0)


def test_a_runner_that_does_not_say_what_has_begun_is_killed():
    state = on_runners(1, max_attempts=1)
    (stuck,) = submitted(state.schedule(1, tasks(1), 0.0, to_runner))
    state.tick(6.0)
    assert state.tick(6.0 + ASK_S - 0.1) == []
    assert Restart("runner-0") in state.tick(6.0 + ASK_S)
    assert state.begun({stuck.attempt_id: None}, 30.0) == []  # too late


def test_what_only_waits_at_a_runner_does_not_have_it_killed():
    state = on_runners(1)
    (waits,) = submitted(state.schedule(1, tasks(1), 0.0, to_runner))
    state.tick(6.0)
    state.begun({waits.attempt_id: None}, 6.5)
    instructions = state.cancel_unfinished(1, 7.0, restart=True)
    assert Cancel(waits.attempt_id) in instructions
    assert Restart("runner-0") not in instructions


def test_a_runner_that_reports_left_over_threads_is_killed():
    state = on_runners(2, max_attempts=1)
    late, _ = submitted(state.schedule(1, tasks(2), 0.0, to_runner))
    report = replace(outcome(0, 1), runner={"abandoned_threads": 1})
    assert Restart("runner-0") in state.finished(late.attempt_id, report, b"", 5.0)
    assert submitted(state.worker_up("runner-0", 2, 6.0, RUNNER))[0].sub_task.attempts == 1


def test_a_batch_that_is_late_has_its_blocked_runners_killed():
    state = on_runners(1)
    state.schedule(1, tasks(1), 0.0, to_runner)
    assert Restart("runner-0") not in state.cancel_unfinished(1, 1.0)
    state.schedule(2, tasks(1), 0.0, to_runner)
    assert Restart("runner-0") in state.cancel_unfinished(2, 1.0, restart=True)


def test_a_workflow_nobody_has_looked_at_waits_and_then_goes_where_it_belongs():
    state = on_runners(1)
    state.worker_up("engine-0", 1, 0.0)
    assert state.schedule(1, tasks(1), 0.0, lambda task: "") == []
    (out,) = submitted(state.route("w", RUNNER, 1.0))
    assert out.worker == "runner-0"


# --- in-flight state ----------------------------------------------------------------------
def test_ten_thousand_tasks_leave_nothing_behind():
    state = make(slots=16, workers=2)
    pool = tasks(100)
    for batch in range(100):
        out = submitted(state.schedule(batch, pool, float(batch)))
        while out:
            assert len(state.running) <= 32
            submit = out.pop()
            out += submitted(state.finished(submit.attempt_id, outcome(1, 1), b"p", float(batch)))
        assert state.drain(batch).counts == Counts(100, 100, 0, 0)
    assert not state.batches
    assert not state.running
    assert len(state.pending) == 0
    assert len(state._deadlines._heap) <= 2 * 32 + 64


# --- any order of events ------------------------------------------------------------------

PLACES = {"engine-0": "rollout", "engine-1": "rollout", "runner-0": "runner"}
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "schedule",
                "started",
                "ended",
                "ok",
                "part",
                "fail",
                "vanish",
                "stuck",
                "tick",
                "limit",
                "cancel",
                "abort",
                "lost",
                "up",
                "drain",
                "route",
            ]
        ),
        st.integers(0, 7),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(1, 3), st.sampled_from(["keep", "replace", "drop"]), st.data())
def test_every_run_ends_in_exactly_one_way(events, slots, partial, data):
    policy = SchedulePolicy(
        max_attempts=2,
        attempt_timeout_s=5,
        attempt_slack_s=1,
        batch_timeout_s=20,
        partial_group=partial,
        return_partial_tasks=data.draw(st.booleans()),
        max_repeat_times_per_runner=data.draw(st.sampled_from([None, 1, 2])),
        dynamic_ratio=data.draw(st.sampled_from([None, 2.0])),
    )
    driver = Driver(SchedulerState(policy), slots)
    for kind, number in events:
        driver.step(kind, number)
        driver.check()
    driver.settle()


class Driver:
    """Applies random events and follows the instructions like the I/O shell would."""

    def __init__(self, state: SchedulerState, slots: int) -> None:
        self.state = state
        self.slots = slots
        self.now = 0.0
        self.batch = 0
        self.out: dict[int, Submit] = {}
        self.gone: list[int] = []
        self.recalled: set[int] = set()
        self.down: set[str] = set(PLACES)
        self.runs: dict[int, int] = {}
        self.statuses: Counter[int] = Counter()
        for name in PLACES:
            self._up(name)

    def step(self, kind: str, number: int) -> None:
        state, now = self.state, self.now
        attempts = list(self.out)
        worker = sorted(PLACES)[number % len(PLACES)]
        if kind == "schedule":
            self._schedule(number)
        elif kind == "limit":
            self.follow(state.set_limit(number, now))
        elif kind == "cancel":
            self.follow(
                state.cancel_unfinished(number, now, restart=number % 2 == 0, recall=number > 3)
            )
        elif kind == "abort":
            counts, instructions = state.discard(number, now, restart=number % 2 == 1)
            self.follow(instructions)
            if number in self.runs:
                self._check_final(number, counts, drained=False)
        elif kind == "drain":
            self._drain(number)
        elif kind == "started":
            self.follow(state.started(attempts[:number], now))
        elif kind == "ended":
            self.follow(state.ended(attempts[:number], now))
        elif kind == "tick":
            self.now += number
            self.follow(state.tick(self.now))
        elif kind == "lost":
            self.follow(state.worker_lost(worker, now))
            self.down.add(worker)
        elif kind == "up":
            self._up(worker)
        elif kind == "route":
            self.follow(state.route("w", sorted(set(PLACES.values()))[number % 2], now))
        elif self.gone and kind == "stuck":  # a report of an attempt that is not out any more
            old = self.gone[number % len(self.gone)]
            assert not submitted(state.finished(old, outcome(1, 1), b"late", now))
        elif attempts:
            self._report(kind, attempts[number % len(attempts)])

    def _up(self, name: str) -> None:
        self.down.discard(name)
        self.follow(self.state.worker_up(name, self.slots, self.now, PLACES[name]))

    def _schedule(self, number: int) -> None:
        self.batch += 1
        made = tasks(1 + number % 3, 1 + number % 4, is_eval=number == 5)
        self.runs[self.batch] = sum(t.repeat_times for t in made)
        groups = ["rollout", "runner", "", "rollout"]
        go = groups[number % 4]
        self.follow(self.state.schedule(self.batch, made, self.now, lambda task: go))

    def _report(self, kind: str, attempt: int) -> None:
        total = self.out.pop(attempt).sub_task.repeat_times
        self.gone.append(attempt)
        if kind in ("vanish", "stuck"):
            self.follow(self.state.failed(attempt, ERROR, self.now))
            return
        completed = {"ok": total, "part": total // 2, "fail": 0}[kind]
        report = outcome(completed, total)
        if attempt in self.recalled and report.errors:
            late = RunError(RECALLED, "late")
            report = replace(report, errors=(late, *report.errors[1:]))
        self.follow(self.state.finished(attempt, report, b"p", self.now))

    def follow(self, instructions) -> None:
        for instruction in instructions:
            if isinstance(instruction, Cancel):
                self.gone += [instruction.attempt_id]
                self.out.pop(instruction.attempt_id, None)
            elif isinstance(instruction, Recall):
                self.recalled.add(instruction.attempt_id)
            elif isinstance(instruction, Restart):
                assert PLACES[instruction.worker] == "runner"
                self.down.add(instruction.worker)
        for submit in submitted(instructions):
            if submit.attempt_id in self.state.running:  # else given up in the same breath
                assert submit.attempt_id not in self.out
                assert submit.worker not in self.down
                assert PLACES[submit.worker] == submit.sub_task.group
                self.out[submit.attempt_id] = submit

    def check(self) -> None:
        state = self.state
        assert set(self.out) == set(state.running)
        lanes = [a.lane for a in state.running.values() if not a.ended]
        assert len(lanes) == len(set(lanes)) == state.busy
        for worker in state.workers:
            assert len(worker.running) <= self.slots
        for batch_id, batch in state.batches.items():
            assert batch.counts.scheduled == self.runs[batch_id]
            assert batch.counts.in_flight >= 0
            assert batch.complete == (batch.counts.in_flight == 0)
            assert batch.complete or self._will_end(batch_id)

    def _will_end(self, batch_id: int) -> bool:
        """A deadline stands for the batch, or for one that is before it."""
        firsts = [b for b in self.state.pending.batches() if not self.state.batches[b].complete]
        return any(self.state.batches[b].deadline is not None for b in firsts[:1])

    def _drain(self, batch_id: int) -> None:
        result = self.state.drain(batch_id)
        self.statuses[batch_id] += sum(s.completed_runs for s in result.statuses)
        if result.complete and batch_id in self.runs:
            self._check_final(batch_id, result.counts)

    def _check_final(self, batch_id: int, counts: Counts, drained: bool = True) -> None:
        if counts == Counts():  # taken or aborted before
            return
        assert counts.scheduled == self.runs[batch_id]
        assert counts.in_flight == 0
        if drained:
            assert self.statuses[batch_id] == counts.succeeded

    def settle(self) -> None:
        """Answer everything; then nothing may be left in flight."""
        self.follow(self.state.set_limit(None, self.now))
        self.follow(self.state.route("w", "rollout", self.now))
        for name in sorted(self.down):
            self._up(name)
        while self.out:
            self._report("ok", next(iter(self.out)))
            self.check()
            while not self.out and len(self.state.pending):  # a slow lane kept free on purpose
                self.now += 1.0
                self.follow(self.state.tick(self.now))
        for batch_id in list(self.state.batches):
            self._drain(batch_id)
        assert self.state.batches == {}
        assert len(self.state.pending) == 0
        assert self.state.busy == 0


def test_failed_runs_are_remembered_one_by_one_with_all_their_attempts() -> None:
    """As many as the accounts count, up to a limit; a retry that succeeds is none of them."""
    state = make(slots=2, max_attempts=2, max_repeat_times_per_runner=1, failed_runs=3)
    questions = [Task("w", repeat_times=2, raw_task={"prompt": "2+2?"}, source="a.jsonl:7")]
    first, second = submitted(state.schedule(1, questions, 0.0))
    (again,) = submitted(state.failed(first.attempt_id, RunError("WorkerLost", "gone"), 1.0))
    state.finished(again.attempt_id, outcome(0, 1), None, 2.0)
    (again,) = submitted(state.failed(second.attempt_id, RunError("WorkerLost", "gone"), 3.0))
    state.finished(again.attempt_id, outcome(1, 1), b"x", 4.0)
    result = state.drain(1)
    (run,) = result.failed_runs
    assert (result.counts.failed, result.retries) == (1, 2)
    assert (run.batch_id, run.task_id, run.run, run.attempts) == (1, 0, 0, 2)
    assert (run.error, run.earlier) == (ERROR, ("WorkerLost: gone",))
    assert (run.prompt, run.source) == ("2+2?", "a.jsonl:7")
    for each in submitted(state.schedule(2, tasks(5), 5.0)):
        state.failed(each.attempt_id, ERROR, 6.0)
    while state.running:
        state.failed(next(iter(state.running)), ERROR, 7.0)
    result = state.drain(2)
    assert (result.counts.failed, len(result.failed_runs)) == (5, 3)


def test_runs_of_a_group_that_is_dropped_as_a_whole_are_among_the_failed() -> None:
    state = make(max_attempts=1, partial_group="drop", failed_runs=10)
    (out,) = submitted(state.schedule(1, tasks(1, repeat_times=3), 0.0))
    state.finished(out.attempt_id, outcome(1, 3), b"x", 1.0)
    result = state.drain(1)
    assert result.counts.failed == 3
    kinds = [run.error.type for run in result.failed_runs]
    assert kinds == ["ValueError", "ValueError", "PartialGroupDropped"]

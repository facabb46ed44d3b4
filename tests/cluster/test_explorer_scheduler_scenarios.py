"""What users of the original scheduler rely on, on real workers with fake engines.

Invariant: lower bounds on times come from sleeps, upper bounds are generous; no result
depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from placement_support import shortest_s
from scheduler_stand import (
    RUNNER_LANES,
    SLOTS,
    SLOTS_PER_ENGINE,
    WAIT_S,
    Stand,
    all_done,
    dummies,
    experiences,
    rows,
    tasks_done,
    until,
)

from trinity_dask.explorer.schedule.scheduler import Scheduler
from trinity_dask.explorer.schedule.tasks import BatchResult, Counts
from trinity_dask.workflows import Task

FILE = Path(__file__).with_name("scheduler_workflows.py")
FAST_S, SLOW_FACTOR = 0.2, 3


def tasks_of(workflow: str, n: int, repeat_times: int = 1, **row) -> list[Task]:
    return [Task(f"{FILE}:{workflow}", raw_task=row, repeat_times=repeat_times) for _ in range(n)]


async def one_of(directory: Path, pattern: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not list(directory.glob(pattern)):
            await asyncio.sleep(0.02)


def engine(index: int) -> dict[str, float]:
    return {"fake_latency_s": FAST_S * (SLOW_FACTOR if index else 1)}


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(tmp_path_factory.mktemp("job"), engine, runners=1)
    yield stand
    stand.cluster.close()


def test_results_that_are_there_are_returned_at_once_and_unknown_batches_are_empty(
    stand: Stand,
) -> None:
    async def body(scheduler: Scheduler) -> None:
        for batch in (1, 2):
            assert batch not in scheduler.state.batches
            scheduler.schedule(dummies(2 + batch), batch)
        await all_done(scheduler)
        assert len(scheduler.state.running) == len(scheduler.state.pending) == 0
        # without a turn of the clock: a deadline that has passed already
        assert len((await scheduler.get_results(1, timeout=0.0)).statuses) == 3
        unknown = await scheduler.get_results(7, min_num=5)
        assert (unknown.statuses, unknown.payloads) == ([], [])
        taken = scheduler.state.drain(2)  # without waiting
        assert (len(taken.statuses), rows(taken)) == (4, 4)
        assert scheduler.state.batches == {}

    stand.run(body)


def test_what_is_cut_off_at_its_time_leaves_nothing_behind(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule(dummies(2, sleep_s=600.0), 2)
        started = time.monotonic()
        result = await scheduler.get_results(2, timeout=1.0)
        assert time.monotonic() - started >= 1.0
        assert result.counts == Counts(2, 0, 0, 2)
        assert len(scheduler.state.running) == len(scheduler.state.pending) == 0
        scheduler.schedule(dummies(2, sleep_s=600.0), 3)
        assert (await scheduler.abort_batch(3, return_partial_tasks=True)).cancelled == 2
        assert len(scheduler.state.running) == len(scheduler.state.pending) == 0

    stand.run(body)


def test_batches_wait_for_lanes_not_for_each_other(stand: Stand) -> None:
    """Batches of 1+3, 2+2 and 3+1 sleepers and quick ones on four lanes."""

    async def body(scheduler: Scheduler) -> None:
        for batch, slow in enumerate((1, 2, 3)):
            scheduler.schedule([*dummies(4 - slow), *dummies(slow, sleep_s=600.0)], batch)
            await tasks_done(scheduler, batch, 4 - slow)
            started = time.monotonic()
            assert len((await scheduler.get_results(batch, timeout=0.5)).statuses) == 4 - slow
            assert time.monotonic() - started >= 0.5
        assert not scheduler.state.running

    stand.run(body)


def test_split_tasks_have_numbers_of_their_own(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        found = []
        for batch, (n, repeat) in enumerate([(4, 8), (4, 5), (3, 1)]):
            scheduler.schedule(dummies(n, repeat), batch)
            found += experiences(await scheduler.get_results(batch, timeout=WAIT_S))
            assert len(found) == (32, 52, 55)[batch]
        assert len({e.eid.tid for e in found}) == 11
        assert len({e.eid.rid for e in found}) == len({e.eid.uid for e in found}) == 55

    stand.run(body, max_repeat_times_per_runner=2)


def test_workflows_that_cannot_repeat_are_reset(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        found = []
        for batch in (1, 2):
            scheduler.schedule(tasks_of("Resettable", 5, 4), batch)
            found += experiences(await scheduler.get_results(batch, timeout=WAIT_S))
        assert len(found) == 40
        made = sum(e.reward == 0.0 for e in found)
        assert 1 <= made <= SLOTS  # one instance a lane at most; every other run was a reset
        assert sum(e.reward == 1.0 for e in found) == 40 - made

    stand.run(body, concurrent_mode="sequential")


def test_asynchronous_workflows_of_several_steps(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        for batch in (1, 2):
            scheduler.schedule(tasks_of("ThreeSteps", 5, 4), batch)
        for batch in (1, 2):
            found = experiences(await scheduler.get_results(batch, timeout=WAIT_S))
            assert Counter(e.eid.step for e in found) == {0: 20, 1: 20, 2: 20}
            assert len({e.eid.rid for e in found}) == 20

    stand.run(body)


def test_over_rollout_waits_a_little_for_more_than_it_needs(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        sleeps = (0.1, 0.1, 0.6, 600.0)
        scheduler.schedule([t for s in sleeps for t in dummies(1, sleep_s=s)], 1)
        result = await scheduler.get_results(1, min_num=2, timeout=WAIT_S)
        assert (len(result.statuses), rows(result)) == (3, 3)

    stand.run(body, over_rollout__wait_after_min_s=4.0)


def test_over_rollout_keeps_the_finished_runs_of_a_group_it_cuts(
    stand: Stand, tmp_path: Path
) -> None:
    async def body(scheduler: Scheduler) -> None:
        group = tasks_of("FirstRunOnly", 1, 2, note=str(tmp_path / "first"))
        scheduler.schedule([*dummies(1, 2), *group], 1)
        await until(tmp_path / "first")
        result = await scheduler.get_results(1, min_num=1, timeout=WAIT_S)
        assert result.counts == Counts(4, 3, 0, 1)
        assert rows(result) == 3

    stand.run(body, over_rollout__wait_after_min_s=2.0, max_repeat_times_per_runner=1)


@pytest.mark.parametrize("mode", ["sequential", "asynchronous"])
def test_over_rollout_asks_a_running_group_for_the_runs_it_has(
    stand: Stand, tmp_path: Path, mode: str
) -> None:
    async def body(scheduler: Scheduler) -> None:
        group = tasks_of("OneReturns", 1, 4, note=str(tmp_path / "first"))
        scheduler.schedule([*dummies(1, 4), *group], 1)
        await until(tmp_path / "first")
        result = await scheduler.get_results(1, min_num=1, timeout=WAIT_S)
        assert result.counts == Counts(8, 5, 0, 3)
        assert rows(result) == 5

    stand.run(body, over_rollout__wait_after_min_s=0.5, concurrent_mode=mode)


def test_the_dynamic_timeout_ends_what_takes_unusually_long(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        evals = dummies(4, sleep_s=0.1)
        for task in evals:
            task.is_eval = True
        scheduler.schedule(evals, "0/eval")
        assert len((await scheduler.get_results("0/eval", timeout=WAIT_S)).statuses) == 4
        pace = scheduler.state.pace
        assert (pace.total_running_time_s, pace.total_completed_sub_tasks) == (0.0, 0)
        scheduler.schedule(dummies(4, sleep_s=0.8), 1)
        assert len((await scheduler.get_results(1, timeout=WAIT_S)).statuses) == 4
        assert 2.4 <= pace.limit_s() < 60.0
        scheduler.schedule(dummies(4, sleep_s=600.0), 2)
        result = await scheduler.get_results(2, timeout=WAIT_S)
        assert result.counts == Counts(4, 0, 4, 0)
        assert rows(result) == 0
        scheduler.schedule(dummies(4, sleep_s=1.0), 3)  # longer than the mean
        assert rows(await scheduler.get_results(3, timeout=WAIT_S)) == 4

    stand.run(body, dynamic_timeout__enable=True, max_retry_times=0)


def test_runner_states_tell_what_runs_where(stand: Stand, tmp_path: Path) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.set_slots(1)  # everything on one runner
        seen = []
        for batch, repeat in enumerate((2, 3)):
            scheduler.schedule(dummies(1, repeat, sleep_s=0.3, notes=str(tmp_path)), batch)
            await until(tmp_path / f"started-{batch}-0")
            (lane,) = (lane for lane, state in scheduler.lanes.states().items() if state)
            seen.append(scheduler.lanes.states()[lane])
            await scheduler.get_results(batch, timeout=WAIT_S)
            assert scheduler.lanes.states()[lane]["terminate_time"] is not None
        assert [s["workflow_id"] for s in seen] == ["0/0/0", "1/0/0"]
        assert [s["repeat_cnt"] for s in seen] == [2, 3]
        assert [s["terminate_time"] for s in seen] == [None, None]
        assert seen[0]["begin_time"] < seen[1]["begin_time"]
        assert all(s["running_time"] >= 0.0 for s in seen)
        assert len(scheduler.lanes.states()) == SLOTS + RUNNER_LANES

    stand.run(body)


def test_fault_03_what_raises_returns_nothing_or_cancels_itself_is_counted_and_replaced(
    stand: Stand, tmp_path: Path
) -> None:
    async def body(scheduler: Scheduler) -> None:
        odd = [
            task
            for how in ("raise", "none", "cancel")
            for task in tasks_of("Odd", 1, how=how, note=str(tmp_path / how))
        ]
        scheduler.schedule([*tasks_of("Odd", 61), *odd], 1)
        result = await scheduler.get_results(1, timeout=WAIT_S)
        assert result.counts == Counts(64, 64, 0, 0), result.first_error
        assert result.retries == 3

    stand.run(body, partial_group="replace")


def test_engines_of_unequal_speed_finish_a_batch_together(stand: Stand) -> None:
    """Once the speeds are known. Equal shares would take twice the shortest time."""
    n = 32

    async def body(scheduler: Scheduler) -> None:
        for batch in (1, 2):
            started = time.monotonic()
            scheduler.schedule(tasks_of("AtEngineSpeed", n), batch)
            result = await scheduler.get_results(batch, timeout=WAIT_S)
            took = time.monotonic() - started
        seconds = requests_of(result)
        mean = [statistics.mean(each) for each in seconds]
        shortest = shortest_s(n, SLOTS_PER_ENGINE, mean)
        # as the shares alone would have it: a busy machine delays every task, and skews nothing
        rounds = [math.ceil(len(each) / SLOTS_PER_ENGINE) for each in seconds]
        assert max(r * m for r, m in zip(rounds, mean, strict=True)) <= 1.15 * shortest, seconds
        assert took <= 1.6 * shortest, (took, shortest)

    stand.run(body)


def requests_of(result: BatchResult) -> list[list[float]]:
    """Seconds of each request, engine by engine."""
    found: list[list[float]] = [[], []]
    for status in result.statuses:
        found[int(status.metrics[0]["engine"])].append(status.metrics[0]["seconds"])
    return found


def test_fault_10_a_workflow_asleep_in_c_is_killed_and_its_neighbour_runs_again(
    stand: Stand, tmp_path: Path
) -> None:
    async def body(scheduler: Scheduler) -> None:
        (stuck,) = tasks_of("AsleepInC", 1, notes=str(tmp_path))
        (neighbour,) = tasks_of("AsleepInC", 1, notes=str(tmp_path), once=True)
        scheduler.schedule([stuck], 1)
        await one_of(tmp_path, "pid-*-1")
        await asyncio.sleep(2.5)  # the neighbour's own time must not be over as well
        scheduler.schedule([neighbour], 2)
        first = await scheduler.get_results(1, timeout=WAIT_S)
        assert first.counts == Counts(1, 0, 1, 0)
        second = await scheduler.get_results(2, timeout=WAIT_S)
        assert second.counts == Counts(1, 1, 0, 0), second.first_error
        assert second.retries == 0
        assert len(list(tmp_path.glob("pid-*-2"))) == 2  # in the reborn process as well

    stand.run(body, max_timeout_s=5.0, max_retry_times=0)


# last in the file: it takes the engines' workers away
def test_fault_13_a_worker_killed_in_the_middle_costs_one_retry_of_what_it_ran(
    stand: Stand, tmp_path: Path
) -> None:
    pid = stand.pid(1)

    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule(dummies(SLOTS, 2, sleep_s=1.5, notes=str(tmp_path)), 1)
        for task in range(SLOTS):
            await until(tmp_path / f"started-1-{task}")
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        # nobody brings the engine back: the other one does its work
        result = await scheduler.get_results(1, timeout=WAIT_S)
        assert result.counts == Counts(2 * SLOTS, 2 * SLOTS, 0, 0), result.first_error
        assert (result.retries, rows(result)) == (2, 2 * SLOTS)
        assert time.monotonic() - killed < 60.0
        # when it is back, it waits until it is opened, and costs nobody an attempt
        ref = await asyncio.to_thread(stand.start_engine, 1)
        await scheduler.wait_for_lanes(stand.lanes, WAIT_S)
        scheduler.schedule(tasks_of("AtEngineSpeed", 24), 2)
        result = await scheduler.get_results(2, timeout=WAIT_S)
        assert result.counts == Counts(24, 24, 0, 0)
        assert {s.metrics[0]["engine"] for s in result.statuses} == {0.0, 1.0}
        assert result.retries == 0
        del ref

    stand.run(body)

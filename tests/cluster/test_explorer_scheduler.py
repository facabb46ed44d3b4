"""The scheduler on real Dask workers with fake engines.

Invariant: times are upper bounds with plenty of room, or taken from events; no test relies
on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from explorer_workflows import SchedulerHost
from scheduler_stand import (
    SLOTS,
    WAIT_S,
    Stand,
    dummies,
    experiences,
    rows,
    tasks_done,
    until,
    workflow,
)

from trinity_dask.cluster import call, start_actor
from trinity_dask.demo.tokenizer import ascii_tokenizer
from trinity_dask.experience.schema import decode
from trinity_dask.explorer.schedule.scheduler import Scheduler
from trinity_dask.explorer.schedule.tasks import Counts
from trinity_dask.workflows import Task

BLOCKING, ANSWERING = workflow("Blocking"), workflow("Answering")


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(tmp_path_factory.mktemp("job"))
    yield stand
    stand.cluster.close()


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tokenizer"))
    ascii_tokenizer().save_pretrained(path)
    return path


def test_results_of_a_batch_are_taken_once(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule(dummies(8), 0)
        assert 0 in scheduler.state.batches
        first = await scheduler.get_results(0, timeout=WAIT_S)
        assert [s.ok for s in first.statuses] == [True] * 8
        assert rows(first) == 8
        assert 0 not in scheduler.state.batches
        again = await scheduler.get_results(0, timeout=WAIT_S)
        assert again.statuses == []
        assert (await scheduler.get_results(99)).statuses == []

    stand.run(body)


def test_batches_do_not_mix(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        for batch in (1, 2, 3):
            scheduler.schedule(dummies(4), batch)
        for batch in (3, 1, 2):
            result = await scheduler.get_results(batch, timeout=WAIT_S)
            assert len(result.statuses) == 4
            assert {e.eid.batch for e in experiences(result)} == {batch}

    stand.run(body)


@pytest.mark.parametrize(("n", "repeat", "split", "sub_tasks"), [(4, 8, 2, 16), (4, 5, 2, 12)])
def test_groups_are_split_and_numbered(
    stand: Stand, n: int, repeat: int, split: int, sub_tasks: int
) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule(dummies(n, repeat), 1)
        result = await scheduler.get_results(1, timeout=WAIT_S)
        assert len(result.statuses) == n
        assert len(result.payloads) == sub_tasks
        found = experiences(result)
        assert len({e.eid.rid for e in found}) == len({e.eid.uid for e in found}) == n * repeat
        assert {e.eid.run for e in found} == set(range(repeat))

    stand.run(body, max_repeat_times_per_runner=split)


def test_fault_03_failures_are_counted_and_cancel_no_sibling(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([*dummies(1), *dummies(3, **{"raise": True})], 1)
        result = await scheduler.get_results(1, timeout=WAIT_S)
        assert sum(s.ok for s in result.statuses) == 1
        assert rows(result) == 1
        assert result.counts == Counts(4, 1, 3, 0)
        assert result.failures == {"RuntimeError": 3}
        assert "this task raises" in str(result.first_error)
        assert result.retries == 3

    stand.run(body)


def test_a_failure_that_passes_is_tried_again(stand: Stand, tmp_path: Path) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule(dummies(1, 4, fail_once=str(tmp_path / "failed")), 1)
        result = await scheduler.get_results(1, timeout=WAIT_S)
        assert result.counts == Counts(4, 4, 0, 0)
        assert result.retries == 1

    stand.run(body)


def test_a_timeout_cancels_the_rest_and_frees_its_slots(stand: Stand, tmp_path: Path) -> None:
    async def body(scheduler: Scheduler) -> None:
        slow = dummies(SLOTS - 2, sleep_s=600.0, notes=str(tmp_path))
        scheduler.schedule([*dummies(2), *slow], 1)
        await until(tmp_path / "started-1-2")
        await tasks_done(scheduler, 1, 2)
        result = await scheduler.get_results(1, timeout=0.2)
        assert len(result.statuses) == 2
        assert result.counts == Counts(SLOTS, 2, 0, SLOTS - 2)
        # all slots are usable again: this batch needs every one of them at once
        scheduler.schedule(dummies(SLOTS, sleep_s=0.1), 2)
        result = await scheduler.get_results(2, timeout=WAIT_S)
        assert result.counts == Counts(SLOTS, SLOTS, 0, 0)
        assert not (tmp_path / "ended-1-2").exists()

    stand.run(body)


def test_without_clearing_the_rest_arrives_later(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([*dummies(1), *dummies(1, sleep_s=5.0)], 1)
        await tasks_done(scheduler, 1, 1)
        first = await scheduler.get_results(1, timeout=0.2, clear_timeout_tasks=False)
        assert (len(first.statuses), first.complete) == (1, False)
        second = await scheduler.get_results(1, timeout=WAIT_S)
        assert (len(second.statuses), second.complete) == (1, True)

    stand.run(body)


def test_enough_tasks_end_the_wait(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([*dummies(2), *dummies(1, sleep_s=600.0)], 1)
        result = await scheduler.get_results(1, min_num=2, timeout=WAIT_S, wait_after_min_s=0.2)
        assert len(result.statuses) == 2
        assert result.counts == Counts(3, 2, 0, 1)

    stand.run(body)


def test_it_can_be_stopped_and_started_again(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule(dummies(2), 1)
        assert len((await scheduler.get_results(1, timeout=WAIT_S)).statuses) == 2
        scheduler.schedule(dummies(2, sleep_s=600.0), 2)
        await scheduler.stop()
        assert len(scheduler.state.running) == len(scheduler.state.pending) == 0
        with pytest.raises(RuntimeError, match="not started"):
            scheduler.schedule(dummies(1), 3)
        await scheduler.start()
        with pytest.raises(TimeoutError, match="not 99 lanes after 0 s; workers that are up:"):
            await scheduler.wait_for_lanes(99, timeout=0.0)
        scheduler.schedule(dummies(3, 2), 3)
        assert rows(await scheduler.get_results(3, timeout=WAIT_S)) == 6

    stand.run(body)


def test_fault_02_a_hanging_attempt_costs_its_own_time_only(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([*dummies(3), *dummies(1, sleep_s=600.0)], 1)
        result = await scheduler.get_results(1, timeout=WAIT_S)
        assert result.counts == Counts(4, 3, 1, 0)
        assert result.failures == {"TimeoutError": 1}
        assert result.retries == 1

    stand.run(body, max_timeout_s=2.0)


def test_fault_02_a_blocking_loop_is_ended_and_its_slot_is_usable(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([Task(BLOCKING) for _ in range(SLOTS)], 1)
        result = await scheduler.get_results(1, timeout=WAIT_S)
        assert result.counts == Counts(SLOTS, 0, SLOTS, 0)
        assert result.failures == {"TimeoutError": SLOTS}
        scheduler.schedule(dummies(SLOTS), 2)
        assert len((await scheduler.get_results(2, timeout=WAIT_S)).statuses) == SLOTS

    stand.run(body, max_timeout_s=3.0, max_retry_times=0)


@pytest.mark.parametrize("mode", ["sequential", "asynchronous", "multi-threading"])
def test_workflows_use_the_engine_of_their_worker(
    stand: Stand, tokenizer_dir: str, mode: str
) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule([Task(ANSWERING, repeat_times=3)], 1)
        result = await scheduler.get_results(1, timeout=WAIT_S)
        assert result.counts == Counts(3, 3, 0, 0), result.first_error
        table = decode(result.payloads[0])[0]
        assert table["prompt_length"].to_pylist() == [3, 3, 3]

    stand.run(body, tokenizer_dir, concurrent_mode=mode)


def test_many_callers_at_once(stand: Stand) -> None:
    async def body(scheduler: Scheduler) -> None:
        async def one(batch: int) -> int:
            scheduler.schedule(dummies(3, 2), batch)
            return rows(await scheduler.get_results(batch, timeout=WAIT_S))

        assert await asyncio.gather(*(one(b) for b in range(20))) == [6] * 20

    stand.run(body)


def test_it_works_inside_an_actor_of_the_control_worker(stand: Stand) -> None:
    client = stand.cluster.client
    ref = start_actor(client, SchedulerHost, slot="control", key="host", timeout=WAIT_S)
    tasks = [*dummies(40, 2), *dummies(1, **{"raise": True})]
    cfg = stand.config(max_retry_times=0)
    counts, aborted = call(client, ref.handle, "run", cfg, SLOTS, tasks, timeout=WAIT_S)
    assert counts == Counts(81, 80, 1, 0)
    assert aborted.cancelled == SLOTS


# last in the file: it takes an engine away for good
def test_fault_13_a_killed_worker_costs_the_batch_nothing(stand: Stand, tmp_path: Path) -> None:
    pid = stand.pid(1)

    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule(dummies(SLOTS, 2, sleep_s=1.0, notes=str(tmp_path)), 1)
        for task in range(SLOTS):
            await until(tmp_path / f"started-1-{task}")
        os.kill(pid, signal.SIGKILL)
        # the reborn worker has no engine until this creates it, as the launcher would do
        rebirth = asyncio.ensure_future(asyncio.to_thread(stand.start_engine, 1))
        result = await scheduler.get_results(1, timeout=WAIT_S)
        assert result.counts == Counts(2 * SLOTS, 2 * SLOTS, 0, 0), result.first_error
        assert rows(result) == 2 * SLOTS
        rebirth.cancel()

    stand.run(body)

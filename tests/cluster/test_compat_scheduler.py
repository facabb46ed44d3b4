"""Trinity-RFT's names of the rollout side on live objects: scheduler, runners, coordinator."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from explorer_parts import DUMMY, SLOTS, WAIT_S, make_config, start_cluster

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.config.schema import Config
from trinity_dask.experience.schema import decode, from_table
from trinity_dask.explorer.rollout_coordinator import RolloutCoordinator
from trinity_dask.explorer.scheduler import (
    CompletedTaskResult,
    RunnerWrapper,
    RunningTaskState,
    Scheduler,
    TaskWrapper,
    sort_batch_id,
)
from trinity_dask.explorer.workflow_runner import DebugWorkflowRunner, Status, WorkflowRunner
from trinity_dask.workflows import Task


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster.scheduler_address


def play(address: str, body: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with Client(address, asynchronous=True):
            return await asyncio.wait_for(body(), WAIT_S)

    return asyncio.run(main())


def with_scheduler(address: str, cfg: Config, body: Callable[[Scheduler], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        scheduler = Scheduler(config=cfg)
        await scheduler.start()
        try:
            await scheduler.real.wait_for_lanes(SLOTS, WAIT_S)
            return await body(scheduler)
        finally:
            await scheduler.stop()

    return play(address, whole)


def dummies(n: int, repeat_times: int = 1, **row: Any) -> list[Task]:
    return [Task(DUMMY, raw_task=dict(row), repeat_times=repeat_times) for _ in range(n)]


def rows(payloads: list[bytes]) -> list[Any]:
    return [e for payload in payloads for e in from_table(decode(payload)[0])]


def test_batches_go_through_and_are_taken_once(address: str, tmp_path: Path) -> None:
    cfg = make_config(tmp_path)
    cfg.explorer.max_repeat_times_per_runner = 2

    async def body(scheduler: Scheduler) -> None:
        assert scheduler.running
        assert scheduler.runner_num == len(scheduler.idle_runners) == SLOTS
        assert not scheduler.has_step(1)
        scheduler.schedule(tasks=[], batch_id=1)
        assert not scheduler.has_step(batch_id=1)
        scheduler.schedule(dummies(4, 5), batch_id=1)
        scheduler.schedule(dummies(2), "1/held_out")
        assert scheduler.has_step(1)
        assert scheduler.task_num_map == {1: 4, "1/held_out": 2}
        statuses, payloads = await scheduler.get_payload_results(
            batch_id=1, min_num=None, timeout=60.0, clear_timeout_tasks=True,
            return_partial_tasks=False,
        )  # fmt: skip
        assert [(s.completed_runs, s.total_runs, s.ok) for s in statuses] == [(5, 5, True)] * 4
        assert len({e.eid.rid for e in rows(payloads)}) == 20
        assert len(await scheduler.get_statuses("1/held_out")) == 2
        assert await scheduler.get_payload_results(1) == ([], [])
        assert not scheduler.has_step(1)

    with_scheduler(address, cfg, body)


def test_wait_all_keeps_the_results_and_its_clock_begins_anew_with_each_task(
    address: str, tmp_path: Path
) -> None:
    async def body(scheduler: Scheduler) -> None:
        await scheduler.wait_all()  # nothing there
        scheduler.schedule(dummies(1), 0)  # the first one loads the workflow
        await scheduler.get_statuses(0)
        started = time.monotonic()
        for sleep_s, batch_id in ((0.0, 1), (3.0, 1), (6.0, 2)):
            scheduler.schedule(dummies(1, sleep_s=sleep_s), batch_id)
        await scheduler.wait_all(timeout=5.0)  # 6 s in all, but a task ends every 3 s
        assert time.monotonic() - started > 5.5
        assert scheduler.pending_tasks == scheduler.running_tasks == {}
        assert len((await scheduler.drain_batch_payload_results(batch_id=1))[0]) == 2
        scheduler.discard_completed_results(2)
        assert (await scheduler.drain_batch_payload_results(2)) == ([], [])
        scheduler.schedule(dummies(1, sleep_s=30.0), 3)
        with pytest.raises(TimeoutError, match=r"batches \[3\] are not complete"):
            await scheduler.wait_all(timeout=0.3, clear_timeout_tasks=False)
        assert list(scheduler.running_tasks) == [3]
        with pytest.raises(TimeoutError):
            await scheduler.wait_all(0.3, True)
        assert scheduler.running_tasks == {}

    with_scheduler(address, make_config(tmp_path), body)


def test_a_batch_can_be_aborted_with_or_without_what_is_finished(
    address: str, tmp_path: Path
) -> None:
    async def body(scheduler: Scheduler) -> None:
        for batch_id, keep in ((1, True), (2, False)):
            scheduler.schedule([*dummies(1), *dummies(1, sleep_s=30.0)], batch_id)
            assert len(await scheduler.get_statuses(batch_id, 1, 30.0, False)) == 1
            scheduler.schedule(dummies(1), batch_id)
            while len(scheduler.running_tasks.get(batch_id, [])) != 1:
                await asyncio.sleep(0.02)
            await scheduler.abort_batch(
                batch_id=batch_id, return_partial_tasks=keep, restart_runners=True
            )
            found, _ = await scheduler.drain_batch_payload_results(batch_id)
            assert len(found) == keep
            assert not scheduler.has_step(batch_id)

    cfg = make_config(tmp_path)
    cfg.explorer.over_rollout.wait_after_min_s = 0.0
    with_scheduler(address, cfg, body)


def test_the_tables_show_what_runs_and_what_waits(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule(dummies(SLOTS + 3, sleep_s=1.0), 5)
        assert len(scheduler.pending_tasks[5]) == 3
        wrapper, repeat_times, run_id_base = scheduler.running_tasks[5][0]
        assert (wrapper.batch_id, wrapper.total_runs, repeat_times, run_id_base) == (5, 1, 1, 0)
        assert set(scheduler.busy_runners) == set(range(SLOTS))
        assert scheduler.busy_runners[0].runner_id == 0
        assert scheduler.idle_runners == set()
        runner = scheduler.runners[0]
        assert (runner.runner_id, runner.rollout_model_id, runner.auxiliary_model_ids) == (0, 0, [])
        await runner.update_state()
        assert 0 <= runner.state["running_time"] < 60
        await scheduler.get_statuses(5)
        state = scheduler.get_runner_state(runner_id=0)
        assert {"workflow_id", "begin_time", "terminate_time", "model_version"} <= state.keys()
        assert scheduler.get_runner_state(99) == {}
        assert scheduler.get_all_state().keys() == set(range(SLOTS))
        assert scheduler.get_key_state(key="repeat_cnt") == dict.fromkeys(range(SLOTS), 1)
        assert scheduler.get_key_state("no such key") == {}
        with caplog.at_level("INFO", "trinity_dask.scheduler"):
            scheduler.print_all_state()
        assert caplog.text.count("| 5/") == SLOTS
        assert scheduler.dynamic_timeout() == 60.0
        assert scheduler.dynamic_timeout(timeout=5.0) == 5.0

    with_scheduler(address, make_config(tmp_path), body)


def test_a_runner_runs_a_task_outside_of_any_batch(address: str, tmp_path: Path) -> None:
    cfg = make_config(tmp_path)
    cfg.explorer.max_retry_times = 1

    async def body() -> None:
        runner = RunnerWrapper(3, 0, [], cfg)
        await runner.prepare()
        task = TaskWrapper(task=dummies(1, 4)[0], batch_id=7)
        assert (task.sub_task_num, task.total_runs, task.metrics) == (1, 4, [])
        status, payload, runner_id, seconds = await runner.run_with_retry(task, 2, 6, 30.0, False)
        assert (status.completed_runs, status.total_runs, runner_id) == (2, 2, 3)
        assert status.metrics[-1] == {"time/task_execution": seconds}
        assert [(e.eid.batch, e.eid.run) for e in rows([payload])] == [(7, 6), (7, 7)]
        await runner.update_state()
        assert runner.state["workflow_id"] == "7//6"
        once = {"fail_once": str(tmp_path / "failed")}
        again = TaskWrapper(Task(DUMMY, raw_task=once), 8)
        assert (await runner.run_with_retry(again, 1, 0, 30.0, False))[0].ok
        bad = TaskWrapper(Task(DUMMY, raw_task={"raise": True}), 9)
        status, payload, _, _ = await runner.run_with_retry(bad, 1, 0, 30.0, True)
        assert (status.completed_runs, payload) == (0, b"")
        assert "this task raises" in status.message
        late = TaskWrapper(Task(DUMMY, raw_task={"sleep_s": 30.0}), 10)
        status, _, _, seconds = await runner.run_with_retry(late, 1, 0, 0.3, True)
        assert not status.ok
        assert seconds < 25.0
        await runner.restart_runner()
        assert (await runner.run_with_retry(task, 1, 0, 30.0, False))[0].ok

    play(address, body)


def test_an_execution_of_the_caller_s_own_takes_the_place_of_an_attempt(
    address: str, tmp_path: Path
) -> None:
    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule(dummies(2, sleep_s=40.0), 1)
        wrapper, _, _ = scheduler.running_tasks[1][0]
        wrapper.task.raw_task = {}
        runner = scheduler.runners[7]
        own = asyncio.ensure_future(runner.run_with_retry(wrapper, 1, 0, 30.0, False))
        scheduler.running_task_state_map[own] = RunningTaskState(task=wrapper, runner_id=7)
        own.add_done_callback(scheduler.task_done_callback)
        statuses = await scheduler.get_statuses(1, min_num=1, timeout=30.0)
        assert [status.ok for status in statuses] == [True]
        assert scheduler.running_task_state_map == {}

    cfg = make_config(tmp_path)
    cfg.explorer.over_rollout.wait_after_min_s = 0.0
    with_scheduler(address, cfg, body)


def test_a_workflow_runner_runs_a_task_by_its_engine(address: str, tmp_path: Path) -> None:
    async def body() -> None:
        runner = WorkflowRunner(config=make_config(tmp_path), rollout_model_id=0, runner_id=2)
        await runner.prepare()
        assert runner.is_alive()
        assert (await runner.get_runner_state())["workflow_id"] is None
        status, payload = await runner.run_task(dummies(1)[0], "4", 3, run_id_base=1)
        assert (status.completed_runs, len(rows([payload]))) == (3, 3)
        state = await runner.get_runner_state()
        assert state["workflow_id"] == "4//1"
        assert state["begin_time"] <= state["terminate_time"]
        evaluated = Task(DUMMY, is_eval=True)
        status, payload = await runner.run_task(task=evaluated, batch_id=4)
        assert (status.ok, payload) == (True, b"")
        missing = WorkflowRunner(make_config(tmp_path), 5)
        missing.config.explorer.rollout_model.prepare_timeout_s = 0.2
        with pytest.raises(TimeoutError, match="engine-5"):
            await missing.prepare()

    play(address, body)


def test_a_debug_runner_keeps_what_came_of_the_first_task(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = make_config(tmp_path / "job")
    out = tmp_path / "debug"

    async def body() -> None:
        runner = DebugWorkflowRunner(cfg, output_dir=str(out), enable_profiling=True)
        status, experiences = await runner.debug()
        assert (status.ok, len(experiences)) == (True, 1)
        other = DebugWorkflowRunner(cfg, str(out), False, disable_overwrite=True)
        assert other.output_dir.startswith(f"{out}_")

    play(address, body)
    assert "{'prompt': 'p0'}: 1/1" in capsys.readouterr().out
    assert "run_task" in (out / "profiling.html").read_text()
    with sqlite3.connect(out / "experiences.db") as database:
        found = database.execute("SELECT task_id, reward, consumed FROM debug_buffer").fetchall()
        blobs = database.execute("SELECT bytes FROM debug_buffer_blob").fetchall()
    assert [(reward, consumed) for _, reward, consumed in found] == [(0.0, 0)]
    assert [e.reward for e in rows([blob for (blob,) in blobs])] == [0.0]


def test_a_coordinator_made_from_a_configuration_commits_its_batches(
    address: str, tmp_path: Path
) -> None:
    async def body() -> None:
        coordinator = RolloutCoordinator(config=make_config(tmp_path))
        assert coordinator.scheduler is None
        with pytest.raises(RuntimeError, match="prepare"):
            await coordinator.submit_batch(1, [], "train")
        await coordinator.prepare()
        await coordinator.prepare()
        assert coordinator.running
        await coordinator.submit_batch(
            batch_id=1, tasks=dummies(2, 4), batch_type="train", min_wait_num=None
        )
        with pytest.raises(ValueError, match="active already"):
            await coordinator.submit_batch(1, dummies(1), "train")
        assert coordinator.scheduler.has_step(1)
        result = await coordinator.finalize_train_batch(1, timeout=60.0)
        assert (result["batch_type"], result["finished_task_count"]) == ("train", 2)
        assert result["metrics"]["rollout/finished_task_count"] == 2.0
        with pytest.raises(KeyError):
            await coordinator.finalize_train_batch(1)
        evaluated = [Task(DUMMY, is_eval=True) for _ in range(3)]
        await coordinator.submit_batch("1/held_out", evaluated, "eval")
        with pytest.raises(ValueError, match="is a eval batch"):
            await coordinator.finalize_train_batch("1/held_out")
        result = await coordinator.finalize_eval_batch("1/held_out")
        assert result["metrics"]["eval/held_out/finished_task_count"] == 3.0
        await coordinator.submit_batch(2, dummies(2, sleep_s=30.0), "train")
        await coordinator.abort_batch(2, reason="test", keep_partial_results=True)
        with pytest.raises(KeyError):
            await coordinator.finalize_train_batch(2)
        runner = WorkflowRunner(coordinator.config, 0)
        _, payload = await runner.run_task(dummies(1)[0], 3, 4)
        assert await coordinator.process_experiences(payloads=[]) == {}
        assert await coordinator.process_experiences([payload])
        await coordinator.shutdown()
        assert not coordinator.running
        buffer = ExperienceBuffer(coordinator.config.buffer.trainer_input.experience_buffer)
        await buffer.prepare()
        assert [m.batch_id for m in await buffer.manifests()] == [1]

    play(address, body)


def test_a_coordinator_can_be_an_actor_of_its_own(address: str, tmp_path: Path) -> None:
    with Client(address):
        coordinator = RolloutCoordinator.get_actor(make_config(tmp_path))
        coordinator.prepare.remote().result(WAIT_S)
        coordinator.submit_batch.remote(1, dummies(2, 4), "train").result(WAIT_S)
        result = coordinator.finalize_train_batch.remote(1).result(WAIT_S)
        assert result["finished_task_count"] == 2
        with pytest.raises(KeyError):
            coordinator.finalize_train_batch.remote(1).result(WAIT_S)
        coordinator.shutdown.remote().result(WAIT_S)


def test_records_have_their_known_fields() -> None:
    done = CompletedTaskResult(batch_id=1, task_id=0, status=Status(1, 1, []))
    assert done.experience_payloads == []
    with pytest.raises(AttributeError):
        done.batch_id = 2  # type: ignore[misc]
    wrapper = TaskWrapper(Task(DUMMY, repeat_times=3), 1)
    assert RunningTaskState(wrapper, 4).restart_runner_on_cancel
    assert sorted(["2/a", 3, "x", 2, 1], key=sort_batch_id) == [1, 2, "2/a", 3, "x"]

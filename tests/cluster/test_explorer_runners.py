"""Runner workers and misbehaving user code, on real Dask workers with a fake engine.

Invariant: times are upper bounds with plenty of room; no test relies on how fast the machine
is. One cluster serves the module; a test that has a worker killed leaves it reborn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from trinity_dask.cluster import RunCluster, call, open_cluster, start_actor
from trinity_dask.cluster.runners import kill_runner, runner_addresses
from trinity_dask.cluster.specs import SETTINGS
from trinity_dask.config.schema import Config, GroupConfig
from trinity_dask.experience import Experience
from trinity_dask.experience.schema import decode, from_table
from trinity_dask.explorer.schedule.scheduler import Scheduler
from trinity_dask.explorer.schedule.tasks import BatchResult
from trinity_dask.models.actor.actor import EngineActor
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.workflows import Task

WAIT_S = 90.0
N_RUNNERS, LANES, N_NEIGHBOURS = 2, 2, 8
ENGINE_LANES = 4
FIRST_CALL_S = 3.0
FILE = Path(__file__).with_name("runner_workflows.py")


def named(name: str) -> str:
    return f"{FILE}:{name}"


class Stand:
    """One rollout worker with an engine, two runner workers."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.cluster: RunCluster = open_cluster(self.config())
        spec = EngineSpec("engine-0", "fake", "", {"fake_first_latency_s": FIRST_CALL_S})
        client = self.cluster.client
        made = {"slot": "engine-0", "key": "test-engine-0", "timeout": WAIT_S}
        self.engine = start_actor(client, EngineActor, spec, **made)
        call(client, self.engine.handle, "prepare", timeout=WAIT_S)
        call(client, self.engine.handle, "open", timeout=WAIT_S)

    def config(self, **explorer: Any) -> Config:
        cfg = Config(mode="explore", job_dir=str(self.tmp))
        cfg.cluster.dashboard_address = None
        cfg.cluster.rollout = GroupConfig(n_workers=1, nthreads=ENGINE_LANES)
        cfg.cluster.runner = GroupConfig(n_workers=N_RUNNERS, nthreads=LANES)
        cfg.cluster.trainer.n_workers = 0
        cfg.model.max_response_tokens = 4
        cfg.explorer.max_timeout_s = 60.0
        cfg.explorer.max_retry_times = 0
        cfg.explorer.runner_state_report_interval_s = 0.2
        for key, value in explorer.items():
            setattr(cfg.explorer, key, value)
        return cfg

    def facts(self) -> dict[str, Any]:
        return call(self.cluster.client, self.engine.handle, "describe", timeout=WAIT_S)

    def run(self, body: Callable[[Scheduler], Awaitable[Any]], **explorer: Any) -> Any:
        """``await body(scheduler)`` with explorer settings changed by ``explorer``.

        All workers are up by then: one that came later would find the lanes of the others
        filled with what is meant for it.
        """

        async def main() -> Any:
            address = self.cluster.scheduler_address
            async with Client(address, asynchronous=True) as client:
                scheduler = Scheduler(self.config(**explorer), client=client)
                await scheduler.start()
                try:
                    await scheduler.wait_for_lanes(ENGINE_LANES + N_RUNNERS * LANES, WAIT_S)
                    return await body(scheduler)
                finally:
                    await scheduler.stop()

        return asyncio.run(main())

    def batch(self, tasks: list[Task], **explorer: Any) -> BatchResult:
        """The tasks as one batch; their results."""

        async def body(scheduler: Scheduler) -> BatchResult:
            scheduler.schedule(tasks, 1)
            return await scheduler.get_results(1, timeout=WAIT_S)

        return self.run(body, **explorer)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(tmp_path_factory.mktemp("job"))
    yield stand
    stand.cluster.close()


def tasks_of(workflow: str, n: int = 1, **row: Any) -> list[Task]:
    return [Task(named(workflow), raw_task=dict(row)) for _ in range(n)]


def rewarded(reward: str, **more: Any) -> list[Task]:
    return [Task(named("Scored"), named(reward), {"response": "1"}, **more)]


def experiences(result: BatchResult) -> list[Experience]:
    return [e for payload in result.payloads for e in from_table(decode(payload)[0])]


def test_fault_12_a_first_call_slower_than_any_look_at_the_engine_does_not_cost_it(stand):
    async def body(scheduler: Scheduler) -> BatchResult:
        scheduler.schedule(tasks_of("AsyncSampled"), 1)
        looks, done = 0, asyncio.ensure_future(scheduler.get_results(1, timeout=WAIT_S))
        while not done.done():
            assert scheduler.watch is not None
            await scheduler.watch.look()
            looks += 1
            await asyncio.sleep(0.05)
        assert looks >= 2
        return done.result()

    before = stand.facts()
    result = stand.run(body)
    assert result.counts.succeeded == 1
    assert {k: stand.facts()[k] for k in ("pid", "address")} == {
        k: before[k] for k in ("pid", "address")
    }


def test_blocking_workflows_run_on_runner_workers_and_use_the_same_engine(stand):
    tasks = tasks_of("Sampled", 4) + tasks_of("AsyncSampled", 2)
    found = experiences(stand.batch(tasks))
    assert len(found) == 6
    groups = [e.info["worker"].rpartition("-")[0] for e in found]
    assert sorted(groups) == ["rollout"] * 2 + ["runner"] * 4
    # the fake engine's answer depends on prompt and version only: it is the same engine
    assert len({tuple(e.tokens) for e in found}) == 1
    assert {e.info["model_version"] for e in found} == {0}
    assert all(e.versions is not None and len(e.logprobs) == e.response_length for e in found)


@pytest.mark.parametrize(("run_on", "group"), [("rollout", "rollout"), ("runner", "runner")])
def test_run_on_decides_for_every_workflow(stand, run_on, group):
    found = experiences(stand.batch(tasks_of("Sampled") + tasks_of("AsyncSampled"), run_on=run_on))
    assert {e.info["worker"].rpartition("-")[0] for e in found} == {group}


def test_what_a_runner_does_is_seen_while_it_does_it(stand, tmp_path):
    async def body(scheduler: Scheduler) -> tuple[dict, dict]:
        release = tmp_path / "release"
        scheduler.schedule(tasks_of("Held", release=str(release)), 7)
        seen: dict[str, Any] = {}
        async with asyncio.timeout(WAIT_S):
            while not seen.get("worker"):  # comes from the worker itself
                (seen,) = scheduler.lanes.busy(9) or [{}]
                await asyncio.sleep(0.02)
            release.touch()
            await scheduler.get_results(7)
        return seen, scheduler.lanes.states()[seen["runner_id"]]

    during, after = stand.run(body)
    assert during["workflow_id"] == after["workflow_id"] == "7/0/0"
    assert during["terminate_time"] is None
    assert during["repeat_cnt"] == 1
    assert after["phase"] == "done"
    assert after["model_version"] == 0
    assert after["terminate_time"] >= after["begin_time"] > 0


def test_fault_02_a_blocking_workflow_is_killed_with_its_runner_and_neighbours_run_again(
    stand, tmp_path
):
    """One that blocks for ever on each runner worker, beside ones that take longer in all than
    its deadline: the kill hits some of them.

    There are no retries: a neighbour that was charged an attempt would be lost.
    """

    async def body(scheduler: Scheduler) -> tuple[BatchResult, BatchResult]:
        before = await runner_addresses(scheduler._client)
        for_ever = tasks_of("Slow", N_RUNNERS, sleep_s=3600, notes=str(tmp_path))
        scheduler.schedule(for_ever, 1)
        scheduler.schedule(tasks_of("Slow", N_NEIGHBOURS, sleep_s=2.5, notes=str(tmp_path)), 2)
        neighbours = await scheduler.get_results(2, timeout=WAIT_S)
        stuck = await scheduler.get_results(1, timeout=WAIT_S)
        assert set(before) == {"runner-0", "runner-1"}
        async with asyncio.timeout(WAIT_S):  # until both are back, at new addresses
            after = before
            while set(after) != set(before) or set(after.values()) & set(before.values()):
                await asyncio.sleep(0.05)
                after = await runner_addresses(scheduler._client)
        return stuck, neighbours

    stuck, neighbours = stand.run(body, max_timeout_s=8.0)
    assert stuck.counts.failed == N_RUNNERS
    assert "cannot be interrupted" in str(stuck.first_error) or "no report" in str(
        stuck.first_error
    )
    assert neighbours.counts.succeeded == N_NEIGHBOURS
    assert len(list(tmp_path.iterdir())) > N_RUNNERS + N_NEIGHBOURS  # some began twice
    later = stand.batch(tasks_of("Sampled", N_RUNNERS * LANES))
    assert later.counts.succeeded == N_RUNNERS * LANES


@pytest.mark.parametrize(
    ("workflow", "row"),
    [
        ("NeverAwakes", {}),
        ("Spinning", {}),
        ("HoldsLoop", {"how": "spin"}),
        ("HoldsLoop", {"how": "sleep"}),
    ],
)
def test_fault_02_by_its_engine_a_workflow_that_never_returns_ends_at_its_deadline(
    stand, workflow, row
):
    async def body(scheduler: Scheduler) -> tuple[BatchResult, BatchResult]:
        scheduler.schedule(tasks_of(workflow, **row), 1)
        scheduler.schedule(tasks_of("AsyncSampled", 3), 2)
        others = await scheduler.get_results(2, timeout=WAIT_S)
        return others, await scheduler.get_results(1, timeout=WAIT_S)

    before = stand.facts()
    others, stuck = stand.run(body, run_on="rollout", max_timeout_s=1.5)
    assert others.counts.succeeded == 3
    assert stuck.counts.failed == 1
    assert "Time" in str(stuck.first_error) or "LoopBlocked" in str(stuck.first_error)
    assert stand.facts()["pid"] == before["pid"]


def test_by_its_engine_a_thread_that_cannot_be_stopped_is_counted_and_left_behind(stand, tmp_path):
    async def body(scheduler: Scheduler) -> tuple[BatchResult, dict[int, Any]]:
        scheduler.schedule(tasks_of("Slow", sleep_s=20, notes=str(tmp_path)), 1)
        stuck = await scheduler.get_results(1, timeout=WAIT_S)
        seen = scheduler.lanes.states().items()
        return stuck, {lane: s["abandoned_threads"] for lane, s in seen if s}

    before = stand.facts()
    stuck, abandoned = stand.run(body, run_on="rollout", max_timeout_s=0.5)
    assert stuck.failures == {"StuckThread": 1}
    assert list(abandoned.values()) == [1]
    assert stand.facts()["pid"] == before["pid"]


def test_fault_06_a_reward_that_holds_the_loop_is_seen_and_costs_neither_heartbeat_nor_run(
    stand, caplog
):
    """Scaled from 60 s to 3 s; what protects the worker is the scheduler's patience."""
    assert SETTINGS["distributed.scheduler.worker-ttl"] == "30 minutes"

    async def body(scheduler: Scheduler) -> tuple[BatchResult, dict[str, float]]:
        assert scheduler.watch is not None
        scheduler.watch.take_lag()
        scheduler.schedule(rewarded("holds_loop", reward_fn_args={"hold_s": 3.0}), 1)
        result = await scheduler.get_results(1, timeout=WAIT_S)
        await scheduler.watch.look()
        return result, scheduler.watch.take_lag()

    before = stand.facts()
    with caplog.at_level(logging.WARNING, logger="trinity_dask.watch"):
        result, lag = stand.run(body)
    assert result.counts.succeeded == 1
    assert lag["explorer/loop_lag_s"] > 2.0
    assert any("event loop of rollout-0 is late" in r.getMessage() for r in caplog.records)
    assert "holds_loop" in (stand.tmp / "log" / "rollout-0.log").read_text()
    assert stand.facts()["pid"] == before["pid"]


def test_fault_10_rewards_that_use_alarms_loop_or_leave(stand):
    timeout = {"workflow_args": {"reward_timeout_s": 1.0}}
    apart = {"workflow_args": {"reward_timeout_s": 30.0, "reward_in_process": True}}
    tasks = [
        *rewarded("alarms"),
        *rewarded("stray_alarm"),
        *rewarded("loops_for_ever", **timeout),
        *rewarded("exits_hard", **apart),
    ]
    before = stand.facts()
    result = stand.batch(tasks)
    assert (result.counts.succeeded, result.counts.failed) == (1, 3)
    assert result.failures == {"AlarmRefused": 1, "RewardError": 1, "HelperDied": 1}
    assert stand.facts()["pid"] == before["pid"]


def test_only_runner_workers_can_be_killed(stand):
    async def body(scheduler: Scheduler) -> None:
        with pytest.raises(ValueError, match="not a runner worker"):
            await kill_runner(scheduler._client, "engine-0")
        with pytest.raises(ValueError, match="no worker 'runner-7'"):
            await kill_runner(scheduler._client, "runner-7")

    stand.run(body)


def test_a_cancelled_workflow_aborts_its_request_at_the_engine(stand):
    """From a runner worker: the engine must not go on sampling for nobody."""

    async def running() -> float:
        stats = call(stand.cluster.client, stand.engine.handle, "stats", timeout=WAIT_S)
        return float(stats["running"])

    async def body(scheduler: Scheduler) -> None:
        scheduler.schedule(tasks_of("AsyncSampled", 2, sleep_s=600), 1)
        async with asyncio.timeout(WAIT_S):
            while len(scheduler.lanes.busy(9)) < 2:
                await asyncio.sleep(0.02)
        await scheduler.abort_batch(1)
        scheduler.schedule(tasks_of("AsyncSampled", 2), 2)
        assert (await scheduler.get_results(2, timeout=WAIT_S)).counts.succeeded == 2

    stand.run(body, run_on="runner")
    deadline = time.monotonic() + WAIT_S
    while asyncio.run(running()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert asyncio.run(running()) == 0


def test_explorers_share_the_lanes_of_runners_and_waiting_there_costs_nothing(stand, tmp_path):
    """Each of four believes that all lanes are its own: what the last one sends waits at the
    workers for longer than an attempt may take."""
    n, sleep_s, limit_s = N_RUNNERS * LANES, 2.0, 5.0

    async def main() -> list[BatchResult]:
        address = stand.cluster.scheduler_address
        async with Client(address, asynchronous=True) as client:
            cfg = stand.config(max_timeout_s=30.0)
            explorers = [Scheduler(cfg, client=client) for _ in range(4)]
            try:
                for scheduler in explorers:
                    await scheduler.start()
                    await scheduler.wait_for_lanes(ENGINE_LANES + n, WAIT_S)
                    state = scheduler.state  # its own deadline is tried, not the worker's
                    state.policy = replace(state.policy, attempt_slack_s=limit_s - 30.0)
                    scheduler.schedule(tasks_of("Slow", n, sleep_s=sleep_s, notes=str(tmp_path)), 1)
                return await asyncio.gather(*(s.get_results(1, timeout=WAIT_S) for s in explorers))
            finally:
                await asyncio.gather(*(s.stop() for s in explorers))

    before = asyncio.run(addresses(stand))
    found = asyncio.run(main())
    assert [(r.counts.succeeded, r.failures) for r in found] == [(n, {})] * 4
    assert len(list(tmp_path.iterdir())) == 4 * n  # each was begun once
    assert asyncio.run(addresses(stand)) == before  # no worker was killed


async def addresses(stand: Stand) -> dict[str, str]:
    async with Client(stand.cluster.scheduler_address, asynchronous=True) as client:
        return await runner_addresses(client)

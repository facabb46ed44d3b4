"""Engines join and leave while the run goes on; one that dies in a broadcast costs a retry."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from elastic_actors import ElasticHost, Shape

from trinity_dask.cluster import ClusterError, RunCluster, call, start_actor
from trinity_dask.cluster import stop_actor as release

WAIT_S = 200.0
pytestmark = pytest.mark.timeout(600)


class Live:
    """A run on the cluster; ``ask`` calls its host."""

    def __init__(self, cluster: RunCluster, shape: Shape, job: Path) -> None:
        self.client = cluster.client
        key = f"host-{job.name}"
        self.ref = start_actor(self.client, ElasticHost, slot="control", key=key, timeout=WAIT_S)
        self.ask("start", shape, str(job), key)

    def ask(self, method: str, *args: Any) -> Any:
        return call(self.client, self.ref.handle, method, *args, timeout=WAIT_S)

    def until(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The facts as soon as they are ``true``; the run must be at work all the time."""
        deadline = time.monotonic() + WAIT_S
        while True:
            facts = self.ask("facts")
            assert facts["failure"] == "None"
            if true(facts):
                return facts
            assert time.monotonic() < deadline, facts
            time.sleep(0.02)

    def new_version(self) -> dict[str, Any]:
        before = self.ask("facts")["version"]
        return self.until(lambda facts: facts["version"] > before + 1)

    def end(self, engines: list[str]) -> None:
        told = self.ask("finish")
        assert told["versions"] == dict.fromkeys(engines, told["step"])

    def close(self) -> None:
        self.ask("close")
        release(self.ref)


@pytest.fixture
def live(cluster: RunCluster, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Live]:
    run = Live(cluster, getattr(request, "param", Shape()), tmp_path)
    yield run
    run.close()


@pytest.mark.parametrize("live", [Shape("nccl"), Shape("memory")], indirect=True)
def test_an_engine_joins_with_the_current_weights_and_leaves_and_the_run_goes_on(
    cluster: RunCluster, live: Live
) -> None:
    before = live.until(lambda facts: facts["version"] >= 2)
    assert before["slots"] == ["engine-0", "engine-1"]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(live.ask, "first_token", "engine-2")
        cluster.scale("rollout", 3)
        chosen_by, served = first.result(WAIT_S)
    assert chosen_by >= served >= before["version"]
    live.until(lambda facts: facts["ready"] == 3)
    grown = live.new_version()
    assert grown["slots"] == ["engine-0", "engine-1", "engine-2"]
    if grown["generation"]:  # method nccl
        assert grown["members"] == grown["slots"]
        assert grown["generation"] > before["generation"]

    cluster.scale("rollout", 2)
    live.until(lambda facts: facts["slots"] == ["engine-0", "engine-1"])
    shrunk = live.new_version()  # nobody waits for the one that has left
    assert shrunk["step"] > grown["step"]
    if shrunk["generation"]:
        assert shrunk["members"] == ["engine-0", "engine-1"]
    live.end(["engine-0", "engine-1"])


def test_a_rank_that_dies_inside_a_broadcast_costs_one_retry(live: Live) -> None:
    before = live.until(lambda facts: facts["version"] >= 1)
    live.ask("kill_in_next_broadcast", "engine-1")
    died = live.until(lambda facts: facts["restarts"] == 1)
    live.until(lambda facts: facts["version"] > died["version"])  # with engine-0 alone
    back = live.until(lambda facts: facts["ready"] == 2)
    assert back["generation"] > before["generation"]
    assert live.new_version()["failed"] == 1
    live.end(["engine-0", "engine-1"])


@pytest.mark.parametrize("live", [Shape("nccl", n_engines=1)], indirect=True)
def test_one_that_dies_while_it_gets_its_weights_is_born_once_more(live: Live) -> None:
    """Whichever side of the group reports the loss."""
    live.until(lambda facts: facts["version"] >= 1)
    live.ask("kill_reborn_in_their_broadcast", 2)
    live.ask("kill_in_next_broadcast", "engine-0")
    live.until(lambda facts: facts["restarts"] == 3)
    live.until(lambda facts: facts["ready"] == 1)
    live.new_version()
    live.end(["engine-0"])


@pytest.mark.parametrize("live", [Shape("memory", max_restarts=1)], indirect=True)
def test_an_engine_that_dies_again_and_again_is_left_out(live: Live) -> None:
    live.until(lambda facts: facts["ready"] == 2)
    for _ in range(2):
        live.until(lambda facts: facts["ready"] == 2)
        os.kill(live.ask("engine", "engine-1")["pid"], signal.SIGKILL)
        live.until(lambda facts: facts["ready"] == 1)
    live.new_version()
    assert live.ask("facts")["slots"] == ["engine-0"]
    live.end(["engine-0"])


def test_only_what_is_ours_and_elastic_is_scaled(cluster: RunCluster) -> None:
    with pytest.raises(ClusterError, match="group 'trainer' is not elastic; rollout and runner"):
        cluster.scale("trainer", 2)
    with pytest.raises(ClusterError, match="needs a rollout worker"):
        cluster.scale("rollout", 0)

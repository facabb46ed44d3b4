"""Slots, specs and claims, without a cluster."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from trinity_dask.cluster import warden
from trinity_dask.cluster.claims import Member, plan_claims
from trinity_dask.cluster.rpc import ActorHandle, ActorLost
from trinity_dask.cluster.slots import LABEL_AMOUNT, group_resources, slot_of, slot_resource
from trinity_dask.cluster.specs import needed_workers, worker_options
from trinity_dask.config.schema import ClusterConfig, Config, GroupConfig


def member(name: str, nthreads: int = 2, **resources: float) -> Member:
    return Member(f"nanny-{name}", name, nthreads, resources)


def test_resources_of_each_group() -> None:
    assert group_resources("control", 0, GroupConfig()) == {
        "slot:control": LABEL_AMOUNT,
        "control": 1.0,
    }
    assert group_resources("rollout", 2, GroupConfig(nthreads=8, gpus_per_worker=1)) == {
        "slot:engine-2": LABEL_AMOUNT,
        "rollout": 8.0,
        "GPU": 1.0,
    }
    trainer = group_resources("trainer", 1, GroupConfig(nthreads=4))
    assert trainer == {"slot:trainer-1": LABEL_AMOUNT, "trainer": 1.0}
    assert group_resources("runner", 4, GroupConfig(nthreads=3)) == {
        "slot:runner-4": LABEL_AMOUNT,
        "runner": 3.0,
    }
    with pytest.raises(ValueError, match=r"'engines'.*control"):
        slot_of("engines", 0)


def test_needed_workers_follow_the_modes() -> None:
    cfg = Config()
    cfg.cluster.trainer.n_workers = 2
    assert needed_workers(cfg) == {"control": 1, "trainer": 2, "rollout": 1}
    cfg.mode = "train"
    assert needed_workers(cfg) == {"control": 1, "trainer": 2}
    cfg.mode = "explore"
    assert needed_workers(cfg) == {"control": 1, "rollout": 1}
    cfg.stages = [{"mode": "train"}, {"mode": "both"}]
    assert needed_workers(cfg) == {"control": 1, "trainer": 2, "rollout": 1}


def test_worker_options_carry_the_group() -> None:
    cfg = Config(job_dir="somewhere")
    cfg.cluster.trainer = GroupConfig(nthreads=3, omp_threads=2, env={"A": "b"})
    options = worker_options(cfg, "trainer", 1, "/scratch")
    assert options["name"] == "trainer-1"
    assert options["nthreads"] == 3
    assert options["env"]["OMP_NUM_THREADS"] == "2"
    assert options["env"]["A"] == "b"
    assert options["env"]["TRINITY_DASK_LOG_DIR"] == os.path.abspath("somewhere/log")


def test_claims_go_to_the_control_group_first() -> None:
    needed = {"control": 1, "trainer": 1, "rollout": 2}
    found = [member("0"), member("1"), member("2", nthreads=5)]
    plan = plan_claims(found, needed, ClusterConfig())
    assert [sorted(r)[-1] for r in plan.claims.values()] == [
        "slot:control",
        "trainer",
        "slot:engine-0",
    ]
    assert plan.claims["nanny-2"]["rollout"] == 5.0
    assert not plan.complete
    assert str(plan) == "control 1 of 1, trainer 1 of 1, rollout 1 of 2"


def test_labelled_workers_keep_their_role() -> None:
    needed = {"control": 1, "rollout": 2, "runner": 1}
    found = [
        member("a", **{slot_resource("engine-1"): 1e6, "rollout": 4.0}),
        member("b", **{slot_resource("runner-0"): 1e6, "runner": 1.0}),
        member("c"),
        member("d"),
        member("e"),
    ]
    plan = plan_claims(found, needed, ClusterConfig())
    assert plan.complete
    assert set(plan.claims) == {"nanny-c", "nanny-d"}
    assert slot_resource("control") in plan.claims["nanny-c"]
    assert slot_resource("engine-0") in plan.claims["nanny-d"]


def test_a_lost_actor_error_travels_and_names_slot_and_method() -> None:
    handle = ActorHandle("key", "tcp://127.0.0.1:1", "engine-3")
    error = pickle.loads(pickle.dumps(ActorLost(handle, "generate", OSError("gone"))))
    assert error.handle == handle
    assert error.method == "generate"
    assert "'engine-3'" in str(error)
    assert "gone" in str(error)


SLEEPER = "import sys, time; print('up', flush=True); time.sleep(600)"


def start_sleeper(**options: object) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, start_new_session=True, **options
    )  # type: ignore[call-overload]
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_the_warden_finds_descendants_by_group_and_by_mark() -> None:
    worker = start_sleeper()
    elsewhere = start_sleeper(env={**os.environ, warden.MARK: "token-1"})
    stranger = start_sleeper(env={**os.environ, warden.MARK: "token-2"})
    processes = [worker, elsewhere, stranger]
    try:
        found = set(warden.descendants(worker.pid, "token-1"))
        assert found == {worker.pid, elsewhere.pid}
        command = [sys.executable, "-I", "-S", warden.__file__, str(worker.pid), "0", "token-1"]
        with subprocess.Popen(command) as guard:
            worker.kill()
            worker.wait(30)
            assert guard.wait(30) == 0
        assert elsewhere.wait(30) == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait(30)


def test_the_warden_ends_a_worker_that_outlives_its_parent() -> None:
    worker = start_sleeper()
    parent = start_sleeper()
    command = [sys.executable, "-I", "-S", warden.__file__]
    try:
        with subprocess.Popen([*command, str(worker.pid), str(parent.pid), "x"]) as guard:
            parent.kill()
            parent.wait(30)
            started = time.monotonic()
            assert worker.wait(30) == -signal.SIGKILL
            assert guard.wait(30) == 0
            assert time.monotonic() - started < 30
    finally:
        for process in (worker, parent):
            process.kill()
            process.wait(30)

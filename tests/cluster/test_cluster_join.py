"""Joining clusters that others started: claims, refusals, workers added by hand."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from cluster_actors import Control, Counter, quick, wait_for_cancel
from distributed import Client, LocalCluster, Worker

from trinity_dask.cluster import ClusterError, RunCluster, call, open_cluster, start_actor
from trinity_dask.cluster.placement import LEAVING, TOPIC
from trinity_dask.cluster.slots import slot_resource
from trinity_dask.config.schema import Config, GroupConfig

WAIT_S = 60.0
ANY_PORT = "127.0.0.1:0"
ROOT = Path(__file__).parent.parent.parent


def joining_config(rollouts: int = 1) -> Config:
    cfg = Config(mode="explore")
    cfg.cluster.type = "address"
    cfg.cluster.start_timeout_s = 0.5
    cfg.cluster.rollout = GroupConfig(n_workers=rollouts, nthreads=64)
    return cfg


@pytest.fixture(scope="module")
def plain() -> Iterator[LocalCluster]:
    """A cluster as a notebook user has it: workers without roles."""
    with LocalCluster(
        n_workers=2, threads_per_worker=2, dashboard_address=ANY_PORT, memory_limit=0
    ) as cluster:
        yield cluster


def roles(client: Client) -> list[str]:
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    return sorted(
        name for w in workers for name, n in w["resources"].items() if n and "slot:" in name
    )


def test_plain_workers_are_claimed_and_given_back(plain: LocalCluster) -> None:
    with Client(plain) as client:
        with open_cluster(joining_config(), client) as cluster:
            assert not cluster.owns_workers
            assert roles(client) == ["slot:control", "slot:engine-0"]
            ref = start_actor(client, Counter, slot="engine-0", key="claimed", timeout=WAIT_S)
            child = call(client, ref.handle, "start_grandchild", False, timeout=WAIT_S)
            # the threads that the worker has bound the tasks that it takes
            tasks = client.submit(quick, resources={"rollout": 2})
            assert tasks.result(timeout=WAIT_S) == "done"
        assert client.status == "running"
        assert roles(client) == []
        assert not psutil.pid_exists(child)
        assert client.submit(quick).result(timeout=WAIT_S) == "done"


def test_a_claimed_worker_keeps_its_role_when_it_is_born_again(plain: LocalCluster) -> None:
    with Client(plain) as client, open_cluster(joining_config(), client):
        control = start_actor(client, Control, slot="control", key="owner", timeout=WAIT_S)
        handle = call(client, control.handle, "make", Counter, "engine-0", "again", timeout=WAIT_S)
        os.kill(call(client, handle, "pid", timeout=WAIT_S), signal.SIGKILL)
        # a task that waits for the role while nobody has it
        waiting = client.submit(quick, resources={"rollout": 1}, pure=False)
        reborn = call(client, control.handle, "recreate", WAIT_S, timeout=WAIT_S)
        assert call(client, reborn, "add", 1, timeout=WAIT_S) == 1
        assert waiting.result(timeout=WAIT_S) == "done"


def test_an_address_is_joined(plain: LocalCluster) -> None:
    cfg = joining_config()
    cfg.cluster.address = plain.scheduler_address
    with open_cluster(cfg) as cluster:
        assert roles(cluster.client) == ["slot:control", "slot:engine-0"]
    assert cluster.client.status == "closed"


def test_too_few_workers_are_counted(plain: LocalCluster) -> None:
    with (
        Client(plain) as client,
        pytest.raises(ClusterError, match=r"control 1 of 1, rollout 1 of 3") as caught,
    ):
        open_cluster(joining_config(rollouts=3), client)
    assert "trinity-dask worker tcp://" in str(caught.value)
    assert "--group rollout --index 1" in str(caught.value)


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_dask.cluster.build.CONNECT_TIMEOUT_S", 1)
    cfg = joining_config()
    cfg.cluster.address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(ClusterError, match="no Dask scheduler answers"):
        open_cluster(cfg)
    cfg.cluster.address = None
    with pytest.raises(ClusterError, match=r"cluster\.address=tcp://host:port"):
        open_cluster(cfg)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("key", ["scheduler_port", "dashboard_address"])
def test_a_port_in_use_is_named(key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cfg = Config(mode="explore")
        value = port if key == "scheduler_port" else f"127.0.0.1:{port}"
        setattr(cfg.cluster, key, value)
        with pytest.raises(ClusterError, match=rf"cluster\.{key}: cannot listen on port {port}"):
            open_cluster(cfg)


def test_cancelling_a_task_stops_its_coroutine(plain: LocalCluster, tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    with Client(plain) as client, open_cluster(joining_config(), client):
        future = client.submit(wait_for_cancel, str(started), str(ended), pure=False)
        wait_for_file(started)
        future.cancel()
        wait_for_file(ended)


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.02)


WORKER = """
import sys
from trinity_dask.cluster.worker_cli import run_worker
from trinity_dask.config.schema import Config
if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], sys.argv[2], int(sys.argv[3]), Config(job_dir=sys.argv[4])))
"""


@pytest.fixture
def worker_script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def test_workers_added_by_hand_have_their_role_and_end_with_a_signal(
    worker_script: Path, tmp_path: Path
) -> None:
    with (
        LocalCluster(n_workers=0, dashboard_address=ANY_PORT) as empty,
        Client(empty) as client,
    ):
        processes = [
            start_worker(worker_script, empty.scheduler_address, group, tmp_path)
            for group in ("control", "rollout")
        ]
        cfg = joining_config()
        cfg.cluster.start_timeout_s = WAIT_S
        with open_cluster(cfg, client) as cluster:
            check_workers(cluster, tmp_path)
        processes[0].send_signal(signal.SIGTERM)
        processes[1].send_signal(signal.SIGINT)
        assert [p.wait(WAIT_S) for p in processes] == [130, 130]


def test_sigterm_to_every_process_of_a_worker_by_hand_lets_it_hand_back(tmp_path: Path) -> None:
    """As Slurm sends it. The run hears that it leaves while its worker is still there."""
    command = [sys.executable, "-m", "trinity_dask", "worker"]
    heard: list[tuple[str, str]] = []
    with (
        LocalCluster(n_workers=0, dashboard_address=ANY_PORT) as empty,
        Client(empty) as client,
        subprocess.Popen(
            [*command, empty.scheduler_address, "--group", "rollout", "--index", "0"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            start_new_session=True,
        ) as process,
    ):
        try:
            client.wait_for_workers(1, WAIT_S)
            (address,) = client.scheduler_info()["workers"]
            tree = [psutil.Process(process.pid)]
            tree += tree[0].children(recursive=True)
            assert len(tree) > 1
            for each in tree:
                with suppress(psutil.NoSuchProcess):
                    each.terminate()
            assert process.wait(WAIT_S) == 130
            events = client.get_events(TOPIC)
            heard += [(e["action"], e["worker"]) for _, e in events if "worker" in e]
            assert heard.index((LEAVING, address)) < heard.index(("remove-worker", address))
            assert psutil.wait_procs(tree, timeout=WAIT_S)[1] == []
        finally:
            process.kill()


def start_worker(script: Path, address: str, group: str, job: Path) -> subprocess.Popen[bytes]:
    path = f"{ROOT}:{Path(__file__).parent}"
    return subprocess.Popen(
        [sys.executable, str(script), address, group, "0", str(job)],
        env={**os.environ, "PYTHONPATH": path},
    )


def check_workers(cluster: RunCluster, job: Path) -> None:
    assert roles(cluster.client) == ["slot:control", "slot:engine-0"]
    ref = start_actor(cluster.client, Counter, slot="engine-0", key="hand", timeout=WAIT_S)
    assert call(cluster.client, ref.handle, "worker_name", timeout=WAIT_S) == "rollout-0"
    assert (job / "log" / "rollout-0.log").exists()


def test_workers_inside_the_driver_work_too() -> None:
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=ANY_PORT) as inside,
        Client(inside) as client,
        open_cluster(joining_config(), client),
    ):
        control = start_actor(client, Control, slot="control", key="inner", timeout=WAIT_S)
        handle = call(client, control.handle, "make", Counter, "engine-0", "in", timeout=WAIT_S)
        assert call(client, control.handle, "ask", handle, "add", 4, timeout=WAIT_S) == 4
        with Client(inside) as other:
            resources = other.run(worker_resources).values()
        assert any(slot_resource("engine-0") in names for names in resources)


def worker_resources(dask_worker: Worker) -> list[str]:
    return list(dask_worker.state.total_resources)

"""A control worker that was cut off from its scheduler and comes back: by then another launch of
its run has the job, and it does no harm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import chaos_jobs as jobs
import psutil
import pytest
from distributed import Client, LocalCluster

from trinity_dask import Run, load_config
from trinity_dask.cluster.specs import SETTINGS
from trinity_dask.run import session

WAIT_S = 240.0
STEPS = 40


class Workers:
    """``trinity-dask worker`` by hand."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.all: list[subprocess.Popen[str]] = []

    def start(self, group: str) -> subprocess.Popen[str]:
        words = ["worker", self.address, "--group", group, "--index", "0"]
        process = subprocess.Popen(
            [sys.executable, "-m", "trinity_dask", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            text=True,
        )
        self.all.append(process)
        return process

    def end(self) -> None:
        for process in self.all:
            for each in jobs.Job(process).processes():
                each.kill()
            process.wait(WAIT_S)


@pytest.fixture
def client() -> Iterator[Client]:
    import dask

    with (
        dask.config.set(SETTINGS),
        LocalCluster(
            n_workers=0, processes=False, dashboard_address=None, protocol="tcp://"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def until(seen: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not seen():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_launcher_that_comes_back_after_another_took_over_writes_nothing(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "CALL_TIMEOUT_S", 5.0)
    workers = Workers(client.scheduler.address)
    overrides = [
        *("+experiment=sort_digits_tiny", "engine=torch", f"checkpoint_root_dir={tmp_path}"),
        *("monitor.curves=false", *jobs.shape(STEPS)),
    ]
    try:
        control = workers.start("control")
        for group in ("trainer", "rollout"):
            workers.start(group)
        client.wait_for_workers(3, timeout=WAIT_S)
        with Run(load_config(*overrides), client) as run:
            until(
                lambda: run.status.get("stage") == "grpo" and (run.status.get("step") or 0) >= 4,
                f"never at work: {run.status}",
            )
            stopped = jobs.Job(control).processes()
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            known = client.scheduler_info(n_workers=-1)["workers"]
            (address,) = [a for a, worker in known.items() if "control" in str(worker["name"])]
            cut_off(client, address)
            workers.start("control")
            until(lambda: run._relaunches == 1, f"not launched again: {run.status}")
            until(
                lambda: (run.status.get("step") or 0) >= 8 and run.state == "running",
                f"not at work again: {run.status}",
            )
            for process in stopped:
                process.send_signal(signal.SIGCONT)
            status = run.wait(WAIT_S)
        assert status["state"] == "done", status
        until(
            lambda: (
                not psutil.pid_exists(control.pid) or control.poll() is not None or idle(stopped)
            ),
            "the old launcher does not end",
        )
        jobs.check_lineage(jobs.stage_dir(tmp_path, "grpo"), STEPS)
    finally:
        workers.end()


def cut_off(client: Client, address: str) -> None:
    """The scheduler loses a worker, as when its connection breaks; the worker is told nothing."""

    async def lose(dask_scheduler) -> None:  # type: ignore[no-untyped-def]
        await dask_scheduler.remove_worker(address, stimulus_id="cut off", close=False)

    client.run_on_scheduler(lose)


def idle(processes: list[psutil.Process]) -> bool:
    """The worker's process of the first launch is gone; its nanny may live."""
    return any(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)

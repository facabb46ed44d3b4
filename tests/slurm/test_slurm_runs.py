"""Runs whose workers are jobs of a real Slurm: refused, waiting, losing their jobs, killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from make_notebooks import HERE, execute, notebook_of, outputs
from slurm_driver import START_S, Driver
from slurm_stand import Slurm, until

from trinity_dask import Run
from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.launcher.accounts import BatchAccounts

pytestmark = pytest.mark.timeout(280)


def test_a_partition_that_is_not_there_is_a_mistake_of_the_configuration(
    drive: Callable[..., Driver],
) -> None:
    driver = drive("cluster.rollout.partition=nosuch")
    assert driver.end(START_S) == 2, driver.output
    assert "Invalid partition name specified" in driver.output
    assert "rollout-0" in driver.output
    assert "Traceback" not in driver.output
    until(lambda: driver.slurm.queue() == {}, "empty queue")


def test_who_waits_in_the_queue_is_told_why_and_may_leave(drive: Callable[..., Driver]) -> None:
    driver = drive("cluster.rollout.partition=closed")
    driver.says("rollout-0 PENDING (PartitionDown)")
    begin = time.monotonic()
    driver.process.send_signal(signal.SIGUSR1)
    assert driver.end(60) == 130, driver.output
    assert time.monotonic() - begin < 30
    until(lambda: driver.slurm.queue() == {}, "empty queue")


def test_a_job_that_dies_at_its_start_shows_what_it_said(drive: Callable[..., Driver]) -> None:
    driver = drive('cluster.prologue=["echo no such module; exit 3"]')
    assert driver.end(START_S) == 1, driver.output
    assert "no such module" in driver.output
    assert "ended while it started: FAILED" in driver.output
    until(lambda: driver.slurm.queue() == {}, "empty queue")


def test_jobs_of_every_group_are_lost_and_the_run_goes_on_to_its_end(
    drive: Callable[..., Driver],
) -> None:
    steps, rounds = 90, 3
    driver = drive(
        f"buffer.total_steps={steps}", "trainer.save_interval=1", "cluster.rollout.n_workers=2",
        "cluster.tls=true", "cluster.rollout.gpus_per_worker=0", "cluster.rollout.gres=gpu:1",
        "cluster.rollout.partition=low", "cluster.max_resubmits=5",
    )  # fmt: skip
    slurm = driver.slurm
    driver.until_step(1)
    attached = Run.attach(str(driver.job))  # by the certificate that lies there
    assert attached.status["n_stages"] == 1
    attached.close()
    assert re.search("^  state: running$", status_of(driver), re.MULTILINE)
    for worker in ("rollout-1", "trainer-0", "control-0") * rounds:
        driver.lose(worker, lambda job: slurm.run("scancel", job))
    # who comes from a partition of more weight takes the GPUs: warned, and replaced when it leaves
    hog = ["--partition=main", "--nodes=2", "--gres=gpu:2", "--output=/dev/null"]
    hog += ["--wrap=sleep 600"]
    hog = driver.lose("rollout-0", lambda _: slurm.run("sbatch", "--parsable", *hog).strip())
    until(lambda: re.search("rollout-0 is over: (PREEMPTED|COMPLETED)", driver.output), "warning")
    until(lambda: slurm.queue()[hog][1] == "RUNNING", "preemption", 60)
    slurm.run("scancel", hog)
    driver.until_step(driver.step() + 1)
    node = slurm.run("squeue", "-h", "-j", driver.running("trainer-0"), "-o", "%N").strip()
    state = ["scontrol", "update", f"NodeName={node}"]
    driver.lose("trainer-0", lambda _: slurm.run(*state, "State=DOWN", "Reason=test"))
    slurm.run(*state, "State=RESUME", check=False)  # it may have come back by itself
    until(lambda: not {"down", "down*"} & set(slurm.node_states()), "node that is up", 60)
    assert driver.end() == 0, driver.output[-3000:]
    store = ExperienceStore(str(driver.job / "buffer" / "experience"))
    manifests = store.manifests()
    total = sum((BatchAccounts.from_meta(m.meta) for m in manifests), BatchAccounts())
    assert [m.batch_id for m in manifests] == list(range(1, steps + 1))
    assert total.errors("lineage") == []
    key = next(driver.job.glob("slurm/*/tls/key.pem"))
    assert key.stat().st_mode & 0o777 == 0o600
    until(lambda: slurm.queue() == {}, "empty queue")
    assert status_of(driver).startswith("not running")


def status_of(driver: Driver) -> str:
    command = [sys.executable, "-m", "trinity_dask", "status", str(driver.job)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_job_that_waits_too_long_ends_the_start(drive: Callable[..., Driver]) -> None:
    driver = drive("cluster.rollout.partition=closed", "cluster.pending_timeout_s=2")
    assert driver.end(START_S) == 1, driver.output
    told = "1 workers: rollout-0 PENDING (PartitionDown)"
    assert f"jobs still wait after cluster.pending_timeout_s=2: {told}" in driver.output
    until(lambda: driver.slurm.queue() == {}, "empty queue")


def test_a_worker_that_is_lost_too_often_ends_the_run_with_its_state(
    drive: Callable[..., Driver],
) -> None:
    driver = drive("buffer.total_steps=100000", "cluster.max_resubmits=0")
    driver.until_step(1)
    driver.slurm.run("scancel", driver.running("rollout-0"))
    assert driver.end(120) == 1, driver.output[-3000:]
    told = r"rollout-0 was lost 1 times \(cluster.max_resubmits=0\), last: CANCELLED"
    assert re.search(told, driver.output), driver.output[-3000:]
    until(lambda: driver.slurm.queue() == {}, "empty queue", 60)


@pytest.mark.parametrize("at_work", [False, True])
def test_a_driver_that_is_killed_leaves_no_job(drive: Callable[..., Driver], at_work: bool) -> None:
    driver = drive(*([] if at_work else ["cluster.rollout.partition=closed"]))
    driver.until_step(1) if at_work else driver.says("PENDING")
    os.kill(driver.process.pid, signal.SIGKILL)
    until(lambda: driver.slurm.queue() == {}, "empty queue", 120)


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGUSR1, "preparing data"), (signal.SIGTERM, "starting engines and trainer")],
)
def test_a_run_that_is_warned_while_it_starts_leaves_at_once(
    drive: Callable[..., Driver], number: int, moment: str
) -> None:
    driver = drive()
    driver.says(moment)
    begin = time.monotonic()
    driver.process.send_signal(number)
    assert driver.end(60) == 130, driver.output[-3000:]
    seconds = time.monotonic() - begin
    assert seconds < 30, driver.output[-3000:]
    assert "Traceback" not in driver.output
    until(lambda: driver.slurm.queue() == {}, "empty queue")


def doctor(slurm: Slurm, *words: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "trinity_dask", "doctor", "+experiment=sort_task"]
    command += ["engine=torch", "cluster=slurm", *words]
    told = subprocess.run(command, env=slurm.env, capture_output=True, text=True, timeout=200)
    assert told.stderr == ""
    until(lambda: slurm.queue() == {}, "empty queue")
    return told.returncode, told.stdout.splitlines()


def test_doctor_says_which_jobs_slurm_would_take(slurm: Slurm) -> None:
    words = ["cluster.trainer.partition=nosuch", "cluster.rollout.gpus_per_worker=1"]
    code, lines = doctor(slurm, "cluster.partition=main", *words)
    assert code == 1
    [refused] = [line for line in lines if "is refused" in line]
    assert "a job of trainer" in refused
    assert "--partition=nosuch" in refused
    assert any("a job of rollout would be taken: --gres=gpu:1" in line for line in lines)
    assert any("partition closed: down" in line for line in lines)


def test_doctor_looks_from_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    code, lines = doctor(slurm, f"checkpoint_root_dir={tmp_path}", "--wait", "60")
    assert code == 0
    for node in ("n0", "n1"):
        assert any(line.startswith(f"ok       node {node} reaches this") for line in lines), lines
        assert f"ok       node {node} has the same packages" in lines
    for found in ("renamed files are seen", "O_EXCL", "flock", "n0 to n1: ", "clock of n1"):
        assert any(line.startswith("ok ") and found in line for line in lines), found
    assert list(tmp_path.iterdir()) == []


def test_doctor_says_when_no_node_was_free(slurm: Slurm) -> None:
    code, lines = doctor(slurm, "cluster.partition=closed", "--wait", "2")
    assert code == 0
    [line] = [line for line in lines if "no node could be looked at" in line]
    assert "ask again with --wait SECONDS" in line


def test_the_notebook_about_clusters_has_slurm_start_its_workers(
    slurm: Slurm, tmp_path: Path
) -> None:
    notebook = notebook_of(HERE / "04_on_a_cluster.py")
    execute(notebook, tmp_path, slurm.env)
    said = "".join(o.text for o in outputs(notebook) if o.get("name") == "stdout")
    assert said.count("RUNNING") == 3, said
    assert "\ndone\n" in said
    until(lambda: slurm.queue() == {}, "empty queue", 60)

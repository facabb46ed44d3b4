"""Runs whose workers are jobs of a real Slurm: refused, waiting, losing their jobs, killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slurm_stand import Slurm, until

from trinity_dask import Run
from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.launcher.accounts import BatchAccounts
from trinity_dask.trainer.checkpoints.checkpoint import WEIGHTS, latest_complete

pytestmark = pytest.mark.timeout(280)
START_S = 120.0
RUN_S = 240.0
BIT_BY_BIT = [
    "explorer.rollout_model.deterministic=true",
    "algorithm.optimizer.lr=0.02",  # weights that move
    "algorithm.optimizer.lr_warmup_steps=0",
]


class Driver:
    """``trinity-dask run`` with cluster=slurm, as a user starts it on a login node."""

    def __init__(
        self,
        slurm: Slurm,
        root: Path,
        *overrides: str,
        within: Sequence[str] = (),
        command: str = "run",
        name: str = "job",
        cluster: str = "slurm",
    ) -> None:
        self.slurm, self.root, self.name = slurm, root, name
        self._out = root / f"{name}.out"
        words = [
            *(command, "+experiment=sort_task", "engine=torch", f"cluster={cluster}"),
            *(
                f"name={name}",
                "monitor.progress=plain",
                "monitor.sinks=[jsonl]",
                "monitor.curves=false",
            ),
            *("algorithm.repeat_times=4", "buffer.batch_size=4", "explorer.eval_interval=0"),
            *("explorer.eval_on_startup=false", "explorer.eval_at_end=false"),
            f"checkpoint_root_dir={root}",
            *overrides,
        ]
        environment = {**slurm.env, "OMP_NUM_THREADS": "1"}
        with open(self._out, "w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", "trinity_dask", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._out.read_text(encoding="utf-8")

    @property
    def job(self) -> Path:
        return self.root / "trinity-dask" / self.name

    def says(self, text: str, timeout_s: float = START_S) -> None:
        until(lambda: text in self.output or self._ended(), f"{text!r}", timeout_s)
        assert text in self.output, self.output[-3000:]

    def _ended(self) -> bool:
        return self.process.poll() is not None

    def step(self) -> int:
        """The newest train step that is on disk."""
        try:
            lines = (self.job / "monitor" / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return max((row["step"] for row in rows if row["role"] == "trainer"), default=0)

    def until_step(self, step: int) -> None:
        until(lambda: self.step() >= step or self._ended(), f"step {step}", RUN_S)
        assert not self._ended() or self.step() >= step, self.output[-3000:]

    def running(self, worker: str) -> str:
        """The job of a worker, as soon as it runs."""
        until(lambda: self.slurm.job_of(worker) or self._ended(), f"job of {worker}", START_S)
        job = self.slurm.job_of(worker)
        assert job is not None, self.output[-3000:]
        return job

    def lose(self, worker: str, end: Callable[[str], Any]) -> Any:
        """Have Slurm end the job of a worker in mid-run, and wait until another one runs."""
        self.until_step(self.step() + 1)
        job = self.running(worker)
        answer = end(job)
        until(lambda: self.slurm.job_of(worker) != job or self._ended(), f"end of {worker}", 60)
        return answer

    def end(self, timeout_s: float = RUN_S) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        if not self._ended():
            self.process.kill()
            self.process.wait()


@pytest.fixture
def drive(slurm: Slurm, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def start(*overrides: str, **options: Any) -> Driver:
        started.append(Driver(slurm, tmp_path, *overrides, **options))
        return started[-1]

    yield start
    for driver in started:
        driver.kill()
    until(lambda: slurm.queue() == {}, "empty queue", 60)


def test_a_partition_that_is_not_there_is_a_mistake_of_the_configuration(
    drive: Callable[..., Driver],
) -> None:
    driver = drive("cluster.rollout.partition=nosuch")
    assert driver.end(START_S) == 2, driver.output
    assert "Invalid partition name specified" in driver.output
    assert "rollout-0" in driver.output
    assert "Traceback" not in driver.output
    assert driver.slurm.queue() == {}


def test_who_waits_in_the_queue_is_told_why_and_may_leave(drive: Callable[..., Driver]) -> None:
    driver = drive("cluster.rollout.partition=closed")
    driver.says("rollout-0 PENDING (PartitionDown)")
    begin = time.monotonic()
    driver.process.send_signal(signal.SIGUSR1)
    assert driver.end(60) == 130, driver.output
    assert time.monotonic() - begin < 30
    assert driver.slurm.queue() == {}


def test_a_job_that_dies_at_its_start_shows_what_it_said(drive: Callable[..., Driver]) -> None:
    driver = drive('cluster.prologue=["echo no such module; exit 3"]')
    assert driver.end(START_S) == 1, driver.output
    assert "no such module" in driver.output
    assert "ended while it started: FAILED" in driver.output
    assert driver.slurm.queue() == {}


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
    for worker in ("rollout-1", "trainer-0", "control-0") * rounds:
        driver.lose(worker, lambda job: slurm.run("scancel", job))
    # who comes from a partition of more weight takes the GPUs: warned, and replaced when it leaves
    hog = ["--partition=main", "--nodes=2", "--gres=gpu:2", "--wrap=sleep 600"]
    hog = driver.lose("rollout-0", lambda _: slurm.run("sbatch", "--parsable", *hog).strip())
    until(lambda: re.search("rollout-0 is over: (PREEMPTED|COMPLETED)", driver.output), "warning")
    until(lambda: slurm.queue()[hog][1] == "RUNNING", "preemption", 60)
    slurm.run("scancel", hog)
    driver.until_step(driver.step() + 1)
    node = slurm.run("squeue", "-h", "-j", driver.running("trainer-0"), "-o", "%N").strip()
    state = ["scontrol", "update", f"NodeName={node}"]
    driver.lose("trainer-0", lambda _: slurm.run(*state, "State=DOWN", "Reason=test"))
    slurm.run(*state, "State=RESUME")
    assert driver.end() == 0, driver.output[-3000:]
    store = ExperienceStore(str(driver.job / "buffer" / "experience"))
    manifests = store.manifests()
    total = sum((BatchAccounts.from_meta(m.meta) for m in manifests), BatchAccounts())
    assert [m.batch_id for m in manifests] == list(range(1, steps + 1))
    assert total.errors("lineage") == []
    key = next(driver.job.glob("slurm/*/tls/key.pem"))
    assert key.stat().st_mode & 0o777 == 0o600
    until(lambda: slurm.queue() == {}, "empty queue")


def test_in_an_allocation_workers_are_steps_and_a_lost_one_is_started_again(
    drive: Callable[..., Driver],
) -> None:
    steps = 8
    salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=4"]
    driver = drive(f"buffer.total_steps={steps}", within=salloc)
    driver.until_step(2)
    [job] = driver.slurm.queue()
    shown = driver.slurm.run("squeue", "-h", "-s", "-j", job, "-o", "%i %j").splitlines()
    named = {name.split("-", 2)[-1]: step for step, name in map(str.split, shown) if "td-" in name}
    assert set(named) == {"control-0", "rollout-0", "trainer-0"}
    driver.slurm.run("scancel", named["rollout-0"])
    assert driver.end() == 0, driver.output[-3000:]
    assert driver.step() == steps


def test_a_driver_that_is_killed_leaves_no_job(drive: Callable[..., Driver]) -> None:
    driver = drive("cluster.rollout.partition=closed")
    driver.says("PENDING")
    os.kill(driver.process.pid, signal.SIGKILL)
    until(lambda: driver.slurm.queue() == {}, "empty queue", 60)


def reached(driver: Driver, step: int) -> bool:
    return driver.step() >= step


def test_a_submitted_run_that_is_queued_again_twice_is_the_run_that_never_was(
    drive: Callable[..., Driver],
) -> None:
    words = ["buffer.total_steps=8", *BIT_BY_BIT]
    submitted = drive(*words, command="submit")
    assert submitted.end(START_S) == 0, submitted.output
    slurm, job = submitted.slurm, submitted.output.split()[1]
    log = submitted.job / "log" / f"submit-{job}.log"
    for step in (2, 5):
        until(partial(reached, submitted, step), f"step {step} in {log}", RUN_S)
        slurm.run("scancel", "--batch", "--signal=USR1", job)
        until(partial(slurm.only_waits, job), f"requeued driver alone, {log}", 60)
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    until(lambda: slurm.queue() == {}, f"end of {log}", RUN_S)
    assert submitted.step() == 8, log.read_text()[-3000:]
    assert log.read_text().count("SIGTERM: saving the state") == 2

    plain = drive(*words, name="plain", cluster="local")
    assert plain.end() == 0, plain.output[-3000:]
    found, expected = (load_file(latest_complete(d.job) / WEIGHTS) for d in (submitted, plain))
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_a_run_stops_itself_before_its_allocation_ends(drive: Callable[..., Driver]) -> None:
    salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=4", "--time=1"]
    driver = drive("buffer.total_steps=100000", within=salloc)
    assert driver.end(100) == 130, driver.output[-3000:]
    assert "the job ends at" in driver.output
    assert latest_complete(driver.job) is not None
    assert "Traceback" not in driver.output


def test_doctor_says_which_jobs_slurm_would_take(slurm: Slurm) -> None:
    words = ["+experiment=sort_task", "engine=torch", "cluster=slurm", "cluster.partition=main"]
    words += ["cluster.trainer.partition=nosuch", "cluster.rollout.gpus_per_worker=1"]
    command = [sys.executable, "-m", "trinity_dask", "doctor", *words]
    told = subprocess.run(command, env=slurm.env, capture_output=True, text=True, timeout=200)
    assert told.returncode == 1, told.stderr
    lines = told.stdout.splitlines()
    [refused] = [line for line in lines if "is refused" in line]
    assert "a job of trainer" in refused
    assert "--partition=nosuch" in refused
    assert any("a job of rollout would be taken: --gres=gpu:1" in line for line in lines)
    assert any("partition closed: down" in line for line in lines)
    assert slurm.queue() == {}

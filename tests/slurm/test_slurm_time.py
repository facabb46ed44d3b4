"""Runs in Slurm that end before their time is over and go on in the next, grow, and shrink."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slurm_driver import RUN_S, START_S, Driver
from slurm_stand import Slurm, until

import trinity_dask
from trinity_dask import Run
from trinity_dask.monitor.history import load_metrics
from trinity_dask.trainer.checkpoints.checkpoint import WEIGHTS, latest_complete

pytestmark = pytest.mark.timeout(280)
BIT_BY_BIT = [
    "explorer.rollout_model.deterministic=true",
    "algorithm.optimizer.lr=0.02",  # weights that move
    "algorithm.optimizer.lr_warmup_steps=0",
]


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


def test_one_srun_is_driver_and_workers(drive: Callable[..., Driver]) -> None:
    # of two components, as of a node without and one with GPUs: ranks are numbered through
    salloc = ["salloc", "--quiet", "-n2", "-wn0", ":", "-n2", "-wn1"]
    srun = [*salloc, "srun", "--quiet", "--het-group=0,1"]
    driver = drive("buffer.total_steps=8", "cluster.tls=true", within=srun, cluster="srun")
    assert driver.end() == 0, driver.output[-3000:]
    assert driver.step() == 8
    assert driver.output.count("before / after") == 1  # of the driver alone
    until(lambda: driver.slurm.queue() == {}, "empty queue", 60)


def test_one_srun_of_too_few_tasks_says_how_many(drive: Callable[..., Driver]) -> None:
    driver = drive(within=["srun", "--quiet", "--ntasks=3"], cluster="srun")
    assert driver.end(START_S) != 0
    assert "cluster=srun has 3 tasks and needs 4: srun -n 4 (the driver, 1 control" in driver.output
    until(lambda: driver.slurm.queue() == {}, "empty queue", 60)


def test_all_tasks_of_one_srun_are_told_to_end_and_the_state_is_saved(
    drive: Callable[..., Driver],
) -> None:
    srun = ["salloc", "--quiet", "--ntasks=4", "srun", "--quiet"]
    driver = drive("buffer.total_steps=100000", within=srun, cluster="srun")
    driver.until_step(2)
    [job] = driver.slurm.queue()
    driver.slurm.run("scancel", "--signal=TERM", job)  # every process of its steps
    driver.end(60)
    assert "SIGTERM: saving the state" in driver.output
    assert "interrupted by SIGTERM" in driver.output, driver.output[-3000:]
    assert latest_complete(driver.job) is not None


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
        slurm.start_again(job)
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


def test_engines_that_come_and_go_cost_no_attempt(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PATH", "SLURM_CONF", "LD_LIBRARY_PATH"):
        if name in slurm.env:
            monkeypatch.setenv(name, slurm.env[name])
    cfg = trinity_dask.load_config(
        *("+experiment=sort_task", "engine=torch", "cluster=slurm", "monitor=quiet", "name=job"),
        *("algorithm.repeat_times=4", "buffer.batch_size=16", "explorer.eval_interval=0"),
        *("explorer.eval_on_startup=false", "explorer.eval_at_end=false"),
        *("explorer.max_retry_times=0", "buffer.total_steps=100000"),
        "cluster.dashboard_address=127.0.0.1:0",
        f"checkpoint_root_dir={tmp_path}",
    )

    def engines() -> int:
        return (run.status.get("workers") or {}).get("engines", 0)

    def shown() -> dict[str, Any]:
        with urllib.request.urlopen(f"{run.page_link}/api/runs", timeout=30) as answer:
            (found,) = json.load(answer)
        return found

    with Run(cfg) as run:
        for n_workers in (1, 3, 1):
            until(lambda: run.status.get("step") or run.state == "failed", "step", START_S)
            run.scale("rollout", n_workers)
            until(partial(lambda n: engines() == n, n_workers), f"{n_workers} engines", 60)
            begun = run.status["step"]
            until(partial(lambda b: run.status["step"] > b + 2, begun), "steps", 60)
        run.stop()
        status = run.wait(60)
        until(lambda: shown()["state"] == "interrupted", "end on the dashboard's page", 60)
        seen = shown()
    assert status["state"] == "interrupted", status
    # the dashboard's page of this cluster shows the same, and which of the engines has stayed
    assert seen["status"]["accounts"] == status["accounts"]
    states = [engine["state"] for engine in seen["engines"].values()]
    assert states.count("serving") == 1, states
    assert set(states) <= {"serving", "lost"}, states  # who left may still come back
    accounts = status["accounts"]
    assert (accounts["failed"], accounts["cancelled"]) == (0, 0)
    assert accounts["scheduled"] == accounts["succeeded"] == accounts["committed"]
    retries = load_metrics(str(cfg.job_dir))["rollout/retries"].dropna()
    assert len(retries) > 6
    assert retries.sum() == 0
    until(lambda: slurm.queue() == {}, "empty queue", 60)

"""Explorers and a trainer as runs of their own, on one scheduler, found by the run's name."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import trinity_dask
from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.cli import main as cli
from trinity_dask.dashboard.plugin import feeds_of
from trinity_dask.launcher.job_lock import JobInUse, is_locked
from trinity_dask.run import Run, RunFailed
from trinity_dask.trainer.checkpoints.checkpoint import latest_complete

WAIT_S = 240.0
STEPS = 3


class Job:
    """Runs of one name on one cluster."""

    def __init__(self, address: str, root: Path, data: Path) -> None:
        self.address, self.root, self.data = address, root, data
        self.runs: list[Run] = []

    def run(self, *overrides: str) -> Run:
        cfg = trinity_dask.load_config(
            "+experiment=sort_task",
            "engine=torch",
            "cluster=address",
            f"cluster.address={self.address}",
            f"checkpoint_root_dir={self.root}",
            "name=x",
            "prepare=null",
            f"prepare_args.dir={self.data}",
            "algorithm.repeat_times=4",
            "buffer.batch_size=4",
            f"buffer.total_steps={STEPS}",
            "explorer.eval_interval=0",
            "explorer.eval_on_startup=false",
            "synchronizer.sync_timeout_s=600",
            "monitor.sinks=[jsonl]",
            *overrides,
        )
        run = Run(cfg)
        self.runs.append(run)
        return run.start()

    def close(self) -> None:
        for run in self.runs:
            run.close()

    def manifests(self) -> list[Any]:
        return ExperienceStore(f"{self.root}/trinity-dask/x/buffer/experience").manifests()


@pytest.fixture
def job(cluster: LocalCluster, tmp_path: Path, data: Path) -> Iterator[Job]:
    found = Job(cluster.scheduler_address, tmp_path, data)
    yield found
    found.close()


def wait_until(run: Run, what: str, ready: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not ready(run.status):
        assert time.monotonic() < deadline, f"no {what}: {run.status}"
        assert run.state not in ("failed", "interrupted"), run.status
        run.wait_for_change(int(run.status["version"]), 5.0)


@pytest.mark.timeout(600)
def test_a_trainer_and_an_explorer_find_each_other(job: Job, cluster: LocalCluster) -> None:
    trainer = job.run("mode=train")
    explorer = job.run("mode=explore")
    ends = [run.wait(timeout=WAIT_S) for run in (trainer, explorer)]
    assert [end["state"] for end in ends] == ["done", "done"], ends
    assert ends[0]["step"] == ends[1]["explorer_step"] == ends[1]["model_version"] == STEPS
    for end in ends:  # both sides close the same books
        assert end["accounts"]["trained"] == end["accounts"]["committed"] == STEPS * 16
    assert "heldout" in ends[1]["eval"]  # of the final weights
    assert [m.batch_id for m in job.manifests()] == [1, 2, 3]
    # the same commands say that there is nothing left to do
    for mode in ("train", "explore"):
        assert "is finished already" in job.run(f"mode={mode}").wait(timeout=60)["message"]
    for run in (trainer, explorer):
        run.close()
    with Client(cluster) as client:  # the last one to leave has cleaned up
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        assert not any(n for worker in workers for n in worker["resources"].values())
        assert not list(client.list_datasets())
        tabs = client.run_on_scheduler(tabs_of, [run.run_id for run in (trainer, explorer)])
    # on the dashboard each is a tab, and stays there as it ended
    assert [tab["title"] for tab in tabs] == ["x: trainer", "x: explorer"]
    for tab in tabs:
        assert (tab["state"], tab["trained"]) == ("done", STEPS * 16)
        assert "transfer" in tab["spans"]
    assert tabs[0]["lines"] >= {"actor/pg_loss"}
    assert tabs[1]["lines"] >= {"rollout/reward/mean"}


def tabs_of(runs: list[str], dask_scheduler: Any) -> list[dict[str, Any]]:
    """What the dashboard has of runs."""
    return [
        {
            "title": feed.title,
            "state": feed.state,
            "trained": feed.status["accounts"]["trained"],
            "spans": {span["what"] for span in feed.spans},
            "lines": {name for lines in feed.curves.values() for name in lines},
        }
        for run in runs
        for feed in feeds_of(dask_scheduler)
        if feed.run == run
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("method", "style"), [("memory", "fixed"), ("checkpoint", "trainer_driven")]
)
def test_two_explorers_feed_one_trainer(job: Job, method: str, style: str) -> None:
    way = (f"synchronizer={method}", f"synchronizer.sync_style={style}")
    explorers = [job.run("mode=explore", *way, f"explorer.name=explorer{i}") for i in (1, 2)]
    for run in explorers:  # or the trainer may be done with one before the other one has come
        wait_until(run, "join", lambda s: "waiting for the trainer" in (s.get("message") or ""))
    trainer = job.run("mode=train", *way)
    for run in (trainer, *explorers):
        assert run.wait(timeout=WAIT_S)["state"] == "done", run.status
    manifests = job.manifests()
    names = [f"{step}@explorer{i}" for i in (1, 2) for step in range(1, STEPS + 1)]
    assert sorted(m.batch_id for m in manifests) == sorted(names)
    store = ExperienceStore(f"{job.root}/trinity-dask/x/buffer/experience")
    rows = store.read([m.ref() for m in manifests]).select(["batch", "task", "run"]).to_pylist()
    assert len({tuple(row.values()) for row in rows}) == len(rows) == 2 * STEPS * 16
    accounts = trainer.status["accounts"]
    assert accounts["trained"] == accounts["committed"] == len(rows)
    # and what is recorded of it is told apart
    looked_at = trinity_dask.rollouts(f"{job.root}/trinity-dask/x")
    frame = looked_at.to_pandas(["status", "explorer", "id", "step"])
    counts = frame.groupby(["status", "explorer"]).size()
    for name in ("explorer1", "explorer2"):
        assert counts["trained", name] == STEPS * 16
        assert counts["eval", name] > 0
    assert frame["id"].is_unique
    # each samples on engines of its own
    firsts = {run.cfg.cluster.rollout.first_index for run in explorers}
    assert firsts == {0, 1}
    for run in (trainer, *explorers):
        run.close()


@pytest.mark.timeout(600)
def test_nccl_serves_one_explorer_and_says_so(job: Job) -> None:
    runs = [job.run("mode=train", "buffer.total_steps=2000")]
    runs += [job.run("mode=explore", "buffer.total_steps=2000", "explorer.name=first")]
    wait_until(runs[1], "start", lambda s: s.get("explorer_step"))
    second = job.run("mode=explore", "buffer.total_steps=2000", "explorer.name=second")
    with pytest.raises(RunFailed, match=r"nccl serves one explorer.*use checkpoint or memory"):
        second.wait(timeout=WAIT_S)
    with pytest.raises(JobInUse, match="is being run by this process already"):
        job.run("mode=explore", "buffer.total_steps=2000", "explorer.name=first")
    assert [run.state for run in runs] == ["running", "running"]
    # a stop of one side stops the other, with the state saved; the same commands go on
    assert cli(["stop", job.address, "--name", runs[0].run_id]) == 0
    for run in runs:
        assert run.wait(timeout=WAIT_S)["state"] == "interrupted", run.status
    assert "trainer was interrupted" in runs[1].status["message"]
    steps = runs[0].status["step"]
    for run in (*runs, second):
        run.close()
    total = f"buffer.total_steps={steps + 2}"
    again = [job.run("mode=train", total), job.run("mode=explore", total, "explorer.name=first")]
    for run in again:
        assert run.wait(timeout=WAIT_S)["state"] == "done", run.status
        run.close()
    ids = [m.batch_id for m in job.manifests()]
    assert sorted(ids, key=lambda b: int(b.split("@")[0])) == [
        f"{step}@first" for step in range(1, steps + 3)
    ]


@pytest.mark.timeout(600)
def test_fault_01_one_side_fails_and_the_other_ends_with_its_reason(
    job: Job, tmp_path: Path
) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def raises(response, truth, **_):\n    raise KeyError('no such column')\n")
    trainer = job.run("mode=train")
    explorer = job.run(
        "mode=explore",
        f"buffer.explorer_input.taskset.reward_fn={rewards}:raises",
        "explorer.max_retry_times=0",
    )
    with pytest.raises(RunFailed, match=r"no run of batch 1 succeeded.*no such column"):
        explorer.wait(timeout=WAIT_S)
    with pytest.raises(RunFailed, match=r"explorer 'explorer' of x failed.*no such column"):
        trainer.wait(timeout=60)
    for run in (explorer, trainer):
        run.close()


@pytest.mark.timeout(600)
def test_a_run_whose_driver_is_killed_ends_by_itself_with_its_state_saved(job: Job) -> None:
    words = [
        *("+experiment=sort_task", "engine=torch", "cluster=address", "name=x", "prepare=null"),
        *(f"cluster.address={job.address}", f"checkpoint_root_dir={job.root}"),
        *(f"prepare_args.dir={job.data}", "algorithm.repeat_times=4", "buffer.batch_size=4"),
        *("explorer.eval_interval=0", "explorer.eval_on_startup=false", "monitor.sinks=[jsonl]"),
        *("buffer.total_steps=100000", "cluster.orphan_after_s=40"),
    ]
    driver = subprocess.Popen([sys.executable, "-m", "trinity_dask", "run", *words])
    until(lambda: len(job.manifests()) > 2)
    driver.kill()
    driver.wait()
    found = Run.attach(job.address, "x")  # asked for again, and left
    assert found.state == "running", found.status
    found.close()
    folder = job.root / "trinity-dask" / "x"
    until(lambda: latest_complete(folder) is not None and not is_locked(folder))
    found = Run.attach(job.address, "x")
    assert found.state == "interrupted"
    assert "cluster.orphan_after_s" in found.status["message"]
    assert found.status["accounts"]["trained"] > 0
    found.close()
    # and the next run has the workers, and goes on
    steps = len(job.manifests()) + 1
    again = job.run(f"buffer.total_steps={steps}")
    assert again.wait(timeout=WAIT_S)["state"] == "done"
    assert [m.batch_id for m in job.manifests()] == list(range(1, steps + 1))


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_sides_that_do_not_fit_or_do_not_come_are_told(job: Job) -> None:
    alone = job.run("mode=explore", "synchronizer.peer_timeout_s=3")
    with pytest.raises(RunFailed, match=r"no trainer of .*/x was ready.*start one with mode=train"):
        alone.wait(timeout=WAIT_S)
    alone.close()
    trainer = job.run("mode=train")
    wait_until(trainer, "trainer", lambda s: "waiting for an explorer" in s.get("message", ""))
    other = job.run("mode=explore", "synchronizer.sync_interval=2")
    with pytest.raises(RunFailed, match=r"synchronizer.sync_interval=2 here, 1 there"):
        other.wait(timeout=WAIT_S)
    trainer.stop("a test")
    assert trainer.wait(timeout=WAIT_S)["state"] == "interrupted"
    for run in (other, trainer):
        run.close()

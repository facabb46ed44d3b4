"""What a run must refuse, and how: a clear line, a non-zero exit, nothing half-done."""

from __future__ import annotations

import fcntl
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import small_jobs
from small_jobs import WAIT_S, SmallJobs

from trinity_dask import Run
from trinity_dask.run import RunFailed

REWARDS = """
import math, time

def raises(response, truth, **_):
    raise KeyError("the reward's own error")

def is_nan(response, truth, **_):
    return math.nan

def never_returns(response, truth, **_):
    while True:
        time.sleep(3600)

def one_in_four_raises(response, truth, **_):
    if len(response) and ord(response[0]) % 4 == 0:
        raise ValueError("a bad answer")
    return 1.0 if response[:1] == truth[:1] else 0.0
"""


def manifests(job: Path) -> list[dict[str, Any]]:
    paths = sorted(job.glob("buffer/experience/commit/*.json"))
    return [json.loads(path.read_text()) for path in paths]


def with_reward(root: Path, name: str) -> list[str]:
    (root / "rewards.py").write_text(REWARDS)
    path = f"{root}/rewards.py:{name}"
    return [f"buffer.explorer_input.taskset.reward_fn={path}", "explorer.max_retry_times=0"]


@pytest.mark.parametrize(
    ("reward", "message"), [("raises", "the reward's own error"), ("is_nan", "(?i)nan")]
)
def test_a_reward_that_cannot_score_fails_the_run_and_is_never_zero(
    jobs: SmallJobs, reward: str, message: str
) -> None:
    run = jobs.start(*with_reward(jobs.root, reward))
    with pytest.raises(RunFailed, match=message) as caught:
        run.wait(timeout=WAIT_S)
    assert "no run of batch 1 succeeded" in str(caught.value)
    assert manifests(jobs.dir()) == []


def test_a_command_whose_rewards_never_return_exits_with_1(tmp_path: Path, data: Path) -> None:
    words = [*small_jobs.overrides(tmp_path, data), *with_reward(tmp_path, "never_returns")]
    done = small_jobs.run_words(*words, "explorer.max_timeout_s=5")
    assert done.returncode == 1, done.stdout[-2000:]
    assert "no run of batch 1 succeeded" in done.stderr
    assert "did not return" in done.stderr
    assert manifests(tmp_path / "trinity-dask" / "job") == []


def test_some_failing_rewards_are_counted_as_failed(jobs: SmallJobs) -> None:
    jobs.finish(*with_reward(jobs.root, "one_in_four_raises"))
    accounts = [m["meta"]["accounts"] for m in manifests(jobs.dir())]
    assert sum(a["failed"] for a in accounts) > 0
    assert all(a["scheduled"] == a["succeeded"] + a["failed"] + a["cancelled"] for a in accounts)


def test_a_row_without_its_column_is_named(jobs: SmallJobs) -> None:
    tasks = jobs.root / "tasks.jsonl"
    tasks.write_text('{"prompt": "sort 1=", "response": "1"}\n{"prompt": "sort 2="}\n')
    run = jobs.start(f"buffer.explorer_input.taskset.path={tasks}")
    with pytest.raises(RunFailed) as caught:
        run.wait(timeout=WAIT_S)
    for part in (str(tasks), "row 1", "response"):
        assert part in str(caught.value)


def test_a_model_without_weights_is_named(jobs: SmallJobs) -> None:
    model = jobs.root / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    run = jobs.start(f"model.model_path={model}", "model.max_model_len=32")
    with pytest.raises(RunFailed, match=f"{model}.*weights|weights.*{model}"):
        run.wait(timeout=WAIT_S)


def test_a_port_in_use_is_named(jobs: SmallJobs) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            Run(jobs.config(f"cluster.scheduler_port={port}")) as run,
            pytest.raises(RunFailed, match=f"cannot listen on port {port}"),
        ):
            run.wait(timeout=WAIT_S)


def test_a_job_directory_in_use_is_named(jobs: SmallJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity_dask.run.session.LOCK_WAIT_S", 0.5)
    jobs.dir().mkdir(parents=True)
    with open(jobs.dir() / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = jobs.start()
        with pytest.raises(RunFailed, match=f"{jobs.dir()} is in use by another run"):
            run.wait(timeout=WAIT_S)


def test_a_foreign_file_in_the_store_stops_the_resumed_run(jobs: SmallJobs) -> None:
    jobs.finish().close()
    job = jobs.dir()
    (job / "stage_meta.json").unlink()
    for checkpoint in job.glob("global_step_*"):
        (checkpoint / "COMPLETE").unlink()
    data = sorted((job / "buffer" / "experience" / "data").glob("1-*"))[0]
    data.write_bytes(b"not an arrow file")
    run = jobs.start()
    with pytest.raises(RunFailed, match=data.name):
        run.wait(timeout=WAIT_S)


def test_a_missing_model_is_refused_before_a_cluster_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "sort 1=", "response": "1"}\n')
    code, out, err = small_jobs.in_process(
        capsys, "engine=torch", "model.max_model_len=32",
        f"checkpoint_root_dir={tmp_path}", f"model.model_path={tmp_path}/nope",
        f"buffer.explorer_input.taskset.path={tasks}", "buffer.total_steps=1",
        "buffer.explorer_input.taskset.reward_fn=accuracy_reward",
    )  # fmt: skip
    assert code == 2, (out, err)
    assert f"{tmp_path}/nope" in err
    assert not list(tmp_path.rglob("control-0.log"))

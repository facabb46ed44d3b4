"""What a run must refuse, and how: a clear line, a non-zero exit, nothing half-done."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def run(root: Path, *overrides: str, timeout: float = 280.0) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "trinity_dask", "run", "+experiment=sort_digits_tiny",
        "engine=torch", f"checkpoint_root_dir={root}", "monitor.progress=plain", *overrides,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def manifests(root: Path) -> list[dict[str, Any]]:
    paths = sorted(root.glob("trinity-dask/*/grpo/buffer/experience/commit/*.json"))
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("raises", "the reward's own error"),
        ("is_nan", "nan"),
        ("never_returns", "did not return"),
    ],
)
def test_a_reward_that_cannot_score_fails_the_run_and_is_never_zero(
    tmp_path: Path, reward: str, message: str
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    done = run(
        tmp_path,
        f"buffer.explorer_input.taskset.reward_fn={tmp_path}/rewards.py:{reward}",
        "explorer.eval_on_startup=false",
        "explorer.max_timeout_s=5",
        "explorer.max_retry_times=0",
    )
    assert done.returncode == 1, done.stdout[-2000:]
    assert "no run of batch 1 succeeded" in done.stderr
    assert message in done.stderr.lower() or message in done.stderr
    assert manifests(tmp_path) == []


def test_some_failing_rewards_are_counted_as_failed(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    done = run(
        tmp_path,
        f"buffer.explorer_input.taskset.reward_fn={tmp_path}/rewards.py:one_in_four_raises",
        "explorer.max_retry_times=0",
        "explorer.eval_interval=0",
        "explorer.eval_on_startup=false",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    accounts = [m["meta"]["accounts"] for m in manifests(tmp_path)]
    assert sum(a["failed"] for a in accounts) > 0
    assert all(a["scheduled"] == a["succeeded"] + a["failed"] + a["cancelled"] for a in accounts)


def test_a_row_without_its_column_is_named(tmp_path: Path) -> None:
    data = tmp_path / "tasks.jsonl"
    data.write_text('{"prompt": "sort 1=", "response": "1"}\n{"prompt": "sort 2="}\n')
    done = run(tmp_path, f"buffer.explorer_input.taskset.path={data}")
    assert done.returncode in (1, 2)
    for part in (str(data), "row 1", "response"):
        assert part in done.stderr


def test_a_model_without_weights_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    done = run(tmp_path, f"model.model_path={model}")
    assert done.returncode in (1, 2)
    assert str(model) in done.stderr
    assert "weights" in done.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(tmp_path, f"cluster.scheduler_port={port}")
    assert done.returncode in (1, 2)
    assert str(port) in done.stderr


def test_a_job_directory_in_use_is_named(tmp_path: Path) -> None:
    import fcntl

    job = tmp_path / "trinity-dask" / "busy"
    job.mkdir(parents=True)
    with open(job / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(tmp_path, "name=busy")
    assert done.returncode == 1
    assert f"{job} is in use by another run" in done.stderr


def test_a_foreign_file_in_the_store_stops_the_resumed_run(tmp_path: Path) -> None:
    assert run(tmp_path, "name=job").returncode == 0
    stage = tmp_path / "trinity-dask" / "job" / "grpo"
    (stage / "stage_meta.json").unlink(missing_ok=True)
    (stage.parent / "stage_meta.json").unlink()
    for checkpoint in stage.glob("global_step_*"):
        (checkpoint / "COMPLETE").unlink()
    data = sorted((stage / "buffer" / "experience" / "data").glob("1-*"))[0]
    data.write_bytes(b"not an arrow file")
    done = run(tmp_path, "name=job")
    assert done.returncode == 1
    assert data.name in done.stderr


def test_a_missing_model_is_refused_before_a_cluster_starts(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "sort 1=", "response": "1"}\n')
    command = [
        sys.executable, "-m", "trinity_dask", "run", "engine=torch", "model.max_model_len=32",
        f"checkpoint_root_dir={tmp_path}", f"model.model_path={tmp_path}/nope",
        f"buffer.explorer_input.taskset.path={tasks}", "buffer.total_steps=1",
        "buffer.explorer_input.taskset.reward_fn=accuracy_reward",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f"{tmp_path}/nope" in done.stderr
    assert not list(tmp_path.rglob("control-0.log"))

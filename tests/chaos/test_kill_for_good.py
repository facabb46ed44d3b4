"""A rollout worker that dies again and again: the run ends, and says so."""

from __future__ import annotations

import time
from pathlib import Path

import chaos_jobs as jobs
import pytest
from test_kill_workers import worker_of

LIMIT_S = 300.0


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_fault_01_without_engines_the_run_ends_and_names_the_reason(tmp_path: Path) -> None:
    root = tmp_path / "job"
    root.mkdir()
    job = jobs.start(root, *jobs.shape(2000))
    jobs.wait_for_step(job, root, 2)
    deadline = time.monotonic() + LIMIT_S
    killed = 0
    while job.process.poll() is None:
        assert time.monotonic() < deadline, jobs.output(root)[-2000:]
        if times_ready(root) > killed:
            worker_of(job, "rollout").kill()
            killed += 1
        time.sleep(0.2)  # the log is a file: it has no wake-up
    assert job.process.returncode == 1, jobs.output(root)[-2000:]
    assert "engine engine-0 is lost: it was re-created 3 times already" in jobs.output(root)
    assert job.wait_gone() == []


def times_ready(root: Path) -> int:
    """How often the engine has come up so far."""
    (path,) = root.glob("trinity-dask/*/log/control-0.log")
    return path.read_text(encoding="utf-8").count("engine engine-0 ready to load weights")

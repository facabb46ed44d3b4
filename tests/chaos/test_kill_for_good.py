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
    while job.process.poll() is None:
        assert time.monotonic() < deadline, jobs.output(root)[-2000:]
        kill_rollout_worker(job)
        time.sleep(0.2)  # a process has no event for its birth
    assert job.process.returncode == 1, jobs.output(root)[-2000:]
    assert "engine engine-0 is lost: it was re-created 3 times already" in jobs.output(root)
    assert job.wait_gone() == []


def kill_rollout_worker(job: jobs.Job) -> None:
    """The one that is there now, if it is."""
    try:
        worker_of(job, "rollout").kill()
    except (AssertionError, jobs.psutil.Error):
        return

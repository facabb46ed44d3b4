"""SIGKILL of workers while the job runs: the job heals, and the accounts still balance."""

from __future__ import annotations

import contextlib
from pathlib import Path

import chaos_jobs as jobs
import pytest

STEPS = 40
# after this step of stage 2, the workers of these roles, at once
KILLS = (
    (2, ("rollout",)),
    (10, ("trainer",)),
    (18, ("control",)),
    (26, ("rollout", "trainer")),
)


def worker_of(job: jobs.Job, role: str) -> jobs.psutil.Process:
    """The process that writes the role's log."""
    for process in job.processes():
        with contextlib.suppress(jobs.psutil.NoSuchProcess):  # one that has just ended
            names = {Path(file.path).name for file in process.open_files()}
            # Dask titles its workers where setproctitle is installed
            command = " ".join(process.cmdline())
            is_worker = "dask worker" in command or "spawn_main" in command
            if f"{role}-0.log" in names and is_worker:
                return process
    raise AssertionError(f"no {role} worker among {job.processes()}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fault_13_killed_workers_are_replaced_and_the_job_ends_whole(tmp_path: Path) -> None:
    """One job, since most of its time is its start; each kill waits for the one before."""
    root = tmp_path / "job"
    root.mkdir()
    job = jobs.start(root, *jobs.shape(STEPS))
    for step, roles in KILLS:
        jobs.wait_for_step(job, root, step)
        for worker in [worker_of(job, role) for role in roles]:
            worker.kill()
    assert job.process.wait(timeout=300) == 0, jobs.output(root)[-3000:]
    assert job.wait_gone() == []
    jobs.check_lineage(jobs.stage_dir(root, "grpo"), STEPS)

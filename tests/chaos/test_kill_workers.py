"""SIGKILL of one worker while the job runs: the job heals, and the accounts still balance."""

from __future__ import annotations

from pathlib import Path

import chaos_jobs as jobs
import pytest

STEPS = 40


def worker_of(job: jobs.Job, role: str) -> jobs.psutil.Process:
    """The process that writes the role's log."""
    for process in job.processes():
        names = {Path(file.path).name for file in process.open_files()}
        # Dask titles its workers where setproctitle is installed
        command = " ".join(process.cmdline())
        is_worker = "dask worker" in command or "spawn_main" in command
        if f"{role}-0.log" in names and is_worker:
            return process
    raise AssertionError(f"no {role} worker among {job.processes()}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("roles", ["rollout", "trainer", "control", "rollout trainer"])
def test_fault_13_a_killed_worker_is_replaced_and_the_job_ends_whole(
    tmp_path: Path, roles: str
) -> None:
    root = tmp_path / "job"
    root.mkdir()
    job = jobs.start(root, *jobs.shape(STEPS))
    jobs.wait_for_step(job, root, 2)
    for worker in [worker_of(job, role) for role in roles.split()]:
        worker.kill()
    assert job.process.wait(timeout=300) == 0, jobs.output(root)[-3000:]
    assert job.wait_gone() == []
    jobs.check_lineage(jobs.stage_dir(root, "grpo"), STEPS)

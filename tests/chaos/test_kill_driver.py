"""SIGKILL of the driver at random moments: the same command goes on, the accounts balance."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import chaos_jobs as jobs
import pytest

STEPS = 40
# how far the job is before each kill: nowhere, or at this step of stage 2
MOMENTS = (0, 0, 2, 8, 14, 20)
DELAY_S = (0.0, 0.6)  # some steps, or a part of one
STARTING_S = (3.0, 12.0)  # imports, the cluster, stage 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_at_random_moments_lose_and_repeat_nothing(tmp_path: Path) -> None:
    root, dice = tmp_path / "job", random.Random(20240229)
    root.mkdir()
    killed = 0
    for step in MOMENTS:
        job = jobs.start(root, *jobs.shape(STEPS), "stages.1.trainer.save_interval=2")
        if step:
            jobs.wait_for_step(job, root, step)
        try:
            job.process.wait(timeout=dice.uniform(*(DELAY_S if step else STARTING_S)))
            break  # the job ended before its kill
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()
            killed += 1
        assert job.wait_gone() == [], "processes outlived the killed driver"
    final = jobs.start(root, *jobs.shape(STEPS), "stages.1.trainer.save_interval=2")
    assert final.process.wait(timeout=400) == 0, jobs.output(root)[-3000:]
    assert final.wait_gone() == []
    assert killed >= 4, "the job is too short for this test"
    jobs.check_lineage(jobs.stage_dir(root, "grpo"), STEPS)

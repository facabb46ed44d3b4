"""SIGKILL of the driver at random moments: the same command goes on, the accounts balance."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import chaos_jobs as jobs
import pytest

KILLS = 10
STEPS = 24


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_kills_at_random_moments_lose_and_repeat_nothing(tmp_path: Path) -> None:
    root, dice = tmp_path / "job", random.Random(20240229)
    root.mkdir()
    killed = 0
    for _ in range(KILLS):
        job = jobs.start(root, *jobs.shape(STEPS), "stages.1.trainer.save_interval=2")
        try:
            job.process.wait(timeout=dice.uniform(3.0, 20.0))
            break  # the job ended before its kill
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()
            killed += 1
        assert job.wait_gone() == [], "processes outlived the killed driver"
    final = jobs.start(root, *jobs.shape(STEPS), "stages.1.trainer.save_interval=2")
    assert final.process.wait(timeout=400) == 0, jobs.output(root)[-3000:]
    assert final.wait_gone() == []
    assert killed >= 3, "the job is too short for this test"
    jobs.check_lineage(jobs.stage_dir(root, "grpo"), STEPS)

"""Ctrl-C: the state is saved, the exit code is 130, nothing stays behind, the run resumes."""

from __future__ import annotations

from pathlib import Path

import chaos_jobs as jobs
import pytest

STEPS = 40


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_saves_exits_130_and_resumes(tmp_path: Path) -> None:
    root = tmp_path / "job"
    root.mkdir()
    job = jobs.start(root, *jobs.shape(STEPS))
    jobs.wait_for_step(job, root, 2)
    jobs.interrupt(job)
    assert job.process.wait(timeout=90) == 130, jobs.output(root)[-3000:]
    assert job.wait_gone() == []
    saved = jobs.lineage(jobs.stage_dir(root, "grpo"))
    assert saved["step"] >= 2
    assert "Traceback" not in jobs.output(root)

    again = jobs.start(root, *jobs.shape(STEPS))
    assert again.process.wait(timeout=400) == 0, jobs.output(root)[-3000:]
    assert again.wait_gone() == []
    jobs.check_lineage(jobs.stage_dir(root, "grpo"), STEPS)

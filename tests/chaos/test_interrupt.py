"""Ctrl-C: the state is saved, the exit code is 130, nothing stays behind, the run resumes."""

from __future__ import annotations

import time
from pathlib import Path

import chaos_jobs as jobs
import pytest
from test_kill_driver import SHAPE, check_lineage


def wait_for(root: Path, text: str, timeout_s: float) -> None:
    """Until the job has printed ``text``; its output is a file, so it is read again and again."""
    deadline = time.monotonic() + timeout_s
    while text not in jobs.output(root):
        assert time.monotonic() < deadline, f"no {text!r} in: {jobs.output(root)[-2000:]}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_saves_exits_130_and_resumes(tmp_path: Path) -> None:
    root = tmp_path / "job"
    root.mkdir()
    job = jobs.start(root, *SHAPE)
    wait_for(root, "grpo (2/2)  step 2", 240)
    jobs.interrupt(job)
    assert job.process.wait(timeout=90) == 130, jobs.output(root)[-3000:]
    assert job.wait_gone() == []
    saved = jobs.lineage(jobs.stage_dir(root, "grpo"))
    assert saved["step"] >= 2
    assert "Traceback" not in jobs.output(root)

    again = jobs.start(root, *SHAPE)
    assert again.process.wait(timeout=240) == 0, jobs.output(root)[-3000:]
    assert again.wait_gone() == []
    check_lineage(jobs.stage_dir(root, "grpo"))

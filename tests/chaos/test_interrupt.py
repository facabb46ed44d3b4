"""Ctrl-C, or SIGTERM: the state is saved, the exit code is 130, nothing stays behind, the run
resumes."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import chaos_jobs as jobs
import psutil
import pytest

STEPS = 40
SLOW = """
import pathlib, time

def make(config, **_):
    pathlib.Path(__file__).with_suffix(".begun").touch()
    time.sleep(100)
"""


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigterm_to_every_process_saves_and_exits_130(tmp_path: Path) -> None:
    """As Slurm ends a step. The workers, which hold the state, get it in the same moment."""
    root = tmp_path / "job"
    root.mkdir()
    job = jobs.start(root, *jobs.shape(STEPS))
    jobs.wait_for_step(job, root, 2)
    everybody = job.processes()
    assert len(everybody) > 4  # driver, control, rollout, trainer, and what watches over them
    for process in everybody:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    assert job.process.wait(timeout=90) == 130, jobs.output(root)[-3000:]
    assert job.wait_gone() == []
    saved = jobs.lineage(jobs.stage_dir(root, "grpo"))
    assert saved["step"] >= 2
    assert saved["errors"] == []
    assert "Traceback" not in jobs.output(root)


def test_ctrl_c_before_anything_is_built_and_twice_in_a_row(tmp_path: Path) -> None:
    """The first is honoured while engines load; the second waits for nothing."""
    for name, presses in (("once", 1), ("twice", 2)):
        root = tmp_path / name
        root.mkdir()
        job = jobs.start(root, *jobs.shape(STEPS), f"prepare={tmp_path}/slow.py:make")
        (tmp_path / "slow.py").write_text(SLOW)
        deadline = time.monotonic() + 90
        while not (tmp_path / "slow.begun").exists():
            assert job.process.poll() is None, jobs.output(root)[-3000:]
            assert time.monotonic() < deadline, jobs.output(root)[-3000:]
            time.sleep(0.05)
        (tmp_path / "slow.begun").unlink()
        for _ in range(presses):
            jobs.interrupt(job)
            time.sleep(0.5)
        assert job.process.wait(timeout=30) == 130, jobs.output(root)[-3000:]
        assert job.wait_gone() == []

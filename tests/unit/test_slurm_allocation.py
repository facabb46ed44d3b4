"""When a run stops before the end of its job: early enough to save, once, however the end moves."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_dask.cluster.slurm.allocation import TIME_OVER, TimeLimit, watch

SECONDS = st.floats(0, 1e6)


@given(lead=st.floats(1, 1e4), length=st.floats(60, 1e6), later=SECONDS, save=SECONDS)
def test_the_lead_and_a_save_are_left(lead, length, later, save):
    limit = TimeLimit(lead)
    limit.stops_in(length, 0.0, 0.0)
    stop = later + limit.stops_in(length, later, save)
    assert stop == pytest.approx(length - min(lead, length / 4) - save, abs=1e-3)


def test_an_end_that_is_put_off_counts():
    limit = TimeLimit(300.0)
    assert limit.stops_in(3600.0, 0.0, 20.0) == 3280.0
    assert limit.stops_in(7200.0, 3000.0, 20.0) == 3880.0


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command of this name that prints a file; the file."""
    told, command = tmp_path / "told", tmp_path / "bin" / "squeue"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\ncat {told}\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    return told


def test_who_stops_because_the_time_is_over_says_so_to_the_script(squeue, tmp_path, monkeypatch):
    mark = tmp_path / "over"
    monkeypatch.setenv(TIME_OVER, str(mark))
    squeue.write_text(time.strftime("%Y-%m-%dT%H:%M:%S\n", time.localtime(time.time() + 30)))
    stopped, reasons = threading.Event(), []

    def stop(reason):
        reasons.append((reason, mark.exists()))
        stopped.set()

    watch(300.0, lambda: 40.0, stop, threading.Event())  # a save takes longer than is left
    assert stopped.wait(30)
    [(reason, marked)] = reasons
    assert reason.startswith("the job ends at ")
    assert marked


@pytest.mark.parametrize("told", ["N/A\n", "", "NONE\n"])
def test_a_job_without_an_end_is_not_stopped(squeue, told):
    squeue.write_text(told)
    over = threading.Event()
    watch(300.0, lambda: 1e9, lambda reason: pytest.fail(reason), over)
    over.wait(0.5)
    over.set()

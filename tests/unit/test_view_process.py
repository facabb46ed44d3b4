"""The viewer's process: an answer, or an error in time, whatever happens to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from records_support import a_batch, a_job

from trinity_dask.view.process import Viewer, ViewerError

LIMIT_S = 120.0


@pytest.fixture
def viewer() -> Iterator[Viewer]:
    found = Viewer()
    yield found
    found.close()


def ask(viewer: Viewer, job: Path | str, call: str = "rows", **asked: object) -> tuple[int, dict]:
    status, body = asyncio.run(viewer.ask({"job": str(job), "call": call, **asked}))
    return status, json.loads(body)


def test_it_answers_and_says_what_is_wrong(tmp_path: Path, viewer: Viewer) -> None:
    a_batch(a_job(tmp_path), 1)
    status, told = ask(viewer, tmp_path)
    assert (status, told["total"]) == (200, 8)
    assert ask(viewer, tmp_path, query={"where": {"reward": "much"}})[0] == 400
    assert ask(viewer, tmp_path, "row", row="nothing:0")[0] == 400
    status, told = ask(viewer, tmp_path / "away")
    assert status == 404
    assert "holds no run" in told["error"]
    status, told = ask(viewer, tmp_path, "tokens", row=ask(viewer, tmp_path)[1]["rows"][0]["key"])
    assert status == 404  # from and to are missing
    assert viewer.pid is not None


def test_a_process_that_was_killed_is_started_again(tmp_path: Path, viewer: Viewer) -> None:
    a_batch(a_job(tmp_path), 1)
    ask(viewer, tmp_path)
    pid = viewer.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert ask(viewer, tmp_path)[1]["total"] == 8
    assert viewer.pid not in (pid, None)


def test_a_process_that_does_not_answer_is_ended_and_the_next_answers(tmp_path: Path) -> None:
    a_batch(a_job(tmp_path), 1)
    viewer = Viewer()
    ask(viewer, tmp_path)
    pid = viewer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    viewer._deadline_s = 0.3
    with pytest.raises(ViewerError, match="no answer within"):
        ask(viewer, tmp_path)
    viewer._deadline_s = LIMIT_S
    assert not psutil.pid_exists(pid)
    assert ask(viewer, tmp_path)[0] == 200
    viewer.close()
    with pytest.raises(ViewerError, match="closed"):
        ask(viewer, tmp_path)


def test_questions_that_nobody_waits_for_are_not_asked(tmp_path: Path, viewer: Viewer) -> None:
    asked = {"job": str(tmp_path), "call": "rows"}
    assert asyncio.run(viewer.ask(asked, lambda: True)) == (204, b"")
    assert viewer.pid is None


def test_it_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    a_batch(a_job(tmp_path), 1)
    script = (
        "import asyncio, sys, time\n"
        "from trinity_dask.view.process import Viewer\n"
        "viewer = Viewer()\n"
        f"asyncio.run(viewer.ask({{'job': {str(tmp_path)!r}, 'call': 'state'}}))\n"
        "print(viewer.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_imports_neither_torch_nor_a_data_frame(tmp_path: Path) -> None:
    script = (
        "import sys, trinity_dask.view.child\n"
        "print(sorted({'torch', 'pandas', 'transformers', 'distributed'} & set(sys.modules)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert told.stdout.strip() == "[]"

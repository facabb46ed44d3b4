"""Every notebook in a real kernel, as somebody runs it: no error, and nothing goes on after it.

Invariant: a notebook leaves no process and no file; its kernel's temporary directory is the test's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from make_notebooks import SOURCES, execute, notebook_of, outputs

END_S = 60.0  # for the processes of a run whose kernel has ended


def processes_of(root: Path) -> list[str]:
    """Command lines of the processes whose temporary files are below ``root``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(root):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:  # not ours, or gone
            continue
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_runs_from_top_to_bottom(source: Path, tmp_path: Path) -> None:
    notebook = notebook_of(source)
    # only what Python's own environment has: the jobs of a test are not for a Slurm of the user's
    execute(notebook, tmp_path, {**os.environ, "PATH": str(Path(sys.executable).parent)})
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [o for o in outputs(notebook) if o.output_type == "error"] == []
    deadline = time.monotonic() + END_S
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(tmp_path) == []
    assert list(tmp_path.glob("trinity-*")) == []


def test_what_is_left_behind_would_be_found(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "input('left')"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as p:
        assert p.stdout is not None
        assert p.stdout.read(4) == b"left"
        assert processes_of(tmp_path) == [" ".join(words)]
        p.communicate(b"\n")
    assert processes_of(tmp_path) == []

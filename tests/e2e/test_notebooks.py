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


def until_nothing_runs(root: Path) -> None:
    deadline = time.monotonic() + END_S
    while processes_of(root) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(root) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_runs_from_top_to_bottom(source: Path, tmp_path: Path) -> None:
    notebook = notebook_of(source)
    # only what Python's own environment has: the jobs of a test are not for a Slurm of the user's
    execute(notebook, tmp_path, {**os.environ, "PATH": str(Path(sys.executable).parent)})
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [o for o in outputs(notebook) if o.output_type == "error"] == []
    until_nothing_runs(tmp_path)
    assert list(tmp_path.glob("trinity-*")) == []


LEFT = """
from trinity_dask import Run, load_config

words = ["+experiment=sort_quick", "checkpoint_root_dir=.", "buffer.total_steps=5000"]
run = Run(load_config(*words, "trainer.total_steps=5000")).start()

# %%
while not run.status.get("step"):
    run.wait_for_change(run.status["version"], 60)
run
"""


@pytest.mark.timeout(300)
def test_a_kernel_that_is_closed_takes_its_run_with_it(tmp_path: Path) -> None:
    source = tmp_path / "left.py"
    source.write_text(LEFT)
    notebook = notebook_of(source)
    execute(notebook, tmp_path, os.environ)
    assert "running, stage" in notebook.cells[-1].outputs[0]["data"]["text/html"]
    until_nothing_runs(tmp_path)


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

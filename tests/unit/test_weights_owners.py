"""Weights in shared memory end with their owner, however it ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trinity_dask.sync import shelf as shelves
from trinity_dask.sync.shelf import WeightShelf

HOLD = """
import sys
from pathlib import Path
from trinity_dask.sync import shelf as shelves
shelves.SHARED = Path(sys.argv[1])
shelf = shelves.WeightShelf.for_run("memory", "", sys.argv[2])
Path(shelf.path(1)).write_bytes(b"weights")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shelves, "SHARED", tmp_path)
    return tmp_path


def hold(memory: Path, run: str) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLD, str(memory), run]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


def runs(memory: Path) -> set[str]:
    return {path.name.rpartition("-")[2] for path in memory.iterdir() if path.is_dir()}


def test_the_next_run_removes_what_a_killed_one_left_and_nothing_else(memory):
    dead, alive = hold(memory, "dead"), hold(memory, "alive")
    try:
        (memory / "of-somebody-else").mkdir()
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        mine = WeightShelf.for_run("memory", "", "mine")
        assert runs(memory) == {"alive", "else"}
        mine.put(mine.take(1, {"w": torch.zeros(4)}))
        assert runs(memory) == {"alive", "mine", "else"}
        mine.remove_all()
        assert runs(memory) == {"alive", "else"}
        assert len(list(memory.glob("*.owner"))) == 1
    finally:
        alive.kill()
        alive.wait()


def test_a_run_that_goes_on_has_its_directory_again(memory):
    process = hold(memory, "again")
    process.kill()
    process.wait()
    shelf = WeightShelf.for_run("memory", "", "again")
    assert Path(shelf.path(1)).read_bytes() == b"weights"
    assert WeightShelf.for_run("memory", "", "again")._owned is None  # it is held already
    os.unlink(shelf.path(1))
    shelf.remove_all()
    assert list(memory.iterdir()) == []

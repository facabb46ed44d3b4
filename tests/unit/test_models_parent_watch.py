"""A watched child does not outlive its parent; other processes are left alone."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

PARENT = """
import multiprocessing, sys, time
from trinity_dask.models.vllm.plugin import register

def child(connection):
    register()
    connection.send(True)
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=child, args=(theirs,), name=sys.argv[1])
    process.start()
    mine.recv()
    print(process.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def start(tmp_path):
    """Start a parent with one child of the given process name; ends both afterwards."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    started: list[psutil.Process] = []

    def run(name: str) -> tuple[psutil.Process, psutil.Process]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(
            [sys.executable, str(script), name], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        child = int(process.stdout.readline())
        started.extend([psutil.Process(process.pid), psutil.Process(child)])
        return started[-2], started[-1]

    yield run
    for process in started:
        if process.is_running():
            process.kill()


@pytest.mark.parametrize("name", ["EngineCore", "EngineCore_DP0", "VllmWorker-1"])
def test_vllm_s_processes_end_with_a_killed_parent(start, name):
    parent, child = start(name)
    parent.send_signal(signal.SIGKILL)
    gone, _ = psutil.wait_procs([child], timeout=60)
    assert gone


def test_other_processes_are_not_watched(start):
    """A process of another name outlives its parent by more than the watch's period."""
    parent, child = start("SomebodyElse")
    watched_parent, watched_child = start("EngineCore")
    parent.send_signal(signal.SIGKILL)
    watched_parent.send_signal(signal.SIGKILL)
    # the watched one is gone, so the other one has had the same time to go
    gone, _ = psutil.wait_procs([watched_child], timeout=60)
    assert gone
    assert child.is_running()

"""No process outlives a run: success, failure, Ctrl-C, SIGKILL of the driver or a worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
WAIT_S = 60.0
# "within a few seconds", with room for a loaded machine
GONE_S = 20.0


class Driver:
    """A running ``cluster_driver.py`` in a process group of its own."""

    def __init__(self, job_dir: Path, how: str):
        root = str(HERE.parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "cluster_driver.py"), str(job_dir), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root},
            start_new_session=True,
        )
        self.seen: dict[str, list[int]] = {}
        self.everything: set[psutil.Process] = set()

    def read_pids(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.stderr.read() if self.process.stderr else "")
        self.seen = json.loads(line)
        self.everything = set(psutil.Process(self.process.pid).children(recursive=True))
        for pid in (pid for pids in self.seen.values() for pid in pids):
            with suppress(psutil.NoSuchProcess):  # a driver that succeeds ends at once
                self.everything.add(psutil.Process(pid))

    def interrupt_group(self) -> None:
        """What a terminal does at Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self) -> tuple[str, str]:
        return self.process.communicate(timeout=WAIT_S)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[[str], Driver]]:
    drivers: list[Driver] = []

    def start(how: str) -> Driver:
        drivers.append(Driver(tmp_path, how))
        drivers[-1].read_pids()
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.process.kill()
        for process in driver.everything:
            if is_alive(process):
                process.kill()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(processes: set[psutil.Process]) -> None:
    deadline = time.monotonic() + GONE_S
    alive = {p for p in processes if is_alive(p)}
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = {p for p in alive if is_alive(p)}
    assert not alive, [p.cmdline() for p in alive]


@pytest.mark.parametrize(("how", "code"), [("success", 0), ("error", 1), ("exit", 0)])
def test_nothing_is_left_when_the_driver_ends(
    drive: Callable[[str], Driver], how: str, code: int
) -> None:
    driver = drive(how)
    assert len(driver.seen["grandchildren"]) == 2
    driver.finish()
    assert driver.process.returncode == code
    assert_gone(driver.everything)


def test_ctrl_c_reaches_only_the_driver(drive: Callable[[str], Driver], tmp_path: Path) -> None:
    driver = drive("wait")
    driver.interrupt_group()
    out, err = driver.finish()
    # the actor still answered after the signal, and the close was orderly
    assert out.strip() == "1", err
    assert driver.process.returncode == 0
    assert (tmp_path / "closed").exists()
    assert_gone(driver.everything)


def test_nothing_is_left_after_sigkill_of_the_driver(drive: Callable[[str], Driver]) -> None:
    driver = drive("wait")
    driver.process.kill()
    assert_gone(driver.everything)


def test_a_stopped_worker_does_not_outlive_its_driver(drive: Callable[[str], Driver]) -> None:
    driver = drive("wait")
    for pid in driver.seen["workers"]:
        os.kill(pid, signal.SIGSTOP)  # as if stuck in native code
    driver.process.kill()
    assert_gone(driver.everything)


def test_grandchildren_end_with_a_killed_worker(drive: Callable[[str], Driver]) -> None:
    driver = drive("wait")
    grandchildren = {psutil.Process(pid) for pid in driver.seen["grandchildren"]}
    parent = grandchildren.copy().pop().parent()
    assert parent is not None
    parent.kill()
    assert_gone(grandchildren)
    assert driver.process.poll() is None


def test_ctrl_c_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "wait")
    try:
        main = psutil.Process(driver.process.pid)
        deadline = time.monotonic() + WAIT_S
        found: list[psutil.Process] = []
        while not any("spawn_main" in " ".join(p.cmdline()) for p in found):
            assert time.monotonic() < deadline
            found = main.children(recursive=True)
        driver.interrupt_group()
        found = main.children(recursive=True)
        driver.finish()
        assert driver.process.returncode not in (0, None)
        assert_gone(set(found))
    finally:
        driver.process.kill()


def test_every_worker_process_has_a_log_file(
    drive: Callable[[str], Driver], tmp_path: Path
) -> None:
    driver = drive("success")
    _, err = driver.finish()
    for name in ("control-0", "rollout-0"):
        assert "Registered to" in (tmp_path / "log" / f"{name}.log").read_text()
    assert "Register worker" in (tmp_path / "log" / "driver.log").read_text()
    assert "distributed" not in err


def test_fault_05_a_worker_that_does_not_close_cannot_hold_up_the_end(
    drive: Callable[[str], Driver],
) -> None:
    driver = drive("wait")
    parent = psutil.Process(driver.seen["grandchildren"][0]).parent()
    assert parent is not None
    others = [pid for pid in driver.seen["workers"] if pid != parent.pid]
    os.kill(others[0], signal.SIGSTOP)
    driver.interrupt_group()
    _, err = driver.finish()
    assert driver.process.returncode == 0, err
    assert_gone(driver.everything)

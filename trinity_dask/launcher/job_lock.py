"""One run per job directory.

Invariant: the lock is an ``flock`` of the process that writes the job's state; it vanishes
with that process, however it ends, so there is never a stale lock to remove by hand.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO, Any, Optional

POLL_S = 0.2


class JobInUse(RuntimeError):
    """Another live process runs this job."""


class JobLock:
    """Asynchronous context manager around ``<job>/run.lock``.

    ``holder`` names, for people, the process to stop (the driver); default: this one.
    Waits up to ``timeout_s`` because the workers of a killed driver need a moment to end.
    """

    def __init__(
        self, job_dir: str | Path, timeout_s: float = 20.0, holder: dict[str, Any] | None = None
    ) -> None:
        self.path = Path(job_dir) / "run.lock"
        self.holder = holder or {"host": socket.gethostname(), "pid": os.getpid()}
        self.timeout_s = timeout_s
        self._file: Optional[IO[str]] = None

    async def __aenter__(self) -> JobLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 - held until exit
        deadline = time.monotonic() + self.timeout_s
        while not self._try_lock():
            if time.monotonic() > deadline:
                self._file.close()
                raise JobInUse(_in_use(self.path))
            await asyncio.sleep(POLL_S)  # flock has no wake-up; bounded by the deadline
        self._write_holder()
        return self

    def _try_lock(self) -> bool:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _write_holder(self) -> None:
        assert self._file is not None
        self._file.truncate(0)
        json.dump(self.holder, self._file)
        self._file.flush()

    async def __aexit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def wait_unlocked(job_dir: str | Path, timeout_s: float = 20.0) -> None:
    """Wait until no live process holds the job's lock, without taking it.

    Raises:
        JobInUse: it is still held after ``timeout_s`` (names the holder).
    """
    deadline = time.monotonic() + timeout_s
    while is_locked(job_dir):
        if time.monotonic() > deadline:
            raise JobInUse(_in_use(Path(job_dir) / "run.lock"))
        time.sleep(POLL_S)  # flock has no wake-up; bounded by the deadline


def is_locked(job_dir: str | Path) -> bool:
    """Whether a live process holds the job's lock."""
    try:
        with open(Path(job_dir) / "run.lock", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _in_use(lock: Path) -> str:
    holder = lock.read_text(encoding="utf-8").strip()
    return (
        f"{lock.parent} is in use by another run ({holder or 'unknown'}); stop it, or give this "
        "one another name"
    )

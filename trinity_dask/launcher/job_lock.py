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
from typing import IO, Optional

POLL_S = 0.2


class JobInUse(RuntimeError):
    """Another live process runs this job."""


class JobLock:
    """Asynchronous context manager around ``<job>/run.lock``.

    Waits up to ``timeout_s`` because the workers of a killed driver need a moment to end.
    """

    def __init__(self, job_dir: str | Path, timeout_s: float = 20.0) -> None:
        self.path = Path(job_dir) / "run.lock"
        self.timeout_s = timeout_s
        self._file: Optional[IO[str]] = None

    async def __aenter__(self) -> JobLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 - held until exit
        deadline = time.monotonic() + self.timeout_s
        while not self._try_lock():
            if time.monotonic() > deadline:
                holder = self.path.read_text(encoding="utf-8").strip()
                self._file.close()
                raise JobInUse(
                    f"{self.path.parent} is in use by another run ({holder or 'unknown'}); "
                    f"stop it, or give this one another name"
                )
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
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, self._file)
        self._file.flush()

    async def __aexit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

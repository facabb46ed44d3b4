"""Who may run a job directory at a time.

Invariant: a lock is an ``flock`` of the process that writes the job's state; it vanishes with
that process, however it ends, so there is never a stale lock to remove by hand. One run of
mode ``both`` has the directory for itself; a trainer and explorers that were started each on
its own share it, each name once; a benchmark only reads, and excludes another benchmark.
The file names the launch that may write. A process that stands still keeps its lock, so the
driver's next launch, which knows that the scheduler has lost the last one, may write its own name
there; whoever does not find its name any more writes nothing and ends.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Optional

from trinity_dask.config import modes
from trinity_dask.config.schema import Config

log = logging.getLogger("trinity_dask.launcher")

POLL_S = 0.2
FENCE_S = 2.0  # between two looks at whose the job is
# a file system without flock (Lustre without -o flock, some FUSE), or a file of somebody else
# on NFS, which can only be read
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
Claim = tuple[str, int]  # file in the job directory, kind of lock
WHOLE: tuple[Claim, ...] = (("run.lock", EXCLUSIVE),)


class JobInUse(RuntimeError):
    """Another live process runs this job."""


def claims_of(stages: Sequence[Config]) -> tuple[Claim, ...]:
    """The locks that a run of ``stages`` needs."""
    first = stages[0]
    if first.mode == "bench":
        return (("bench.lock", EXCLUSIVE),)
    if len(stages) == 1 and modes.meets(first.mode):
        name = first.trainer.name if first.mode == "train" else first.explorer.name
        return (("run.lock", SHARED), (f"{name}.lock", EXCLUSIVE))
    return WHOLE


class Superseded(RuntimeError):
    """Another launch has taken the job over; this one must write nothing any more."""


class JobLock:
    """Asynchronous context manager around the lock files of a job.

    ``holder`` names, for people, the process to stop (the driver); default: this one.
    Waits up to ``timeout_s`` because the workers of a killed driver need a moment to end.
    ``launch`` names this launch; one of ``supersedes`` that still holds a lock then (its process
    was stopped, or cut off) loses the job.
    """

    def __init__(
        self,
        job_dir: str | Path,
        timeout_s: float = 20.0,
        holder: dict[str, Any] | None = None,
        claims: Sequence[Claim] = WHOLE,
        launch: str = "",
        supersedes: Sequence[str] = (),
    ) -> None:
        self.job_dir = Path(job_dir)
        self.launch, self.supersedes = launch, tuple(supersedes)
        self.holder = holder or {"host": socket.gethostname(), "pid": os.getpid()}
        if launch:
            self.holder = {**self.holder, "launch": launch}
        self.timeout_s = timeout_s
        self.claims = tuple(claims)
        self._held = ExitStack()
        self._not_locked: list[tuple[IO[str], int]] = []  # taken over; locked when it is possible

    async def __aenter__(self) -> JobLock:
        self.job_dir.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self.timeout_s
        for name, kind in self.claims:
            file = self._held.enter_context(open(self.job_dir / name, "a+", encoding="utf-8"))  # noqa: SIM115
            while not _try(file, kind):
                if time.monotonic() > deadline:
                    if _launch_in(self.job_dir / name) not in self.supersedes:
                        self._held.close()
                        raise JobInUse(_in_use(self.job_dir, name))
                    log.warning(
                        "%s is still locked by an earlier launch of this run, which the scheduler "
                        "has lost; this launch takes the job over, and that one may write no more",
                        self.job_dir / name,
                    )
                    self._not_locked.append((file, kind))
                    break
                await asyncio.sleep(POLL_S)  # flock has no wake-up; bounded by the deadline
            file.truncate(0)
            json.dump(self.holder, file)
            file.flush()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._held.close()

    def require(self) -> None:
        """Blocking; before anything is written that others rely on.

        Raises:
            Superseded: another launch has taken the job over.
        """
        for name, kind in self.claims if self.launch else ():
            found = _launch_in(self.job_dir / name) if kind == EXCLUSIVE else None
            if found and found != self.launch:
                raise Superseded(
                    f"{self.job_dir} has been taken over by launch {found}; this one, "
                    f"{self.launch}, was cut off from its scheduler and writes nothing any more"
                )

    async def superseded(self) -> None:
        """Look every ``FENCE_S`` seconds whose the job is. Never returns; raises Superseded."""
        while True:
            await asyncio.to_thread(self.require)
            self._not_locked = [held for held in self._not_locked if not _try(*held)]
            await asyncio.sleep(FENCE_S)


def wait_unlocked(
    job_dir: str | Path, timeout_s: float = 20.0, claims: Sequence[Claim] = WHOLE
) -> None:
    """Wait until no live process stands in the way of ``claims``, without taking them.

    Raises:
        JobInUse: one still does after ``timeout_s`` (names the holder).
    """
    deadline = time.monotonic() + timeout_s
    while (name := _taken(job_dir, claims)) is not None:
        if time.monotonic() > deadline:
            raise JobInUse(_in_use(Path(job_dir), name))
        time.sleep(POLL_S)  # flock has no wake-up; bounded by the deadline


def is_locked(job_dir: str | Path, claims: Sequence[Claim] = WHOLE) -> bool:
    """Whether a live process stands in the way of ``claims``."""
    return _taken(job_dir, claims) is not None


def _taken(job_dir: str | Path, claims: Sequence[Claim]) -> Optional[str]:
    """The first lock file that cannot be had."""
    for name, kind in claims:
        path = Path(job_dir) / name
        try:
            # NFS has exclusive locks only on files that were opened for writing
            with open(path, "r+" if os.access(path, os.W_OK) else "r", encoding="utf-8") as file:
                if not _try(file, kind):
                    return name
        except FileNotFoundError:
            continue
    return None


def _try(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning(
            "%s cannot be locked (%s): nothing here keeps two runs out of one directory; on Lustre "
            "mount with -o flock, or set checkpoint_root_dir to a file system with locks",
            file.name,
            os.strerror(error.errno),
        )
    return True


def _launch_in(path: Path) -> Optional[str]:
    """The launch that a lock file names; None: none, or it is being written."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("launch")
    except (OSError, ValueError, AttributeError):
        return None


def _in_use(job_dir: Path, name: str) -> str:
    holder = (job_dir / name).read_text(encoding="utf-8").strip() or "unknown"
    who = name.removesuffix(".lock")
    role = "" if who == "run" else f" as {who!r}"
    another = "another name" if who == "run" else "another name (an explorer: explorer.name=...)"
    return (
        f"{job_dir} is in use by another run{role} ({holder}); stop it (a run on a shared "
        f"scheduler outlives its driver: trinity-dask stop ADDRESS), or give this one {another}"
    )

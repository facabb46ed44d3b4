"""A small process beside each worker that ends whatever the worker started.

Invariant: once the worker is gone, for whatever reason (closed, crashed, killed with
SIGKILL), every process that it or its children started is gone within moments; and if the
worker's parent (its nanny) is gone, the worker follows even if it is stuck in native code.
A worker that is killed cannot clean up itself, hence a second process.

Run as a script with the standard library only: ``warden.py WORKER PARENT TOKEN``, pids and
the value of the environment variable that marks the worker's descendants (``PARENT`` 0: no
parent to watch). A descendant is a process in the worker's process group, or one that was
executed with the mark in its environment, wherever its session and its parent are now.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

MARK = "TRINITY_DASK_WORKER"
# Dask's own watch thread normally ends an orphaned worker at once; then it is forced
ORPHAN_GRACE_S = 1.0
SWEEPS = 40  # a process that forks while it is swept needs another look
SWEEP_PAUSE_S = 0.05
POLL_S = 0.2
# ends by itself with its last client, and cleans up their shared memory before
SPARED = b"multiprocessing.resource_tracker"


class Watched:
    """A process whose end can be waited for, by pidfd where the system has it."""

    def __init__(self, pid: int):
        self.pid, self.fd, self.ended = pid, -1, False
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.ended = True
        except (AttributeError, OSError):
            self.fd = -1  # no pidfd here: its existence is polled

    def check(self, timeout_s: float) -> bool:
        """Whether the process has ended, after waiting at most ``timeout_s`` for it."""
        if not self.ended and self.fd >= 0:
            self.ended = bool(select.select([self.fd], [], [], timeout_s)[0])
        elif not self.ended:
            time.sleep(timeout_s)
            self.ended = not _exists(self.pid)
        return self.ended


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def wait_for_end(worker: Watched, parent: Watched | None) -> None:
    """Return when the worker has ended; end it if its parent is gone."""
    fds = [w.fd for w in (worker, parent) if w is not None and w.fd >= 0]
    while not worker.check(0 if fds else POLL_S):
        if parent is not None and parent.check(0):
            if not worker.check(ORPHAN_GRACE_S) and _exists(worker.pid):
                os.kill(worker.pid, signal.SIGKILL)
            return
        if fds:
            select.select(fds, [], [])


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""  # it has just ended, or belongs to someone else


def descendants(group: int, token: str) -> Iterator[int]:
    """Live processes of the group or with the mark, except this one and spared ones."""
    mark = f"{MARK}={token}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        pid = int(name)
        try:
            mine = os.getpgid(pid) == group
        except OSError:
            continue
        mine = mine or mark in _read(pid, "environ").split(b"\0")
        # "pid (name) state ..."; the name may hold spaces and brackets
        zombie = _read(pid, "stat").rpartition(b")")[2].split()[:1] in ([b"Z"], [])
        if mine and not zombie and SPARED not in _read(pid, "cmdline"):
            yield pid


def sweep(group: int, token: str) -> None:
    """Kill all descendants, until none is left."""
    if not os.path.isdir("/proc/self"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        return
    for _ in range(SWEEPS):
        found = list(descendants(group, token))
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(SWEEP_PAUSE_S)


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its worker, and after it
    worker, parent, token = int(argv[0]), int(argv[1]), argv[2]
    wait_for_end(Watched(worker), Watched(parent) if parent else None)
    sweep(worker, token)


if __name__ == "__main__":
    main(sys.argv[1:])

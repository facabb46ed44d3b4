"""A process ends when the process that started it is gone.

Invariant: after the parent's death the process receives SIGTERM within about half a second,
and is gone after a further grace period even if it ignores that.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

PERIOD_S = 0.5
GRACE_S = 5.0
THREAD_NAME = "parent-watch"


def watch_parent() -> None:
    """Start the watch in this process, once. Does nothing in a process without a parent
    known to :mod:`multiprocessing`."""
    parent = multiprocessing.parent_process()
    if parent is None or any(t.name == THREAD_NAME for t in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(parent.pid,), name=THREAD_NAME, daemon=True).start()


def _watch(parent_pid: int | None) -> None:
    # the parent may have died before this ran, so its pid comes from multiprocessing
    while os.getppid() == parent_pid:
        time.sleep(PERIOD_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)

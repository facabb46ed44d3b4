"""What vLLM calls in every process it starts (entry point group ``vllm.general_plugins``).

Invariant: only vLLM's own child processes are watched, never the Dask worker or a user's
process: those do not belong to vLLM, and may outlive their parent on purpose. After the parent's
death a watched process receives SIGTERM within about half a second, and is gone after a further
grace period even if it ignores that.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

CHILD_PREFIXES = ("EngineCore", "VllmWorker")
PERIOD_S = 0.5
GRACE_S = 5.0
THREAD_NAME = "parent-watch"


def register() -> None:
    """Make vLLM's engine and worker processes end with the process that started them."""
    parent = multiprocessing.parent_process()
    is_ours = multiprocessing.current_process().name.startswith(CHILD_PREFIXES)
    watched = any(t.name == THREAD_NAME for t in threading.enumerate())
    if is_ours and parent is not None and not watched:
        threading.Thread(target=_watch, args=(parent.pid,), name=THREAD_NAME, daemon=True).start()


def _watch(parent_pid: int | None) -> None:
    # the parent may have died before this ran, so its pid comes from multiprocessing
    while os.getppid() == parent_pid:
        time.sleep(PERIOD_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)

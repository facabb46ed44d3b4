"""SIGALRM in worker processes: user code cannot have it, and a stray one does no harm.

Invariant: a worker is not ended by an alarm, and no alarm handler of user code is ever run
in the middle of Dask's or an engine's code, which share the main thread with asynchronous
workflows.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any, Optional

from trinity_dask.cluster.loop_watch import in_user_code

log = logging.getLogger("trinity_dask.cluster")

REFUSED = (
    "SIGALRM cannot be used in a workflow or reward: its handler would be run in the middle of "
    "other work of this worker's event loop. Every run and every reward has a deadline already "
    "(explorer.max_timeout_s, workflow_args.reward_timeout_s); for a limit of your own use "
    "asyncio.timeout, or a process; math_verify is safe behind trinity_dask.rewards.math:math_equal"
)

_original: Any = None


class AlarmRefused(RuntimeError):
    """User code on the event loop asked for SIGALRM."""


def guard_alarms() -> None:
    """Guard this process. In its main thread; a second call changes nothing."""
    global _original
    if _original is not None or threading.current_thread() is not threading.main_thread():
        return
    _original = signal.signal
    signal.signal(signal.SIGALRM, _stray)
    signal.signal = _guarded  # type: ignore[assignment]


def release_alarms() -> None:
    """Give the process its own :func:`signal.signal` back."""
    global _original
    if _original is not None:
        signal.signal, _original = _original, None


def _guarded(number: int, handler: Any) -> Any:
    if number == signal.SIGALRM and in_user_code():
        raise AlarmRefused(REFUSED)
    return _original(number, handler)


def _stray(number: int, frame: Optional[FrameType]) -> None:
    log.warning("an alarm (SIGALRM) that user code in a thread had set has no effect here")

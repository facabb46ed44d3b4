"""How late an event loop runs, and the end of user code that will not let go of it.

Invariant: user code that holds the main thread's event loop beyond its deadline is
interrupted, nothing else ever is; the interruption is raised inside the user's frames, never
in those of Dask or of the engine. User code cannot have SIGALRM, whose handler would run in the
middle of anything, and a stray alarm does no harm. A worker answers :data:`OP` from its event
loop; no answer in time means that the loop is held up. Watching needs no cooperation of the
loop: a thread looks whether the loop still beats.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Optional

from distributed import Scheduler, Worker, WorkerPlugin

log = logging.getLogger("trinity_dask.loop")

BEAT_S = 0.1
LOOK_S = 0.25
WARN_S = 1.0
KEEP = 4096  # beats remembered, about seven minutes
# code that never awaits stops its whole worker; no deadline is worth more than this
MAX_BLOCK_S = 120.0
STACK_CHARS = 3000
SIGNAL = signal.SIGUSR2


class Interrupted(BaseException):
    """Raised in user code whose time is up. Not an ``Exception``: user code lets it pass."""


@dataclass(eq=False)
class UserCode:
    """A piece of user code that runs on the event loop, and when it has to end."""

    what: str
    deadline: Optional[float]  # monotonic clock; None = never


_current: contextvars.ContextVar[Optional[UserCode]] = contextvars.ContextVar(
    "trinity_user_code", default=None
)
_active: set[UserCode] = set()
_watches: dict[int, LoopWatch] = {}


def user_task(
    work: Coroutine[Any, Any, Any], deadline: Optional[float], what: str
) -> asyncio.Task[Any]:
    """``work`` as a task that is interrupted if it blocks the loop beyond ``deadline``.

    The mark is inherited by every task that the code starts. An interrupted task ends with
    :class:`Interrupted`; one that asks to end the process fails instead (:func:`no_exit`).
    """
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_task_without_exit)
    code = UserCode(what, deadline)
    context = contextvars.copy_context()
    context.run(_current.set, code)

    async def run() -> Any:
        with no_exit():
            return await work

    task = loop.create_task(run(), context=context)
    _active.add(code)
    task.add_done_callback(lambda _: _active.discard(code))
    task.add_done_callback(lambda _: work.close())  # a task cancelled at once never began it
    return task


def _task_without_exit(
    loop: asyncio.AbstractEventLoop, work: Any, **context: Any
) -> asyncio.Task[Any]:
    """The loop's task factory: a task that user code starts cannot end the worker either.

    A loop raises ``SystemExit`` of any of its tasks, also of one whose result is awaited.
    """
    seen = context.get("context")
    is_user = _current.get() is not None if seen is None else seen.get(_current) is not None
    if not is_user or not asyncio.iscoroutine(work):
        return asyncio.Task(work, loop=loop, **context)

    async def run() -> Any:
        with no_exit():
            return await work

    task = asyncio.Task(run(), loop=loop, **context)
    task.add_done_callback(lambda _: work.close())  # one that is cancelled at once never began it
    return task


@contextmanager
def no_exit() -> Iterator[None]:
    """Around user code on the event loop, which re-raises these two and so ends the worker.

    Raises:
        RuntimeError: in place of a ``SystemExit`` or ``KeyboardInterrupt``, naming it.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"user code raised {type(error).__name__}: {error}") from error


def current_watch() -> Optional[LoopWatch]:
    """The watch of the running event loop."""
    return _watches.get(id(asyncio.get_running_loop()))


class LoopWatch:
    """Watches the event loop it is started on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lags: deque[tuple[float, float]] = deque(maxlen=KEEP)
        self._beat = time.monotonic()
        self._timer: Optional[asyncio.TimerHandle] = None
        self._stopped = threading.Event()
        self._loop_thread = threading.get_ident()
        self._can_interrupt = False

    # on the loop ------------------------------------------------------------------------
    def start(self) -> None:
        """Begin; where the loop runs in the main thread, user code can be interrupted."""
        loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        if threading.current_thread() is threading.main_thread():
            signal.signal(SIGNAL, self._on_signal)
            self._can_interrupt = True
        _watches[id(loop)] = self
        self._beat = time.monotonic()
        self._timer = loop.call_later(BEAT_S, self._on_beat)
        threading.Thread(target=self._look, name="trinity-loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()
        for key in [key for key, watch in _watches.items() if watch is self]:
            del _watches[key]

    def _on_beat(self) -> None:
        now = time.monotonic()
        lag = max(now - self._beat - BEAT_S, 0.0)
        self._lags.append((now, lag))
        if lag > WARN_S:
            log.warning("the event loop of %s was held up for %.1f s", self.name, lag)
        self._beat = now
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._on_beat)

    def max_lag_s(self, window_s: float) -> float:
        """The longest delay in the last ``window_s`` seconds, a present one included."""
        now = time.monotonic()
        longest = max(now - self._beat - BEAT_S, 0.0)
        for when, lag in reversed(self._lags):
            if when < now - window_s:
                break
            longest = max(longest, lag)
        return longest

    # in the thread ----------------------------------------------------------------------
    def _look(self) -> None:
        told = 0.0
        while not self._stopped.wait(LOOK_S):
            beat = self._beat
            blocked_s = time.monotonic() - beat
            if blocked_s <= WARN_S:
                continue
            if beat != told:
                told = beat
                frame = sys._current_frames().get(self._loop_thread)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                log.warning(
                    "the event loop of %s has been held up for %.1f s by:\n%s",
                    self.name,
                    blocked_s,
                    stack[-STACK_CHARS:],
                )
            now = time.monotonic()
            if self._can_interrupt and any(_late(c, blocked_s, now) for c in tuple(_active)):
                signal.pthread_kill(self._loop_thread, SIGNAL)

    def _on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        """In the main thread, inside whatever it is executing right now."""
        code, now = _current.get(), time.monotonic()
        if code is not None and _late(code, now - self._beat, now):
            raise Interrupted(code.what)


def _late(code: UserCode, blocked_s: float, now: float) -> bool:
    return blocked_s > MAX_BLOCK_S or (code.deadline is not None and now > code.deadline)


# SIGALRM --------------------------------------------------------------------------------
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
    if number == signal.SIGALRM and _current.get() is not None:  # in user code on the loop
        raise AlarmRefused(REFUSED)
    return _original(number, handler)


def _stray(number: int, frame: Optional[FrameType]) -> None:
    log.warning("an alarm (SIGALRM) that user code in a thread had set has no effect here")


# the watch of a worker ------------------------------------------------------------------
OP = "trinity_watch"

_reports: dict[str, Callable[[], Any]] = {}


def add_report(name: str, report: Callable[[], Any]) -> None:
    """Have this process's answers contain ``report()`` under ``name``."""
    _reports[name] = report


class WatchLoop(WorkerPlugin):
    """Starts a :class:`LoopWatch` in the worker and answers :data:`OP`."""

    name = "trinity-watch"
    idempotent = True

    def setup(self, worker: Worker) -> None:
        self.watch = LoopWatch(str(worker.name))
        self.watch.start()
        if worker.nanny or not Scheduler._instances:  # the process is the worker's own
            guard_alarms()
        worker.handlers[OP] = self.report

    def teardown(self, worker: Worker) -> None:
        self.watch.stop()
        release_alarms()
        worker.handlers.pop(OP, None)

    async def report(self, window_s: float, full: bool) -> dict[str, Any]:
        """The longest delay of the loop in the last ``window_s`` seconds; ``full``: all else."""
        found: dict[str, Any] = {"loop_lag_s": self.watch.max_lag_s(window_s)}
        for name, report in _reports.items() if full else ():
            try:
                found[name] = report()
            except Exception:
                log.exception("the report %r of %s failed", name, self.watch.name)
        return found

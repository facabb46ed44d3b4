"""Blocking user code in threads that can be given up.

Invariant: whoever awaits gets an answer soon after the deadline whatever the code does. The
thread of a call that ran out of time is asked to stop (an exception is raised inside it at
its next Python instruction); one that does not is counted as abandoned, and being a daemon,
it never keeps its process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Optional

from trinity_dask.cluster.loop_watch import Interrupted

__all__ = ["Interrupted", "StuckThread", "ThreadCall", "abandoned_threads", "run_in_thread"]

log = logging.getLogger("trinity_dask.workflows")

SETTLE_S = 1.0
NO_SIGNALS = (
    "signals (signal.signal, signal.alarm, and time limits built on SIGALRM) work only in a "
    "main thread, and workflows and rewards run elsewhere. Every run and every reward has a "
    "deadline already (explorer.max_timeout_s, workflow_args.reward_timeout_s); for a limit of "
    "your own use asyncio.timeout in async code, or a process; math_verify is safe behind "
    "trinity_dask.rewards.math:math_equal"
)

_abandoned: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class StuckThread(TimeoutError):
    """Code that ran out of time and cannot be stopped; its thread is left behind."""


def abandoned_threads() -> int:
    """Threads of this process that were given up and still run."""
    return sum(thread.is_alive() for thread in tuple(_abandoned))


class ThreadCall:
    """One call in its own daemon thread. Make it on a running event loop."""

    def __init__(self, fn: Callable[..., Any], *args: Any, name: str = "workflow") -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self._context = contextvars.copy_context()
        self._guard = threading.Lock()
        self._finished = False
        self._thread = threading.Thread(
            target=self._main, args=(fn, args), name=f"trinity-{name}", daemon=True
        )
        self._thread.start()

    def _main(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            value, error = self._outcome(fn, args)
            with self._guard:
                self._finished = True
            self._loop.call_soon_threadsafe(self._settle, value, error)
        except (Interrupted, RuntimeError):
            # the call was given up, or its loop is gone: nobody waits for this result
            return

    def _outcome(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
        try:
            return self._context.run(fn, *args), None
        except Interrupted:
            return None, TimeoutError("interrupted at its deadline")
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # a future cannot carry the first; the others would end the worker
            return None, RuntimeError(f"user code raised {type(error).__name__}: {error}")
        except BaseException as error:  # delivered to the awaiting side, never swallowed
            return None, explained(error)

    def _settle(self, value: Any, error: Optional[BaseException]) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)

    def interrupt(self) -> None:
        """Ask the thread to stop. Code inside a C call goes on until that call returns."""
        with self._guard:
            if self._finished or self._thread.ident is None:
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(Interrupted)
            )

    async def give_up(self) -> bool:
        """Interrupt it and give it a moment; whether the thread has ended."""
        self.interrupt()
        await asyncio.wait({self.future}, timeout=SETTLE_S)
        ended = self.future.done()
        self._discard()
        if not ended:
            self._abandon()
        return ended

    def leave(self) -> None:
        """Interrupt it without waiting; it is looked at again a moment later."""
        self.interrupt()
        self._discard()
        self._loop.call_later(SETTLE_S, self._abandon)

    def _discard(self) -> None:
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()  # marks it as seen: it was given up on purpose

    def _abandon(self) -> None:
        if self._finished or not self._thread.is_alive():
            return
        _abandoned.add(self._thread)
        log.warning(
            "%s does not stop: its thread is left behind. %d such thread(s) in this process; "
            "on a runner worker (cluster.runner.n_workers) the process would be restarted",
            self.name,
            abandoned_threads(),
        )


def explained(error: BaseException) -> BaseException:
    """``error``, or what to do instead where it comes from a signal outside a main thread."""
    if isinstance(error, ValueError) and _is_about_signals(error):
        better = RuntimeError(NO_SIGNALS)
        better.__cause__ = error
        return better
    return error


def _is_about_signals(error: BaseException) -> bool:
    text = str(error)
    return "signal only works in main thread" in text or "signal.alarm()" in text


async def run_in_thread(
    fn: Callable[..., Any], *args: Any, timeout_s: Optional[float] = None, name: str = "workflow"
) -> Any:
    """``fn(*args)`` in a thread of its own.

    Raises:
        TimeoutError: not done after ``timeout_s``; the thread was interrupted.
        StuckThread: the same, and the thread does not stop.
    """
    call = ThreadCall(fn, *args, name=name)
    try:
        done, _ = await asyncio.wait({call.future}, timeout=timeout_s)
        if done:
            return call.future.result()
        ended = await call.give_up()
    except asyncio.CancelledError:
        call.leave()
        raise
    message = f"{name} did not return within {timeout_s:g} s"
    if ended:
        raise TimeoutError(message)
    raise StuckThread(f"{message} and cannot be interrupted; its thread is left behind")

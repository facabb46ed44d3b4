"""Blocking user code in threads that can be given up.

Invariant: whoever awaits gets an answer at the deadline whatever the code does. The thread
of a call that ran out of time is asked to stop (an exception is raised inside it at its
next Python instruction); being a daemon, it never keeps its process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import threading
from collections.abc import Callable
from typing import Any, Optional


class Interrupted(BaseException):
    """Raised inside a thread whose time is up. Not an ``Exception``: user code lets it pass."""


class ThreadCall:
    """One call in its own daemon thread. Make it on a running event loop."""

    def __init__(self, fn: Callable[..., Any], *args: Any, name: str = "workflow") -> None:
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
            return None, error

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


async def run_in_thread(
    fn: Callable[..., Any], *args: Any, timeout_s: Optional[float] = None, name: str = "workflow"
) -> Any:
    """``fn(*args)`` in a thread of its own.

    Raises:
        TimeoutError: not done after ``timeout_s``; the thread was interrupted.
    """
    call = ThreadCall(fn, *args, name=name)
    try:
        done, _ = await asyncio.wait({call.future}, timeout=timeout_s)
    except asyncio.CancelledError:
        call.interrupt()
        call.future.cancel()
        raise
    if done:
        return call.future.result()
    call.interrupt()
    call.future.cancel()
    raise TimeoutError(f"{name} did not return within {timeout_s:g} s")

"""Calls that run in a helper process: with a main thread of its own, and killable.

Invariant: a call ends with a value, an error, or at its deadline with the helper killed; a
helper that was left in the middle of a call is never used again. Helpers are kept warm,
because one needs seconds to import what it calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, Optional

START_TIMEOUT_S = 120.0
# a wait in one piece could not be interrupted by the deadline of whoever waits
PIECE_S = 0.25
MAX_HELPERS = max(1, min(4, (os.cpu_count() or 1) // 2))


class ProcessCallError(RuntimeError):
    """The function raised, in the helper process; the message begins with the type."""


class Helper:
    """One helper process; used by one thread at a time."""

    def __init__(self) -> None:
        to_child, self._requests = os.pipe()
        self._answers, from_child = os.pipe()
        command = [sys.executable, "-m", "trinity_dask.rewards.child"]
        command += [str(to_child), str(from_child), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=(to_child, from_child), stdin=subprocess.DEVNULL
            )
        finally:
            os.close(to_child)
            os.close(from_child)
        self._out = Connection(self._requests, readable=False)
        self._in = Connection(self._answers, writable=False)
        self._loaded: set[str] = set()
        self._loading: Optional[str] = None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def load(self, target: str) -> None:
        """Have ``target`` imported. May be left in the middle and called again.

        Raises:
            ProcessCallError: it cannot be imported.
            TimeoutError: it was not within two minutes.
            EOFError: the helper died.
        """
        while target not in self._loaded:
            if self._loading is None:
                self._out.send((target, None))
                self._loading = target
            answer = self._receive(START_TIMEOUT_S, self._loading)
            done, self._loading = self._loading, None
            _value(answer)
            self._loaded.add(done)

    def call(self, target: str, args: tuple[Any, ...], timeout_s: Optional[float]) -> Any:
        """``target(*args)``; raises as :meth:`load`. Not to be left in the middle."""
        self._out.send((target, args))
        return _value(self._receive(timeout_s, target))

    def _receive(self, timeout_s: Optional[float], target: str) -> Any:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._in.poll(PIECE_S):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{target} did not return within {timeout_s:g} s")
        return self._in.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()


def _value(answer: Any) -> Any:
    if answer[0] == "ok":
        return answer[1]
    raise ProcessCallError(f"{answer[1]}: {answer[2]}")


class Helpers:
    """At most ``size`` helpers, lent to one thread each."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[Helper] = []
        self._count = 0
        self._changed = threading.Condition()

    def call(self, target: str, args: tuple[Any, ...], timeout_s: Optional[float] = None) -> Any:
        """``target(*args)`` in a helper. ``target`` is ``module:name``; values are pickled.

        ``timeout_s`` bounds the call itself, not the wait for a helper or its start.

        Raises:
            ProcessCallError: the function raised, or its helper died.
            TimeoutError: it did not return in time; its helper was killed.
        """
        helper = self._borrow()
        busy = False
        try:
            helper.load(target)
            busy = True
            value = helper.call(target, args, timeout_s)
            busy = False
            return value
        except ProcessCallError:
            busy = False
            raise
        except (EOFError, OSError) as error:
            busy = True
            if isinstance(error, TimeoutError):
                raise
            raise ProcessCallError(f"the helper process of {target} died") from error
        finally:
            self._give_back(helper, usable=not busy)

    def _borrow(self) -> Helper:
        with self._changed:
            while True:
                if self._free:
                    return self._free.pop()
                if self._count < self._size:
                    self._count += 1
                    break
                self._changed.wait(PIECE_S)
        try:
            return Helper()
        except BaseException:
            self._lose()
            raise

    def _give_back(self, helper: Helper, usable: bool) -> None:
        if usable and helper.alive:
            with self._changed:
                self._free.append(helper)
                self._changed.notify()
            return
        helper.kill()
        self._lose()

    def _lose(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify()

    def close(self) -> None:
        """End the helpers that are free."""
        with self._changed:
            free, self._free = self._free, []
            self._count -= len(free)
        for helper in free:
            helper.kill()


_helpers = Helpers(MAX_HELPERS)
call_in_process = _helpers.call

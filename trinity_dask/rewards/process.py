"""Calls that run in a helper process: with a main thread of its own, and killable.

Invariant: a call ends with a value, an error, or at its deadline with the helper killed; a
helper that was left in the middle of a call is never used again. Helpers are kept warm,
because one needs seconds to import what it calls. Time spent until a helper has taken the call
is noted (``WAITING``), so that whoever set a deadline can leave it out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any, Optional

START_TIMEOUT_S = 120.0
# a wait in one piece could not be interrupted by the deadline of whoever waits
PIECE_S = 0.25
HELPERS = max(1, min(4, (os.cpu_count() or 1) // 2))
MOST_HELPERS = max(4, min(16, os.cpu_count() or 1))
GROW_AFTER_S = 1.0
# nobody waits longer while no helper begins or ends a call
STALLED_S = 600.0

Call = tuple[str, tuple[Any, ...]]


class ProcessCallError(RuntimeError):
    """The function raised, in the helper process; the message begins with the type."""


class HelperDied(ProcessCallError):
    """The helper process ended in the middle of the call."""


class Waiting:
    """How long the threads of one call waited for helpers, in which any of them waited."""

    def __init__(self) -> None:
        self._n = 0
        self._guard = threading.Lock()
        self._state: tuple[float, Optional[float]] = (0.0, None)

    def seconds(self) -> float:
        """All waits so far, with the one that goes on."""
        total, since = self._state
        return total if since is None else total + time.monotonic() - since

    @property
    def now(self) -> bool:
        return self._state[1] is not None

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, n: int) -> None:
        with self._guard:
            total = self.seconds()
            self._n += n
            self._state = (total, time.monotonic() if self._n else None)


WAITING: ContextVar[Optional[Waiting]] = ContextVar("waiting for a helper", default=None)


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
        self._done: set[str] = set()
        self._doing: Optional[str] = None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def prepare(self, target: str, args: Optional[tuple[Any, ...]] = None) -> None:
        """Have ``target`` imported, or called for what it leaves there; each once.

        May be left in the middle and called again.

        Raises:
            ProcessCallError: it cannot be imported, or raised.
            TimeoutError: not within two minutes.
            EOFError: the helper died.
        """
        wanted = repr((target, args))
        while wanted not in self._done:
            if self._doing is None:
                self._out.send((target, args))
                self._doing = wanted
            answer = self._receive(START_TIMEOUT_S, target)
            done, self._doing = self._doing, None
            _value(answer)
            self._done.add(done)

    def call(self, target: str, args: tuple[Any, ...], timeout_s: Optional[float]) -> Any:
        """``target(*args)``; raises as :meth:`prepare`. Not to be left in the middle."""
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
    """``size`` helpers, lent to one thread each, in the order in which they were asked for.

    More are started, up to ``most``, when threads wait for one; they end when nobody waits.
    """

    def __init__(self, size: int, most: Optional[int] = None) -> None:
        self._size, self._most = size, max(size, most or size)
        self._free: list[Helper] = []
        self._count = 0
        self._queue: deque[object] = deque()
        self._moved = time.monotonic()
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """Helpers that there are, free or lent."""
        return self._count

    def call(
        self,
        target: str,
        args: tuple[Any, ...],
        timeout_s: Optional[float] = None,
        first: Optional[Call] = None,
    ) -> Any:
        """``target(*args)`` in a helper. ``target`` is ``module:name``; values are pickled.

        ``first`` is called before, once in every helper. ``timeout_s`` bounds the call itself,
        not the wait for a helper, its start or ``first``.

        Raises:
            ProcessCallError: the function raised, or its helper died (``HelperDied``).
            TimeoutError: it did not return in time, and its helper was killed; or no helper
                began or ended a call for ten minutes.
        """
        busy = False
        helper: Optional[Helper] = None
        waiting = WAITING.get() or Waiting()
        try:
            with waiting.counted():
                helper = self._borrow()
                helper.prepare(target)
                if first is not None:
                    helper.prepare(*first)
            busy = True
            value = helper.call(target, args, timeout_s)
            busy = False
            return value
        except ProcessCallError:
            busy = False
            raise
        except TimeoutError:
            busy = True
            raise
        except (EOFError, OSError) as error:
            in_call, busy = busy, True
            kind = HelperDied if in_call else ProcessCallError
            raise kind(f"the helper process of {target} died") from error
        finally:
            if helper is not None:
                self._give_back(helper, usable=not busy)

    def _borrow(self) -> Helper:
        me, asked = object(), time.monotonic()
        with self._changed:
            self._queue.append(me)
            try:
                while True:
                    if self._queue[0] is me:
                        while self._free:
                            helper = self._free.pop()
                            if helper.alive:
                                return helper
                            helper.kill()  # ended by somebody else, for its memory perhaps
                            self._count -= 1
                        late = time.monotonic() - asked > GROW_AFTER_S
                        if self._count < (self._most if late else self._size):
                            self._count += 1
                            break
                    if time.monotonic() - max(asked, self._moved) > STALLED_S:
                        raise TimeoutError(f"no helper process was free for {STALLED_S:g} s")
                    self._changed.wait(PIECE_S)
            finally:
                self._queue.remove(me)
                self._moved = time.monotonic()
                self._changed.notify_all()
        try:
            return Helper()
        except BaseException:
            self._lose()
            raise

    def _give_back(self, helper: Helper, usable: bool) -> None:
        with self._changed:
            self._moved = time.monotonic()
            wanted = self._queue or self._count <= self._size
            if usable and wanted and helper.alive:
                self._free.append(helper)
                self._changed.notify_all()
                return
        helper.kill()
        self._lose()

    def _lose(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the helpers that are free."""
        with self._changed:
            free, self._free = self._free, []
            self._count -= len(free)
        for helper in free:
            helper.kill()


_helpers = Helpers(HELPERS, MOST_HELPERS)
call_in_process = _helpers.call

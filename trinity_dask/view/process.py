"""The viewer's process, seen from the one that serves the pages.

Invariant: a question has an answer, or an error within ``DEADLINE_S``; a process that has ended
(nobody asked for long, it was killed) is started again by the next question, one that does not
answer is ended first. At most one question is on its way; others wait in their order.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

import trinity_dask

DEADLINE_S = 60.0
END_S = 5.0
# large arrays come and go: what is freed goes back to the system
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(256 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 20),
}


class ViewerError(RuntimeError):
    """There is no answer; says why."""


class Viewer:
    """Answers of one process, which is started when it is first asked."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="viewer")
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._closed = False

    async def ask(
        self, asked: dict[str, Any], gone: Callable[[], bool] = lambda: False
    ) -> tuple[int, bytes]:
        """Status and JSON. ``gone()``: nobody waits for the answer any more.

        Raises:
            ViewerError: it did not answer in time, or ended; or this is closed.
        """
        if self._closed:
            raise ViewerError("the viewer has been closed")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._ask, asked, gone)

    def close(self) -> None:
        """End the process. Does not wait for a question that is on its way."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()

    @property
    def pid(self) -> Optional[int]:
        """Of the process, while there is one."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    # in the thread --------------------------------------------------------------------------
    def _ask(self, asked: dict[str, Any], gone: Callable[[], bool]) -> tuple[int, bytes]:
        if gone():
            return 204, b""
        for last in (False, True):
            process = self._running()
            try:
                return self._asked(process, asked)
            except EOFError:
                code = self._end()
                if last or self._closed:
                    raise ViewerError(
                        f"the viewer's process ended with exit code {code}; the log of the process "
                        "that serves this page says why"
                    ) from None
            except TimeoutError:
                self._end()
                raise ViewerError(
                    f"no answer within {self._deadline_s:g} s; the job's file system may be slow"
                ) from None
        raise AssertionError("the last attempt returns or raises")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            package = str(Path(trinity_dask.__file__).parent.parent)
            paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trinity_dask.view.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
            )
        return self._process

    def _asked(self, process: subprocess.Popen[bytes], asked: dict[str, Any]) -> tuple[int, bytes]:
        """Raises EOFError, TimeoutError."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise EOFError from error
        until = time.monotonic() + self._deadline_s
        found = bytearray()
        while b"\n" not in found:
            found += _read(process.stdout.fileno(), until)
        head, _, body = bytes(found).partition(b"\n")
        status, size = map(int, head.split())
        rest = bytearray(body)
        while len(rest) < size:
            rest += _read(process.stdout.fileno(), until)
        return status, bytes(rest)

    def _end(self) -> Optional[int]:
        """End the process; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(OSError):  # what was written and never read
                stream.close()
        return process.wait(END_S)


def _read(descriptor: int, until: float) -> bytes:
    ready, _, _ = select.select([descriptor], [], [], max(until - time.monotonic(), 0.0))
    if not ready:
        raise TimeoutError
    data = os.read(descriptor, 1 << 20)
    if not data:
        raise EOFError
    return data

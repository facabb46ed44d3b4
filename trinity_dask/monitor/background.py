"""A sink behind a thread and a bounded queue.

Invariant: the caller never waits for the sink, not even for its start or its close
(beyond the stated deadline). What does not fit into the queue is dropped and counted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from trinity_dask.monitor.sinks import Sink

QUEUE_LENGTH = 10_000
CLOSE_TIMEOUT_S = 20.0
_STOP: tuple[str, tuple[Any, ...]] = ("stop", ())


class BackgroundSink:
    """Runs ``make()`` and every call on the sink it returns in one daemon thread.

    ``on_error`` is called once, from that thread, with the first exception; after it the
    sink is dead and ignores everything it is given.
    """

    blocking = False

    def __init__(
        self, name: str, make: Callable[[], Sink], on_error: Callable[[Exception], None]
    ) -> None:
        self.dropped = 0
        self.dead = False
        self._make = make
        self._on_error = on_error
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(QUEUE_LENGTH)
        # daemon: a sink that hangs in its close must not keep the process alive
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def log(self, time_s: float, step: int, metrics: Mapping[str, float]) -> None:
        self._put(("log", (time_s, step, metrics)))

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        self._put(("log_table", (name, rows, step)))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Drain, close, and wait for it at most ``timeout_s``.

        Raises:
            TimeoutError: the sink did not finish in time; it is left to its thread.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if not self.dead:
                self._queue.put(_STOP, timeout=timeout_s)
        except queue.Full:
            raise TimeoutError(f"its queue stayed full for {timeout_s:.0f} s") from None
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise TimeoutError(f"it did not close within {timeout_s:.0f} s")

    def _put(self, item: tuple[str, tuple[Any, ...]]) -> None:
        if self.dead:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        try:
            self._serve(self._make())
        except Exception as error:
            self.dead = True
            self._on_error(error)

    def _serve(self, sink: Sink) -> None:
        while True:
            method, args = self._queue.get()
            if method == "stop":
                sink.close()
                return
            getattr(sink, method)(*args)

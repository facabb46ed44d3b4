"""Where metrics go: what a sink is, its registry, the two sinks that need nothing, threads.

Invariant: a sink is used by one thread at a time, and may raise; the
:class:`~trinity_dask.monitor.monitor.Monitor` above it decides what an error means. Behind a
:class:`BackgroundSink` the caller never waits for the sink, not even for its start or its
close (beyond the stated deadline); what does not fit into the queue is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity_dask.monitor.history import encode_line, metrics_path

logger = logging.getLogger("trinity_dask.monitor")

QUEUE_LENGTH = 10_000
CLOSE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class SinkContext:
    """What a sink is told about the run it serves.

    ``run_id`` is the same for every incarnation of a job directory; ``incarnation``
    counts the times this role was started in it, from 1.
    """

    job_dir: Path
    role: str
    run_name: str
    run_id: str
    incarnation: int
    config: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)


class Sink:
    """A destination. ``blocking`` sinks (network, foreign code) get a thread of their own.

    One that cannot show tables, or has nothing to close, leaves these methods out.
    """

    blocking = True

    def log(self, time_s: float, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. ``time_s`` in Unix seconds."""

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Record a table under a name."""

    def close(self) -> None:
        """Write what is kept back; nothing is logged after it."""


SinkFactory = Callable[[SinkContext], Sink]
SINKS: dict[str, SinkFactory] = {}


def register_sink(name: str) -> Callable[[SinkFactory], SinkFactory]:
    """Decorator: make a sink available under ``monitor.sinks``."""

    def add(factory: SinkFactory) -> SinkFactory:
        if name in SINKS:
            raise KeyError(f"a sink named {name!r} exists already; choose another name")
        SINKS[name] = factory
        return factory

    return add


# One line on the console shows the figures people look at first, as far as they exist.
HEADLINE = re.compile(
    r"^(eval/|rollout/reward|reward|.*loss$|.*/entropy$|.*grad_norm$|.*tokens_per_s|.*/lr$)"
)


def headline(metrics: Mapping[str, float], limit: int = 8) -> str:
    """At most ``limit`` metrics as ``name value``, the well-known ones first."""
    chosen = [name for name in metrics if HEADLINE.match(name)] or list(metrics)
    shown = ", ".join(f"{name} {metrics[name]:.4g}" for name in chosen[:limit])
    hidden = len(metrics) - min(len(chosen), limit)
    return f"{shown} (+{hidden} more)" if hidden else shown


@register_sink("console")
class ConsoleSink(Sink):
    """One log line per step, in the process's own log."""

    blocking = False

    def __init__(self, context: SinkContext) -> None:
        self._role = context.role

    def log(self, time_s: float, step: int, metrics: Mapping[str, float]) -> None:
        logger.info("%s step %d: %s", self._role, step, headline(metrics))

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        logger.info("%s step %d: table %s, %d rows", self._role, step, name, len(rows))


def append_text(path: Path, text: str) -> None:
    """Append in one write, so that roles sharing the file never mix their lines."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def end_partial_line(path: Path) -> None:
    """Close a line that a killed process left open, so that the next one stays readable."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        complete = file.read(1) == b"\n"
    if not complete:
        append_text(path, "\n")


@register_sink("jsonl")
class JsonlSink(Sink):
    """``<job>/monitor/metrics.jsonl`` and ``<job>/monitor/tables/<name>.jsonl``."""

    blocking = False

    def __init__(self, context: SinkContext) -> None:
        self._context = context
        self._path = metrics_path(context.job_dir)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        end_partial_line(self._path)

    def log(self, time_s: float, step: int, metrics: Mapping[str, float]) -> None:
        context = self._context
        append_text(
            self._path, encode_line(time_s, context.role, step, context.incarnation, metrics)
        )

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        path = self._path.parent / "tables" / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.jsonl"
        path.parent.mkdir(exist_ok=True)
        end_partial_line(path)
        lines = [json.dumps({"step": step, **row}, default=str) + "\n" for row in rows]
        append_text(path, "".join(lines))


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

    def log(self, *args: Any, method: str = "log") -> None:
        if self.dead:
            return
        try:
            self._queue.put_nowait((method, args))
        except queue.Full:
            self.dropped += 1

    def log_table(self, *args: Any) -> None:
        self.log(*args, method="log_table")

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Drain, close, and wait for it at most ``timeout_s``.

        Raises:
            TimeoutError: the sink did not finish in time; it is left to its thread.
        """
        deadline = time.monotonic() + timeout_s
        try:
            if not self.dead:
                self._queue.put(("close", ()), timeout=timeout_s)
        except queue.Full:
            raise TimeoutError(f"its queue stayed full for {timeout_s:.0f} s") from None
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise TimeoutError(f"it did not close within {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            sink = self._make()
            while True:
                method, args = self._queue.get()
                getattr(sink, method)(*args)
                if method == "close":
                    return
        except Exception as error:
            self.dead = True
            self._on_error(error)

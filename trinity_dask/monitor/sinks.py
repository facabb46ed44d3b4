"""Where metrics go: the sink protocol, its registry, and the two sinks that need nothing.

Invariant: a sink is used by one thread at a time, and may raise; the
:class:`~trinity_dask.monitor.monitor.Monitor` above it decides what an error means.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trinity_dask.monitor.record import encode_line

logger = logging.getLogger("trinity_dask.monitor")


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


class Sink(Protocol):
    """A destination. ``blocking`` sinks (network, foreign code) get a thread of their own."""

    blocking: bool

    def log(self, time_s: float, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None: ...

    def close(self) -> None: ...


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
class ConsoleSink:
    """One log line per step, in the process's own log."""

    blocking = False

    def __init__(self, context: SinkContext) -> None:
        self._role = context.role

    def log(self, time_s: float, step: int, metrics: Mapping[str, float]) -> None:
        logger.info("%s step %d: %s", self._role, step, headline(metrics))

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        logger.info("%s step %d: table %s, %d rows", self._role, step, name, len(rows))

    def close(self) -> None:
        pass


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
class JsonlSink:
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

    def close(self) -> None:
        pass


def metrics_path(job_dir: str | Path) -> Path:
    """The metrics file of a job directory."""
    return Path(job_dir) / "monitor" / "metrics.jsonl"

"""What is told of a running stage: to the Dask scheduler's dashboard, and to a file beside the
metrics, from which the page of a finished run is made.

Invariant: telling never raises and never waits for anybody. An event is JSON and msgpack: plain
numbers, no NaN, texts and lists of bounded length. The file is bounded: at ``MAX_BYTES`` it becomes
the old one, and the one before is gone. What is told of a resumed stage begins with what its
earlier runs have told.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from trinity_dask.cluster.context import current_worker
from trinity_dask.monitor.curves import is_drawn
from trinity_dask.monitor.history import KEYS, merge, metrics_path, read_lines
from trinity_dask.monitor.sinks import Sink, append_text

log = logging.getLogger("trinity_dask.monitor")

TOPIC = "trinity"
FILE = "events.jsonl"
MAX_BYTES = 8 << 20
MAX_TEXT = 2000  # characters
MAX_ITEMS = 1024  # of a list or a dict
KEEP_S = 5.0  # a changing status is kept in the file so often
AT_ONCE = 200  # points or events of one message
STAGE, METRICS, STATUS, ENGINES, SPAN = "stage", "metrics", "status", "engines", "span"

Event = dict[str, Any]
# of a run's status, what the page shows
SHOWN = (
    *("state", "message", "mode", "stage", "stage_index", "n_stages", "step", "total_steps"),
    *("explorer_step", "model_version", "reward", "tokens_per_s", "in_flight", "queue_batches"),
    *("queue_rows", "accounts", "failures", "workers", "late_workers"),
)
OF_A_RUN = ("state", "message", "mode", "stage", "stage_index", "n_stages", "total_steps")


def plain(value: Any) -> Any:
    """``value`` as JSON and msgpack take it: numbers of other libraries become Python's, what is
    not finite None, anything else a text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, Sequence):
        return [plain(v) for v in value[:MAX_ITEMS]]
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)[:MAX_TEXT]
    return number if math.isfinite(number) else None


def events_path(job_dir: str | Path) -> Path:
    """The events of a stage, in its directory."""
    return metrics_path(job_dir).with_name(FILE)


class RunEvents:
    """Of one run, over its stages; used on the control worker's event loop."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.stage = ""
        self._path: Optional[Path] = None
        self._status: Event = {}
        self._kept_at = 0.0
        self._failed = False

    def begin(self, stage: str, job_dir: str | Path, config: str, **facts: Any) -> None:
        """``stage`` begins. ``facts`` and the text of its configuration, which holds no secret,
        are shown."""
        self.stage, self._path, self._status = stage, events_path(job_dir), {}
        worker = current_worker()
        address = None if worker is None else worker.address
        began = {"job_dir": str(job_dir), "worker": address, **facts}
        event = {**self._event(STAGE), **plain(began)}
        self._send({**event, "anew": True})
        self._keep(event)
        self._send({**self._event("config"), "config": config[: 1 << 18]})

    def earlier(self, events: Sequence[Event]) -> None:
        """What :func:`past_events` has found; told once more, and not kept again."""
        for event in events:
            past = {**event, "run": self.run_id, "stage": self.stage}
            if event["kind"] == STATUS:  # how it stood then is no state of this run
                past["values"] = {k: v for k, v in event["values"].items() if k not in OF_A_RUN}
            self._send(past)

    def metrics(self, role: str, step: int, incarnation: int, values: Mapping[str, float]) -> None:
        """Those of ``values`` that are drawn; the file of the metrics keeps them."""
        shown = {k: float(v) for k, v in values.items() if is_drawn(k) and math.isfinite(v)}
        if shown:
            points = {"role": role, "incarnation": incarnation, "points": [[int(step), shown]]}
            self._send({**self._event(METRICS), **points})

    def status(self, values: Mapping[str, Any]) -> None:
        """What has changed of the run's status."""
        now = {key: plain(values[key]) for key in SHOWN if key in values}
        news = {key: value for key, value in now.items() if self._status.get(key) != value}
        if not news:
            return
        self._status |= news
        self._send({**self._event(STATUS), "values": news})
        if time.monotonic() - self._kept_at > KEEP_S or "state" in news:
            self._kept_at = time.monotonic()
            self._keep({**self._event(STATUS), "values": self._status})

    def engines(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """By slot, those whose state has changed."""
        self._send({**self._event(ENGINES), "engines": plain(states)})

    def span(self, span: Mapping[str, Any]) -> None:
        """A wait or a transfer that has ended; see :class:`trinity_dask.aio.Spans`."""
        self._tell(SPAN, span=plain(span))

    def end(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """The stage ends; its engines as they were last."""
        if states:
            self._tell(ENGINES, engines=plain(states))
        self._keep({**self._event(STATUS), "values": self._status})

    # ways out -------------------------------------------------------------------------
    def _event(self, kind: str) -> Event:
        return {"kind": kind, "run": self.run_id, "stage": self.stage, "time": time.time()}

    def _tell(self, kind: str, **values: Any) -> None:
        event = {**self._event(kind), **{key: plain(value) for key, value in values.items()}}
        self._send(event)
        self._keep(event)

    def _send(self, event: Event) -> None:
        worker = current_worker()
        if worker is None:
            return
        try:
            worker.log_event(TOPIC, event)
        except Exception as error:  # a page must not fail a run
            self._give_up("the dashboard is not told any more", error)

    def _keep(self, event: Event) -> None:
        path = self._path
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size > MAX_BYTES:
                os.replace(path, path.with_suffix(".old.jsonl"))
            append_text(path, json.dumps(event, allow_nan=False) + "\n")
        except (OSError, ValueError) as error:
            self._path = None
            self._give_up(f"{path} is not written any more", error)

    def _give_up(self, what: str, error: Exception) -> None:
        if not self._failed:
            log.warning("%s (%s: %s); the run goes on", what, type(error).__name__, error)
        self._failed = True


class EventSink(Sink):
    """The metrics of one role, for the page."""

    blocking = False

    def __init__(self, events: RunEvents, role: str, incarnation: int) -> None:
        self._events, self._role, self._incarnation = events, role, incarnation

    def log(self, time_s: float, step: int, metrics: Mapping[str, float]) -> None:
        self._events.metrics(self._role, step, self._incarnation, metrics)

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """The page shows no tables."""

    def close(self) -> None:
        """Nothing is kept back."""


def past_events(job_dir: str | Path, limit: int) -> list[Event]:
    """What happened in a stage, from its directory: at most ``limit`` points of its metrics and as
    many events, the newest. Reads files: it belongs in a thread."""
    events: list[Event] = []
    path = metrics_path(job_dir)
    if path.exists():
        lines, _ = read_lines(path)
        events += _points(merge(lines)[-limit:])
    kept = (STATUS, ENGINES, SPAN)
    told = [event for file in event_files(job_dir) for event in read_events(file)]
    return [*events, *(event for event in told[-limit:] if event["kind"] in kept)]


def event_files(job_dir: str | Path) -> list[Path]:
    """Those there are, the older one first."""
    path = events_path(job_dir)
    return [file for file in (path.with_suffix(".old.jsonl"), path) if file.exists()]


def _points(rows: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    """The drawn metrics of rows, some hundred steps of one role at a time."""
    for role in dict.fromkeys(row["role"] for row in rows):
        points = [point_of(row) for row in rows if row["role"] == role]
        for first in range(0, len(points), AT_ONCE):
            some = points[first : first + AT_ONCE]
            yield {"kind": METRICS, "time": 0.0, "role": role, "incarnation": 0, "points": some}


def point_of(line: Mapping[str, Any]) -> list[Any]:
    """Of a line of the metrics: its step, and the metrics that are drawn."""
    values = {k: v for k, v in line.items() if k not in KEYS and is_drawn(k)}
    return [line["step"], {k: v for k, v in values.items() if v is not None and math.isfinite(v)}]


def read_events(path: Path) -> Iterator[Event]:
    """The events of one file, in order; what cannot be read is left out."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                yield decode_event(text)
            except ValueError:  # a killed process leaves half a line
                continue


def decode_event(text: str | bytes) -> Event:
    """One line of the file. Raises ValueError: it is no event."""
    event = json.loads(text)
    if not isinstance(event, dict) or not {"kind", "time"} <= event.keys():
        raise ValueError(f"not an event: {text[:80]!r}")
    return event

"""The same page for a job in its directory, whether it has ended or still runs elsewhere.

Invariant: the directory is only read, and only what was appended since the last look; one look
reads no more than ``MAX_LOOK_BYTES``, so that a page stays quick whatever a job has written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed
from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.server.tornado import BokehTornado
from distributed.http.utils import get_handlers
from tornado.ioloop import PeriodicCallback
from tornado.web import StaticFileHandler

from trinity_dask.dashboard import feed
from trinity_dask.dashboard.feed import Feeds, RunFeed
from trinity_dask.dashboard.pages.site import INDIVIDUAL, PAGES
from trinity_dask.dashboard.plugin import NAME, PAGE, ROUTES
from trinity_dask.monitor.events import METRICS, decode_event, event_files, point_of
from trinity_dask.monitor.history import decode_line, metrics_path
from trinity_dask.view.routes import close as close_viewer

LOOK_MS = 1000
MAX_LOOK_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 20
LINKS = {name: there for name, there in feed.LINKS.items() if there.startswith(f"{PAGE}/")}


class JobReader:
    """Gives to ``feeds`` what lies in the directory of a job, and what is appended later."""

    def __init__(self, job_dir: str | Path, feeds: Feeds) -> None:
        self.job_dir, self.feeds = Path(job_dir), feeds
        self._read: dict[tuple[str, bytes], int] = {}  # bytes of each file
        self._begun: set[str] = set()  # stages

    def look(self, limit: int = MAX_LOOK_BYTES) -> int:
        """Read at most about ``limit`` bytes; how many there were."""
        before, left = sum(self._read.values()), limit
        for stage, directory in stages_of(self.job_dir):
            self._begin(stage, directory)
            for file in (metrics_path(directory), *event_files(directory)):
                if left > 0 and file.exists():
                    left -= self._look_at(stage, file, left)
        return sum(self._read.values()) - before

    def _begin(self, stage: str, directory: Path) -> None:
        if stage in self._begun:
            return
        self._begun.add(stage)
        first = next((_first_time(f) for f in _files(directory)), 0.0)
        facts = {"name": self.job_dir.name, "job_dir": str(directory), "mode": "?"}
        self._apply(stage, {"kind": "stage", "time": first, "began": first, **facts})
        config = directory / "config.yaml"
        if config.exists():
            text = config.read_text(encoding="utf-8", errors="replace")
            self._apply(stage, {"kind": "config", "time": first, "config": text})

    def _apply(self, stage: str, event: dict[str, Any]) -> RunFeed:
        return self.feeds.apply({**event, "run": str(self.job_dir), "stage": stage})

    def _look_at(self, stage: str, path: Path, limit: int) -> int:
        with path.open("rb") as file:
            # known by its first line, with its time: it is renamed when it has become too large
            first = file.readline(MAX_LINE_BYTES)
            if not first.endswith(b"\n"):
                return 0
            start = self._read.get((stage, first), 0)
            file.seek(start)
            data = file.read(limit) + file.readline(MAX_LINE_BYTES)
        end = data.rfind(b"\n") + 1
        if not end and len(data) > MAX_LINE_BYTES:  # nothing of ours
            end = len(data)
        for text in data[:end].splitlines():
            try:
                self._apply(stage, _event(path, text))
            except (KeyError, TypeError, ValueError, AttributeError):
                continue  # half a line of a killed process, or an event of another version
        self._read[stage, first] = start + end
        return end


def stages_of(job_dir: Path) -> list[tuple[str, Path]]:
    """Name and directory of each stage, in the order in which they began to write; of a job
    without stages, or of a stage, ``""`` and itself. Nothing: no job has told anything there."""
    if metrics_path(job_dir).parent.is_dir():
        return [("", job_dir)]
    found = [path.parent for path in job_dir.glob("*/monitor") if path.is_dir()]
    begun = {path: min((f.stat().st_ctime for f in _files(path)), default=0.0) for path in found}
    return [(path.name, path) for path in sorted(found, key=lambda path: begun[path])]


def _files(directory: Path) -> list[Path]:
    files = [metrics_path(directory), *event_files(directory)]
    return [file for file in files if file.exists()]


def _first_time(path: Path) -> float:
    """Unix time in seconds of a file's first line; 0.0 when it has none."""
    with path.open("rb") as file:
        try:
            return float(json.loads(file.readline(MAX_LINE_BYTES))["time"])
        except (KeyError, TypeError, ValueError):
            return 0.0


def _event(path: Path, text: bytes) -> dict[str, Any]:
    if path.name != metrics_path(".").name:
        return decode_event(text)
    line = decode_line(text.decode(errors="replace"))
    known = {"role": line["role"], "incarnation": int(line.get("incarnation", 1))}
    return {
        "kind": METRICS,
        "time": float(line.get("time", 0.0)),
        "points": [point_of(line)],
        **known,
    }


def application(
    job_dirs: Sequence[str | Path], prefix: str = "", links: dict[str, str] | None = None
) -> BokehTornado:
    """A Tornado application with the pages of jobs under ``prefix``, as in a dashboard.

    Everything there is, is read before it returns. Use: route ``PATHS`` to it, or serve it alone;
    then ``app.initialize(IOLoop.current())`` and ``app.start()``, on the loop that serves it.
    ``links`` are relative addresses by their labels, beside the page's own.
    """
    feeds = Feeds({**LINKS, **(links or {})})
    readers = [JobReader(job_dir, feeds) for job_dir in job_dirs]
    for reader in readers:
        while reader.look():
            pass
    server = SimpleNamespace(extensions={NAME: feeds})
    slashed = f"/{prefix.strip('/')}/" if prefix.strip("/") else "/"
    plots = [{"url": url.strip("/"), "name": name} for name, url in INDIVIDUAL.items()]
    extra = {"prefix": slashed, "pages": [PAGE], "plots": plots, "jupyter": False}
    apps = {
        path: Application(FunctionHandler(partial(fill, server, extra)))
        for path, fill in PAGES.items()
    }
    statics = Path(distributed.__file__).parent / "http" / "static"
    found = _Pages(
        apps,
        prefix=prefix,
        use_index=False,
        absolute_url="",
        extra_websocket_origins=[],
        extra_patterns=[
            *get_handlers(server, ROUTES, prefix="/"),
            (r"/statics/(.*)", StaticFileHandler, {"path": str(statics)}),
        ],
    )
    found.readers, found.server = readers, server
    return found


# the paths of the application, as a regular expression, below its prefix
PATHS = rf"({PAGE}|individual-{PAGE}-|static/|statics/).*"


class _Pages(BokehTornado):
    """Looks for what was appended while it serves."""

    readers: Sequence[JobReader] = ()
    server: Any = None

    def start(self) -> None:
        super().start()
        self._looking = PeriodicCallback(self._look, LOOK_MS)
        self._looking.start()

    def stop(self, wait: bool = True) -> None:
        self._looking.stop()
        close_viewer(self.server)
        super().stop(wait)

    def _look(self) -> None:
        for reader in self.readers:
            reader.look()

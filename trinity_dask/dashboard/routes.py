"""What the pages link to: a run's configuration and the ends of its logs as text, and what is known
of all runs as JSON.

Invariant: what is sent comes from the feeds, or is a ``.log`` file of a job that one of them names;
it is plain text or JSON, which no browser takes for a page.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Optional

from distributed.http.utils import RequestHandler

from trinity_dask.dashboard.feed import RunFeed, root_of, summary
from trinity_dask.dashboard.plugin import feeds_of

TAIL_BYTES = 64 << 10


class Plain(RequestHandler):
    """``server`` is the scheduler."""

    def send(self, text: str, kind: str) -> None:
        self.set_header("Content-Type", f"{kind}; charset=utf-8")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Content-Security-Policy", "default-src 'none'; frame-ancestors 'self'")
        self.set_header("Cache-Control", "no-store")
        self.write(text)

    def feed(self, number: str) -> Optional[RunFeed]:
        """The feed of this number; without one the answer is given already."""
        found = feeds_of(self.server).get(int(number))
        if found is None:
            self.missing(f"there is no run of number {number} any more")
        return found

    def missing(self, why: str) -> None:
        self.set_status(404)
        self.send(why, "text/plain")


class Runs(Plain):
    """``trinity/api/runs``: status, facts and engines of every run."""

    def get(self) -> None:
        self.send(json.dumps(summary(feeds_of(self.server))), "application/json")


class Configuration(Plain):
    """``trinity/config/<number>``: the resolved configuration of a stage, without secrets."""

    def get(self, number: str) -> None:
        feed = self.feed(number)
        if feed is not None:
            self.send(feed.config, "text/plain")


class Logs(Plain):
    """``trinity/logs/<number>``: the last lines of every log of a run, where this process sees its
    directory; ``trinity/logs/<number>/<name>``: the end of one."""

    async def get(self, number: str, name: Optional[str] = None) -> None:
        feed = self.feed(number)
        if feed is None:
            return
        files = await asyncio.to_thread(log_files, feed)
        if name is not None:
            files = [file for file in files if file.stem == name]
        if not files:
            self.missing(f"no log of {feed.facts.get('job_dir')} can be seen from here")
            return
        size = TAIL_BYTES // len(files)
        ends = await asyncio.to_thread(lambda: [tail(file, size) for file in files])
        parts = [f"==> {file.name} <==\n{end}" for file, end in zip(files, ends, strict=True)]
        self.send("\n".join(parts), "text/plain")


def log_files(feed: RunFeed) -> list[Path]:
    """Those of the job."""
    root = root_of(feed)
    return [] if root is None else sorted((root / "log").glob("*.log"))


def tail(path: Path, size: int) -> str:
    """The last whole lines in about ``size`` bytes of a file."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(end - size, 0))
        data = file.read(size)
    if end > size:
        data = data[data.find(b"\n") + 1 :]
    return data.decode(errors="replace")


routes: list[tuple[str, type, dict[str, Any]]] = [
    (r"trinity/api/runs", Runs, {}),
    (r"trinity/config/(\d{1,9})", Configuration, {}),
    (r"trinity/logs/(\d{1,9})", Logs, {}),
    (r"trinity/logs/(\d{1,9})/([\w.-]{1,100})", Logs, {}),
]

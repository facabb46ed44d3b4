"""What the pages link to: a run's configuration as text, and what is known of all runs as JSON.

Invariant: everything is read from the feeds, and sent as plain text or JSON that no browser takes
for a page.
"""

from __future__ import annotations

import json
from typing import Any

from distributed.http.utils import RequestHandler

from trinity_dask.dashboard.feed import summary
from trinity_dask.dashboard.plugin import feeds_of


class Plain(RequestHandler):
    """``server`` is the scheduler."""

    def send(self, text: str, kind: str) -> None:
        self.set_header("Content-Type", f"{kind}; charset=utf-8")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Content-Security-Policy", "default-src 'none'; frame-ancestors 'self'")
        self.set_header("Cache-Control", "no-store")
        self.write(text)


class Runs(Plain):
    """``trinity/api/runs``: status, facts and engines of every run."""

    def get(self) -> None:
        self.send(json.dumps(summary(feeds_of(self.server))), "application/json")


class Configuration(Plain):
    """``trinity/config/<number>``: the resolved configuration of a stage, without secrets."""

    def get(self, number: str) -> None:
        feed = feeds_of(self.server).get(int(number))
        if feed is None:
            self.set_status(404)
            self.send(f"there is no run of number {number} any more", "text/plain")
            return
        self.send(feed.config, "text/plain")


routes: list[tuple[str, type, dict[str, Any]]] = [
    (r"trinity/api/runs", Runs, {}),
    (r"trinity/config/(\d{1,9})", Configuration, {}),
]

"""The viewer in the web server of the dashboard: its page, its files and its questions, all GET.

Invariant: jobs are those that the feeds know, so an address cannot name another directory. The page
may load only what is served here, and nothing that a model wrote is ever part of HTML.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distributed.http.utils import RequestHandler

from trinity_dask.dashboard.feed import Feeds, root_of
from trinity_dask.dashboard.plugin import feeds_of
from trinity_dask.view.process import Viewer, ViewerError

NAME = "trinity-viewer"
STATIC = Path(__file__).with_name("static")
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
MAX_QUESTION = 16_384  # characters


def viewer_of(server: Any) -> Viewer:
    """The viewer of a server (a scheduler), made when it is first asked for."""
    if NAME not in server.extensions:
        server.extensions[NAME] = Viewer()
    return server.extensions[NAME]


def close(server: Any) -> None:
    """End the process of a server's viewer, if there is one."""
    viewer = server.extensions.pop(NAME, None)
    if viewer is not None:
        viewer.close()


def jobs(feeds: Feeds) -> list[dict[str, Any]]:
    """The jobs that the feeds know, the newest first, with the numbers of their feeds."""
    found: dict[str, dict[str, Any]] = {}
    for feed in sorted(feeds, key=lambda feed: -feed.number):
        if (root := root_of(feed)) is not None:
            name = {"job": str(root), "name": root.name, "runs": []}
            found.setdefault(str(root), name)["runs"].append(feed.number)
    return list(found.values())


class Answer(RequestHandler):
    """``server`` is the scheduler."""

    _gone = False

    def on_connection_close(self) -> None:
        self._gone = True

    def send(self, body: bytes, kind: str) -> None:
        self.set_header("Content-Type", f"{kind}; charset=utf-8")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")
        self.write(body)

    def fail(self, status: int, why: str) -> None:
        self.set_status(status)
        self.send(json.dumps({"error": why}).encode(), "application/json")


class Static(Answer):
    """The page, and what it loads."""

    def get(self, name: str = "index.html") -> None:
        path = STATIC / name
        if path.parent != STATIC or path.suffix not in TYPES or not path.is_file():
            self.fail(404, f"there is no {name}")
            return
        self.send(path.read_bytes(), TYPES[path.suffix])


class Jobs(Answer):
    """``trinity/rollouts/api/jobs``: those that can be looked at."""

    def get(self) -> None:
        told = json.dumps({"jobs": jobs(feeds_of(self.server))})
        self.send(told.encode(), "application/json")


class Question(Answer):
    """``trinity/rollouts/api/<call>?q=<JSON>``: an answer of the viewer's process."""

    async def get(self, call: str) -> None:
        text = self.get_query_argument("q", "{}", strip=False)
        try:
            asked = json.loads(text) if len(text) <= MAX_QUESTION else None
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict):
            self.fail(400, f"q must be a JSON object of at most {MAX_QUESTION} characters")
            return
        if not _named(asked) <= {known["job"] for known in jobs(feeds_of(self.server))}:
            self.fail(404, "this page knows no such job")
            return
        try:
            status, body = await viewer_of(self.server).ask(
                {**asked, "call": call}, lambda: self._gone
            )
        except ViewerError as error:
            self.fail(503, str(error))
            return
        self.set_status(status)
        if body:
            self.send(body, "application/json")


def _named(asked: dict[str, Any]) -> set[str]:
    """The jobs of which something is asked."""
    query = asked.get("query")
    same = query.get("same") if isinstance(query, dict) else None
    others = [same[0] if isinstance(same, list) and same else same] if same else []
    return {str(job) for job in [asked.get("job"), *others]}


routes: list[tuple[str, type, dict[str, Any]]] = [
    (r"trinity/rollouts", Static, {}),
    (r"trinity/rollouts/static/([a-z]+\.(?:js|css))", Static, {}),
    (r"trinity/rollouts/api/jobs", Jobs, {}),
    (r"trinity/rollouts/api/(state|rows|place|row|tokens|panes)", Question, {}),
]

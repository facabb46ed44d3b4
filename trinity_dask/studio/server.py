"""One page on the loopback device, and the calls that it makes.

Invariant: a call is answered only if it comes from this page: right host, right origin, the token
of the link, JSON. What composes a configuration runs in one thread, one after another (Hydra's
state is global), and never on the loop, which stays free for changes.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from trinity_dask.config.errors import ConfigError
from trinity_dask.config.paths import groups
from trinity_dask.files import write_text
from trinity_dask.manager.config_manager import ConfigManager
from trinity_dask.manager.config_registry import Field, State, from_yaml

STATIC = Path(__file__).with_name("static")
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
HOST = "127.0.0.1"
TOKEN = "X-Studio-Token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MAX_BODY = 4 << 20
LOG_TAIL = 8000  # characters
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_LINK = re.compile(r"https?://[^\s'\"]+")


class Studio:
    """What the page shows and can do; ``directory`` is where it saves and runs."""

    def __init__(self, words: tuple[str, ...], directory: Path) -> None:
        self.manager = ConfigManager(words)
        self.directory = directory
        self.process: Optional[subprocess.Popen[bytes]] = None
        self._painted: dict[str, dict[str, Any]] = {}

    # what a page shows ----------------------------------------------------------------
    def page(self) -> dict[str, Any]:
        """Everything: the fields of both modes with their limits and meanings."""
        self._painted = self._fields()
        return {
            "fields": list(self._painted.values()),
            "presets": groups(),
            "words": list(self.manager.state.words),
            **self._output(),
        }

    def _fields(self) -> dict[str, dict[str, Any]]:
        """By identity: mode, section and name."""
        modes = {"beginner": self.manager.beginner_mode(), "expert": self.manager.expert_mode()}
        return {
            f"{mode}/{section}/{field.label}": _painted(mode, section, field)
            for mode, sections in modes.items()
            for section, fields in sections.items()
            for field in fields
        }

    def _changes(self) -> dict[str, Any]:
        """What is another than on the page as it is."""
        before, now = self._painted, self._fields()
        self._painted = now
        if list(before) != list(now):
            return self.page()
        changed = [field for name, field in now.items() if before[name] != field]
        return {"changed": changed, **self._output()}

    def _output(self) -> dict[str, Any]:
        state = self.manager.state
        return {"yaml": state.to_yaml(), "command": self.manager.command()}

    # what a page does -----------------------------------------------------------------
    def set(self, key: str, value: Any) -> dict[str, Any]:
        self.manager.set(key, value)
        return self._changes()

    def undo(self) -> dict[str, Any]:
        self.manager.undo()
        return self.page()

    def reset(self) -> dict[str, Any]:
        self.manager.reset_session_state()
        return self.page()

    def preset(self, words: list[str]) -> dict[str, Any]:
        """Begin from these presets."""
        state = State(tuple(words))
        state.get("mode")  # composes: a preset that does not exist is told here
        self.manager.maintain_session_state(state)
        return self.page()

    def load(self, yaml: str) -> dict[str, Any]:
        """Take a file's text in."""
        self.manager.maintain_session_state(from_yaml(yaml))
        return self.page()

    def validate(self) -> dict[str, Any]:
        return {"problems": self.manager.problems()}

    def diff(self, words: list[str]) -> dict[str, Any]:
        return {"lines": list(self.manager.differences(words))}

    def save(self, name: str) -> dict[str, Any]:
        """Write the file below the directory, where ``--config-dir`` finds it."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not a file name: letters, digits, '_', '-' and '.'")
        path = self.directory / "experiment" / f"{name}.yaml"
        write_text(path, self.manager.generate_config())
        where = f"--config-dir {self.directory} +experiment={name}"
        return {"path": str(path), "command": f"trinity-dask run {where}"}

    def run(self) -> dict[str, Any]:
        """Start the run, unless one of this page is at work."""
        if self.process is not None and self.process.poll() is None:
            raise ConfigError("a run of this page is at work: stop it, or wait")
        self.process = self.manager.run_config(self.directory)
        return self.status()

    def stop(self) -> dict[str, Any]:
        """Ask the run to save its state and end."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.status()

    def status(self) -> dict[str, Any]:
        """How the run does: state, the end of its output, the link to its page."""
        if self.process is None:
            return {"state": "none", "log": "", "link": None}
        code = self.process.poll()
        text = (self.directory / "run.log").read_text(encoding="utf-8", errors="replace")
        links = _LINK.findall(text)
        state = "running" if code is None else "done" if code == 0 else f"failed ({code})"
        return {"state": state, "log": text[-LOG_TAIL:], "link": links[0] if links else None}


def _painted(mode: str, section: str, field: Field) -> dict[str, Any]:
    return {**vars(field), "mode": mode, "section": section}


#: call -> whether it may compose a configuration, and so runs in the thread
CALLS = {
    "page": True,
    "set": False,
    "undo": True,
    "reset": True,
    "preset": True,
    "load": True,
    "validate": True,
    "diff": True,
    "save": True,
    "run": True,
    "stop": False,
    "status": False,
}


class _Base(RequestHandler):
    def initialize(self, server: Server) -> None:
        self.server = server

    def set_default_headers(self) -> None:
        self.set_header("Content-Security-Policy", POLICY)
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")

    def prepare(self) -> None:
        """Refuse whoever came by another name: a foreign page's rebound address."""
        if self.request.host not in self.server.hosts:
            self.refuse(403, "wrong host")

    def refuse(self, status: int, reason: str) -> None:
        self.set_status(status)
        self.finish({"error": reason})

    def data_received(self, chunk: bytes) -> None:
        """Bodies are not streamed."""


class _Page(_Base):
    def get(self, name: str) -> None:
        given = self.get_query_argument("token", "")
        if not name and not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self.refuse(403, "the token is missing: use the link that trinity-dask studio printed")
            return
        path = STATIC / (name or "index.html")
        self.set_header("Content-Type", f"{TYPES[path.suffix]}; charset=utf-8")
        self.finish(path.read_bytes())


class _Call(_Base):
    def prepare(self) -> None:
        super().prepare()
        if self._finished:
            return
        headers = self.request.headers
        origin, kind = headers.get("Origin"), headers.get("Content-Type", "").partition(";")[0]
        given = headers.get(TOKEN, "").encode()
        if origin is not None and origin.removeprefix("http://") not in self.server.hosts:
            self.refuse(403, "wrong origin")
        elif not hmac.compare_digest(given, self.server.token.encode()):
            self.refuse(403, "wrong token")
        elif kind.strip() != "application/json":
            self.refuse(415, "a call is JSON")

    async def post(self, name: str) -> None:
        try:
            arguments = json.loads(self.request.body or b"{}")
            call: Callable[..., dict[str, Any]] = getattr(self.server.studio, name)
            if CALLS[name]:
                answer = await self.server.in_thread(call, arguments)
            else:
                answer = call(**arguments)
        except ConfigError as error:
            self.set_status(422)
            answer = {"problems": str(error).splitlines()}
        except (TypeError, ValueError, AttributeError) as error:
            self.set_status(400)
            answer = {"error": f"{name}: {error}"}
        self.finish(json.dumps(answer, default=str))


class Server:
    """The page at ``link``; to be made on the event loop that serves it."""

    def __init__(self, words: tuple[str, ...], directory: Path, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self.studio = Studio(words, directory)
        (socket,) = bind_sockets(port, HOST)
        self.port = int(socket.getsockname()[1])
        self.hosts = {f"{HOST}:{self.port}", f"localhost:{self.port}"}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compose")
        static = "|".join(re.escape(path.name) for path in STATIC.iterdir())
        mine: Mapping[str, Any] = {"server": self}
        routes: list[Any] = [
            (rf"/({'|'.join(CALLS)})", _Call, mine),
            (rf"/(|{static})", _Page, mine),
        ]
        self._http = HTTPServer(Application(routes, compress_response=True), max_body_size=MAX_BODY)
        self._http.add_sockets([socket])
        self._thread.submit(self.studio.page)  # so that the first one is there at once

    @property
    def link(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self.token}"

    async def in_thread(
        self, call: Callable[..., dict[str, Any]], arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """One composing call after the other, off the loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: call(**arguments))

    def close(self) -> None:
        """Take no more calls; a run that was started goes on."""
        self._http.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)

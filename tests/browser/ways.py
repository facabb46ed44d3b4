"""Ways to a web page that are not direct: a TCP tunnel as SSH makes one, and a proxy with a prefix
like Jupyter's.

Invariant: both forward whatever comes, websockets too, and end with their ``with``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Optional

from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler
from tornado.websocket import WebSocketClientConnection, WebSocketHandler, websocket_connect

TIMEOUT_S = 30.0


@contextmanager
def on_a_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A running event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        _done(loop, _end_others())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(TIMEOUT_S)


async def _end_others() -> None:
    """What still runs on this loop is cancelled, and over."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _done(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, loop).result(TIMEOUT_S)


@contextmanager
def tunnel(port: int) -> Iterator[int]:
    """A port whose connections end at ``port``, byte for byte."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    with on_a_loop() as loop:
        server = _done(loop, asyncio.start_server(accept, "127.0.0.1", 0))
        yield server.sockets[0].getsockname()[1]
        loop.call_soon_threadsafe(server.close)


class _Pages(RequestHandler):
    def initialize(self, target: str) -> None:
        self.target = target

    async def get(self, path: str) -> None:
        query = f"?{self.request.query}" if self.request.query else ""
        request = HTTPRequest(
            f"http://{self.target}/{path}{query}",
            headers={"Host": self.target, "Accept": self.request.headers.get("Accept", "*/*")},
            follow_redirects=False,
            decompress_response=False,
        )
        answer = await AsyncHTTPClient().fetch(request, raise_error=False)
        self.set_status(answer.code, answer.reason)
        for name, value in answer.headers.get_all():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.set_header(name, value)
        if answer.body and answer.code != 304:
            self.write(answer.body)


class _Sockets(WebSocketHandler):
    """Speaks to the page's server as its own page does."""

    def initialize(self, target: str) -> None:
        self.target = target
        self.far: Optional[WebSocketClientConnection] = None

    def select_subprotocol(self, subprotocols: list[str]) -> Optional[str]:
        self.protocols = subprotocols
        return subprotocols[0] if subprotocols else None

    async def open(self, path: str) -> None:
        query = f"?{self.request.query}" if self.request.query else ""
        request = HTTPRequest(
            f"ws://{self.target}/{path}/ws{query}", headers={"Origin": f"http://{self.target}"}
        )
        self.far = await websocket_connect(
            request,
            subprotocols=self.protocols,
            on_message_callback=self.from_far,
            max_message_size=1 << 28,
        )

    def from_far(self, message: Optional[str | bytes]) -> None:
        if message is None:
            self.close()
        elif self.ws_connection is not None:
            self.write_message(message, binary=isinstance(message, bytes))

    async def on_message(self, message: str | bytes) -> None:
        assert self.far is not None
        await self.far.write_message(message, binary=isinstance(message, bytes))

    def on_close(self) -> None:
        if self.far is not None:
            self.far.close()


@contextmanager
def proxy(port: int, prefix: str) -> Iterator[int]:
    """A port at which ``/<prefix>/x`` is ``/x`` of ``port``."""

    async def serve() -> tuple[HTTPServer, int]:
        target = {"target": f"127.0.0.1:{port}"}
        routes = [(rf"/{prefix}/(.*)/ws", _Sockets, target), (rf"/{prefix}/(.*)", _Pages, target)]
        sockets = bind_sockets(0, "127.0.0.1")
        server = HTTPServer(Application(routes))
        server.add_sockets(sockets)
        return server, sockets[0].getsockname()[1]

    with on_a_loop() as loop:
        server, own = _done(loop, serve())
        yield own
        loop.call_soon_threadsafe(server.stop)

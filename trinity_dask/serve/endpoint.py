"""The models of a process's runs at one URL, each under a key of its own.

Invariant: a session's key is known to whom it was given and here only as its hash; a reply is a
turn of its run's dialogue before it leaves; a request that a client sends again, because it
lost the reply, gets the same turn; nothing is sampled for a session that has ended. The server
listens on the loopback interface, on the event loop of its process, and ends with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from trinity_dask.models.wrapper import ModelWrapper, PromptTooLong
from trinity_dask.serve.openai_api import (
    MAX_BODY_BYTES,
    ApiError,
    ChatRequest,
    chat_reply,
    chunks,
    reply_message,
)

log = logging.getLogger("trinity_dask.serve")

MAX_SESSIONS = 4096
START_S = 30.0
INSTALL = "agents need the extra 'serve': pip install 'trinity-dask[serve]'"


class Session:
    """One run's model. ``overflowed`` is true when a prompt had no room in the model."""

    def __init__(self, model: ModelWrapper, url: str, key: str) -> None:
        self.model = model
        self.url, self.key = url, key
        self.overflowed = False
        self.requests = 0
        self._replies: dict[str, asyncio.Future[dict[str, Any]]] = {}  # by hash of the body

    async def chat(self, raw: bytes, is_retry: bool) -> tuple[ChatRequest, dict[str, Any]]:
        """Request and reply. Raises ApiError."""
        try:
            request = ChatRequest.of(json.loads(raw))
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is no JSON ({error})") from error
        name = hashlib.sha256(raw).hexdigest()
        known = self._replies.get(name) if is_retry else None
        if known is None or (known.done() and (known.cancelled() or known.exception())):
            known = self._replies[name] = asyncio.ensure_future(self._answer(request))
        try:
            # a client that goes away takes no other client's reply with it
            return request, await asyncio.shield(known)
        except asyncio.CancelledError:
            if known.cancelled():
                raise ApiError("the run is over, and its session with it", 503) from None
            raise

    def end(self) -> None:
        """Nobody waits for a reply any more: what is asked of the engine is given up."""
        for reply in self._replies.values():
            reply.cancel()

    async def _answer(self, request: ChatRequest) -> dict[str, Any]:
        model, tokenizer = self.model, self.model.tokenizer
        self.requests += 1
        limits = {} if request.max_tokens is None else {"max_tokens": request.max_tokens}

        def read(text: str, prompt_text: str) -> dict[str, Any]:
            return reply_message(tokenizer, text, prompt_text, request.tools)

        try:
            turns = await model.turns_async(
                request.messages, request.tools, stop=request.stop, read=read, n=request.n, **limits
            )
        except PromptTooLong as error:
            self.overflowed = True
            raise ApiError(str(error), code="context_length_exceeded", param="messages") from error
        except (ValueError, TypeError) as error:  # a template or an engine that refuses
            raise ApiError(str(error)) from error
        except TimeoutError as error:
            raise ApiError(str(error), 503) from error
        return chat_reply(turns, request, tokenizer)


class Endpoint:
    """The server of this process; :meth:`open` gives a model a session."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}  # by hash of the key
        self._server: Any = None
        self._url = ""
        self._client: Any = None
        self._starting = asyncio.Lock()

    async def open(self, model: ModelWrapper) -> Session:
        """A session for ``model``; close it when the run is over.

        Raises:
            RuntimeError: the extra ``serve`` is missing, or there are too many sessions.
        """
        async with self._starting:
            if self._server is None:
                await self._start()
        if len(self._sessions) >= MAX_SESSIONS:
            raise RuntimeError(f"more than {MAX_SESSIONS} sessions are open in this process")
        key = f"td-{secrets.token_urlsafe(24)}"
        session = Session(model, f"{self._url}/v1", key)
        self._sessions[_hash(key)] = session
        return session

    def client(self, session: Session) -> Any:
        """An ``openai.AsyncOpenAI`` of ``session``, for this event loop."""
        if self._client is None:  # one for all: it costs 40 ms to make
            try:
                from openai import AsyncOpenAI
            except ImportError as error:
                raise RuntimeError(INSTALL) from error
            self._client = AsyncOpenAI(base_url=self._url, api_key="none", max_retries=2)
        return self._client.with_options(base_url=session.url, api_key=session.key)

    def close(self, session: Session) -> None:
        self._sessions.pop(_hash(session.key), None)
        session.end()

    async def _start(self) -> None:
        try:
            import uvicorn
        except ImportError as error:
            raise RuntimeError(INSTALL) from error

        class Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # they belong to the worker

        sock = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            make_app(self),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=60,
        )
        server = Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        async with asyncio.timeout(START_S):
            while not server.started and not serving.done():
                await asyncio.sleep(0.005)
        if serving.done():
            await serving
        self._server, self._serving = server, serving
        self._url = f"http://127.0.0.1:{sock.getsockname()[1]}"

    async def stop(self) -> None:
        """End the server; sessions that are open end with it."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        server, self._server = self._server, None
        if server is not None:
            server.should_exit = server.force_exit = True
            await self._serving

    def session(self, key: str) -> Session:
        """Raises ApiError 401."""
        found = self._sessions.get(_hash(key))
        if found is None:
            raise ApiError("unknown key; a session's key ends with its run", 401, "invalid_api_key")
        return found


def make_app(endpoint: Endpoint) -> Any:
    """The ASGI application."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def guarded(request: Request, action: Any) -> Response:
        try:
            header = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            session = endpoint.session(header or request.headers.get("x-api-key", ""))
            return await action(session)
        except ApiError as error:
            return JSONResponse(error.body, error.status)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # an engine that died, a fault of ours: never a broken socket
            log.exception("a request failed")
            failed = ApiError(f"{type(error).__name__}: {error}", 500)
            return JSONResponse(failed.body, failed.status)

    async def chat(request: Request) -> Response:
        async def action(session: Session) -> Response:
            raw = await _body(request)
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            asked, reply = await session.chat(raw, is_retry)
            if asked.stream:
                events = _events(reply, asked.stream_usage)
                return StreamingResponse(events, media_type="text/event-stream")
            return JSONResponse(reply)

        return await guarded(request, action)

    async def models(request: Request) -> Response:
        async def action(session: Session) -> Response:
            entry = {"id": "policy", "object": "model", "created": 0, "owned_by": "trinity-dask"}
            return JSONResponse({"object": "list", "data": [entry]})

        return await guarded(request, action)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


async def _body(request: Any) -> bytes:
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > MAX_BODY_BYTES:
            raise ApiError(f"the body is longer than {MAX_BODY_BYTES} bytes", 413)
    return bytes(found)


async def _events(reply: dict[str, Any], usage: bool) -> AsyncIterator[str]:
    for chunk in chunks(reply, usage):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


_endpoints: dict[asyncio.AbstractEventLoop, Endpoint] = {}


def endpoint() -> Endpoint:
    """The one of the running event loop."""
    loop = asyncio.get_running_loop()
    for old in [known for known in _endpoints if known.is_closed()]:
        del _endpoints[old]
    return _endpoints.setdefault(loop, Endpoint())

"""Actors as Trinity-RFT's code calls them: ``await actor.method.remote(...)``.

Invariant: a call ends with the method's result, its error, or the loss of the actor's worker;
it has no deadline of its own, as Ray's have none. The handle keeps the actor alive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Optional

from distributed import Client

from trinity_dask.cluster.actors import create_actor
from trinity_dask.cluster.context import current_worker
from trinity_dask.cluster.rpc import ActorHandle, rpc
from trinity_dask.cluster.slots import CONTROL

CREATE_TIMEOUT_S = 60.0
NO_DEADLINE_S = 30 * 86_400.0


class Ref:
    """A call that is under way: ``await`` it, or wait for its ``result()`` in a thread."""

    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future = future
        self.result = future.result

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()


class RemoteMethod:
    """What ``actor.method`` is; only :meth:`remote` can be called."""

    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]], loop: Any) -> None:
        self._call, self._loop = call, loop

    def remote(self, *args: Any, **kwargs: Any) -> Ref:
        return Ref(asyncio.run_coroutine_threadsafe(self._call(*args, **kwargs), self._loop))


class RemoteActor:
    """A handle to the actor that ``find`` finds or makes, once, when it is first called."""

    def __init__(self, find: Callable[[Optional[Client]], Awaitable[tuple[ActorHandle, Any]]]):
        self._find, self._client = find, outside_client()
        side: Any = self._client or current_worker()
        self._loop = side.loop.asyncio_loop
        self._found: Optional[asyncio.Task[tuple[ActorHandle, Any]]] = None
        self.__ray_ready__ = RemoteMethod(self._ready, self._loop)

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            handle, limit = await self._ready(), NO_DEADLINE_S
            given = [await a._ready() if isinstance(a, RemoteActor) else a for a in args]
            return await rpc(
                handle, name, *given, timeout=limit, client=self._client, keywords=kwargs
            )

        return RemoteMethod(call, self._loop)

    async def _ready(self) -> ActorHandle:
        if self._found is None:
            self._found = asyncio.ensure_future(self._find(self._client))
        return (await asyncio.shield(self._found))[0]


def control_actor(cls: type, config: Any) -> RemoteActor:
    """``cls(config)`` as an actor of its own on the control worker."""

    async def create(client: Optional[Client]) -> tuple[ActorHandle, Any]:
        key = f"{cls.__name__.lower()}-{uuid.uuid4().hex}"
        ref = await create_actor(
            cls, config, slot=CONTROL, key=key, timeout=CREATE_TIMEOUT_S, client=client
        )
        return ref.handle, ref

    return RemoteActor(create)


def outside_client() -> Optional[Client]:
    """The current client of this process; None inside a worker, which has its own.

    Raises:
        ValueError: there is none; make one, or use ``with client.as_current():``.
    """
    return None if current_worker() is not None else Client.current()

"""Calls to actors that always come back: with a result, an error, or a deadline.

Invariant: :func:`rpc` ends within its ``timeout``; if the actor's worker dies it raises
:class:`ActorLost` within about a second. Dask's own actor proxy does not promise that: used
from inside a worker it waits for ever for a future that nobody resolves.

A call to an actor of the same worker process is an ordinary method call on the instance:
nothing is serialised and arguments are not copied.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed import Client
from distributed.comm.addressing import get_address_host_port
from distributed.core import ConnectionPool, send_recv
from distributed.protocol import to_serialize

from trinity_dask.cluster.context import current_worker

# how long a connection attempt may take before the port is looked at: Dask itself retries a
# refused connection until its own connect deadline
PROBE_INTERVAL_S = 0.3
PROBE_TIMEOUT_S = 2.0
# what the caller's thread waits beyond the deadline of the call itself
SYNC_GRACE_S = 10.0


@dataclass(frozen=True)
class ActorHandle:
    """Where an actor lives: its Dask key, its worker's address, its slot. Pickles freely."""

    key: str
    address: str
    slot: str


class ActorLost(RuntimeError):
    """The worker that held the actor is gone, or holds it no more.

    Attributes: ``handle``, ``method`` and ``cause`` (the error seen, or ``None``).
    """

    def __init__(self, handle: ActorHandle, method: str, cause: BaseException | None = None):
        self.handle, self.method, self.cause = handle, method, cause
        why = f": {type(cause).__name__}: {cause}" if cause is not None else ""
        super().__init__(
            f"actor {handle.key!r} in slot {handle.slot!r} at {handle.address} was lost "
            f"during {method!r}{why}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # the cause may hold sockets; its text is enough on the other side
        cause = None if self.cause is None else RuntimeError(str(self.cause))
        return type(self), (self.handle, self.method, cause)


def local_actor(key: str) -> Any | None:
    """The actor instance with this key in this worker process, or ``None``."""
    worker = current_worker()
    return None if worker is None else worker.state.actors.get(key)


async def rpc(
    handle: ActorHandle,
    method: str,
    *args: Any,
    timeout: float,
    client: Client | None = None,
    keywords: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Call ``method`` of an actor and return its result.

    Args:
        timeout: seconds until ``TimeoutError``. A local call is cancelled then; a remote
            one goes on in its worker, so long waits also need a deadline of their own.
        client: the client to call through where there is no worker (a driver). ``None``
            means: the worker of this process.
        keywords: more arguments of the method, whose names may be those above: a method
            may have a ``timeout`` of its own.

    Raises:
        ActorLost: the worker died, or was born again without the actor.
        TimeoutError: the deadline passed; names slot, method and seconds.
        Exception: whatever the method raised.
    """
    kwargs |= keywords or {}
    worker = None if client is not None else current_worker()
    if worker is None and client is None:
        raise RuntimeError(
            f"cannot call {method!r} of {handle.slot!r}: no Dask worker in this process and "
            "no client given; pass client=..."
        )
    actor = None if worker is None else worker.state.actors.get(handle.key)
    deadline = asyncio.timeout(timeout)
    try:
        async with deadline:
            if actor is not None:
                result = getattr(actor, method)(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result
            message = {
                "op": "actor_execute",
                "actor": handle.key,
                "function": method,
                "args": [to_serialize(arg) for arg in args],
                "kwargs": {name: to_serialize(value) for name, value in kwargs.items()},
            }
            pool = worker.rpc if worker is not None else client.rpc  # type: ignore[union-attr]
            reply = await exchange(pool, handle, method, timeout, message)
    except TimeoutError as error:
        if not deadline.expired():
            raise  # the method's own
        raise TimeoutError(
            f"{method!r} of the actor in slot {handle.slot!r} ({handle.key!r} at "
            f"{handle.address}) did not answer within {timeout:g} s"
        ) from error
    if reply["status"] == "OK":
        return reply["result"]
    raise reply["exception"]


async def exchange(
    pool: ConnectionPool, handle: ActorHandle, method: str, timeout: float, message: dict[str, Any]
) -> Any:
    """Send ``message`` to the worker of ``handle`` and return its reply.

    ``timeout`` bounds the connecting only. ``method`` is what the call is named in errors.

    Raises:
        ActorLost: the worker is gone, or went before it replied.
    """
    try:
        comm = await _connect(pool, handle.address, timeout)
    except OSError as error:
        raise ActorLost(handle, method, error) from error
    try:
        return await send_recv(comm, **message)
    except (OSError, KeyError) as error:
        # the connection broke; or (KeyError) the worker holds no such actor any more. Errors
        # of the method itself come in the reply.
        raise ActorLost(handle, method, error) from error
    finally:
        pool.reuse(handle.address, comm)


async def _connect(pool: ConnectionPool, address: str, timeout: float) -> Any:
    """A connection to ``address`` from the pool.

    Raises:
        OSError: nobody listens there (at once), or no handshake within ``timeout``.
    """
    attempt = asyncio.ensure_future(pool.connect(address, timeout=timeout))
    try:
        while not attempt.done():
            await asyncio.wait({attempt}, timeout=PROBE_INTERVAL_S)
            if not attempt.done() and await refused(address):
                raise ConnectionRefusedError(f"nobody listens at {address}")
    except BaseException:
        attempt.cancel()
        attempt.add_done_callback(partial(_give_back, pool, address))
        raise
    return attempt.result()


def _give_back(pool: ConnectionPool, address: str, attempt: asyncio.Future[Any]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        pool.reuse(address, attempt.result())


async def refused(address: str) -> bool:
    """Whether the machine answers that nobody listens at ``tcp://host:port``."""
    if not address.startswith(("tcp://", "tls://")):
        return False
    host, port = get_address_host_port(address)
    try:
        connection = asyncio.open_connection(host, port)
        _, writer = await asyncio.wait_for(connection, PROBE_TIMEOUT_S)
    except ConnectionRefusedError:
        return True
    except OSError:  # includes the timeout: unreachable is not yet dead
        return False
    writer.close()
    return False


def call(
    client: Client | None,
    handle: ActorHandle,
    method: str,
    *args: Any,
    timeout: float,
    **kwargs: Any,
) -> Any:
    """:func:`rpc` for code that is not on an event loop.

    In a driver pass its (synchronous) client; in a thread of a worker pass ``None``.
    Errors are those of :func:`rpc`.
    """
    job = partial(rpc, handle, method, *args, timeout=timeout, client=client, **kwargs)
    if client is not None:
        return client.sync(job, asynchronous=False, callback_timeout=timeout + SYNC_GRACE_S)
    worker = current_worker()
    if worker is None:
        raise RuntimeError(
            f"cannot call {method!r} of {handle.slot!r}: no Dask worker in this process; "
            "pass the client"
        )
    loop = worker.loop.asyncio_loop  # type: ignore[attr-defined]
    return asyncio.run_coroutine_threadsafe(job(), loop).result(timeout + SYNC_GRACE_S)

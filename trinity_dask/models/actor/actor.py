"""The Dask actor that owns one engine, and how tasks on its worker find it.

Invariant: a worker process has at most one live :class:`EngineActor` per worker; its engine
is closed before the worker's process ends; and no rollout samples from it between its
(re-)creation and :meth:`EngineActor.open`, which says that it holds the current weights. A caller
gets one whole answer, whatever happened to its request meanwhile; requests that an update held
back go on when it is over, also when it failed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from distributed import Worker, WorkerPlugin

from trinity_dask.aio import Changes
from trinity_dask.cluster.context import current_worker
from trinity_dask.config.fields import choices_of
from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.models import ENGINES
from trinity_dask.models.actor.patience import Patience
from trinity_dask.models.actor.remote import serve_engine
from trinity_dask.models.protocol import (
    Completion,
    EngineDead,
    EngineSpec,
    InferenceEngine,
    SamplingParams,
    WeightGroupSpec,
    WeightReceipt,
    WeightUpdate,
)
from trinity_dask.registry import load_plugins

CLOSE_TIMEOUT_S = 15.0
EXIT_ENGINE_DEAD = 70

log = logging.getLogger("trinity_dask.engines")

T = TypeVar("T")

_actors: dict[str, EngineActor] = {}  # by worker address; "" outside of a worker
_actors_lock = threading.Lock()
_awaited: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []  # told of the next engine


def build_engine(spec: EngineSpec) -> InferenceEngine:
    """The engine that ``spec.engine_type`` names, not yet prepared. Imports its library.

    Raises:
        LoadError: neither a registered name nor a path that leads to an engine.
        ImportError: the engine's library is not installed; the message says what to do.
    """
    load_plugins(spec.plugin_dirs)
    return ENGINES.get(spec.engine_type)(spec)


async def ready_engine(timeout_s: float, run: str = "") -> EngineActor:
    """This worker's engine, once it is there and lets rollouts in; where ``run`` names a launch of
    a run, the engine of that launch.

    Raises:
        TimeoutError: not within ``timeout_s``.
    """
    address = _worker_address()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                waiter = (asyncio.get_running_loop(), asyncio.Event())
                with _actors_lock:
                    engine = _actors.get(address)
                    if engine is not None and not engine.serves(run):
                        engine = None
                    if engine is None:
                        _awaited.append(waiter)
                if engine is not None:
                    await engine._gate().wait()
                    return engine
                try:
                    await waiter[1].wait()
                finally:
                    with _actors_lock, contextlib.suppress(ValueError):  # told already
                        _awaited.remove(waiter)
    except TimeoutError:
        whose = f" of run {run}" if run else ""
        raise TimeoutError(
            f"the engine{whose} at worker {address} did not serve within {timeout_s:g} s"
        ) from None


def _worker_address() -> str:
    worker = current_worker()
    return "" if worker is None else worker.address


@contextlib.contextmanager
def _ending_worker() -> Iterator[None]:
    """Within it an engine's death ends this Dask worker's process, so that it is healed like a
    worker's.

    Nanny and supervisor then rebuild worker, actor and engine; the tasks run elsewhere or
    again. Outside of a worker that a nanny watches, the error alone has to do.
    """
    try:
        yield
    except EngineDead as error:
        worker = current_worker()
        if worker is not None and worker.nanny is not None:
            log.critical("%s; ending worker %s so that it is rebuilt", error, worker.address)
            logging.shutdown()
            os._exit(EXIT_ENGINE_DEAD)
        raise


KEEP, WAIT, ABORT = choices_of(SynchronizerConfig, "in_flight")
SETTLE_S = 10.0  # how long an engine may take to let go of what was cancelled


@dataclass(eq=False)
class _Request:
    """A request and the task that awaits it."""

    task: asyncio.Task[Any]
    cancelling: int  # cancellations of the task that are not ours
    aborted: bool = False


class RequestGate:
    """What becomes of an engine's running requests when its weights change; on one event loop.

    Policies: ``keep`` changes the weights under the running requests, which the engine itself
    sees to; ``wait`` lets the running ones end first, at most ``timeout_s``; ``abort`` cancels
    them, and they are sampled again from their prompt. Under the last two, new requests are
    held back meanwhile. ``aborted`` counts the requests that were sampled again.
    """

    def __init__(self, policy: str, timeout_s: float) -> None:
        self.policy = policy
        self.timeout_s = timeout_s
        self.aborted = 0
        self._running: set[_Request] = set()
        self._updates = 0
        self._changes = Changes()

    async def sample(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer of ``ask()``, which is called again after an update that aborted it."""
        while True:
            if self._updates:
                await self._changes.until(lambda: not self._updates)
            task = asyncio.current_task()
            assert task is not None
            request = _Request(task, task.cancelling())
            self._running.add(request)
            try:
                return await ask()
            except asyncio.CancelledError:
                # ours alone, or somebody else's too?
                if not request.aborted or task.uncancel() > request.cancelling:
                    raise
                self.aborted += 1
            finally:
                self._running.discard(request)
                self._changes.notify()

    @asynccontextmanager
    async def update(self) -> AsyncIterator[Callable[[], int]]:
        """Around a change of weights; the yielded call gives the requests aborted for it."""
        before = self.aborted
        if self.policy == KEEP:
            yield lambda: 0
            return
        self._updates += 1
        try:
            await self._clear()
            yield lambda: self.aborted - before
        finally:
            self._updates -= 1
            self._changes.notify()

    async def _clear(self) -> None:
        """Until nothing runs, by waiting or by force."""
        if self.policy == WAIT:
            if await self._changes.until(lambda: not self._running, self.timeout_s):
                return
            log.warning(
                "%d request(s) did not end within synchronizer.in_flight_timeout_s = %g s; "
                "they are sampled again with the new weights",
                len(self._running),
                self.timeout_s,
            )
        for request in self._running:
            request.aborted = True
            request.task.cancel()
        if not await self._changes.until(lambda: not self._running, SETTLE_S):
            log.warning("%d aborted request(s) do not end", len(self._running))


class EngineCloser(WorkerPlugin):
    """Awaits the actor's ``close`` in its worker's teardown, for a bounded time."""

    def __init__(self, actor: EngineActor) -> None:
        self.actor = actor

    async def teardown(self, worker: Worker) -> None:
        try:
            await asyncio.wait_for(self.actor.close(), CLOSE_TIMEOUT_S)
        except Exception as error:
            log.warning("engine %s did not close: %r", self.actor.spec.slot, error)


class EngineActor:
    """One engine behind the :class:`~trinity_dask.models.protocol.InferenceEngine` methods.

    The constructor is cheap; :meth:`prepare` loads the model. ``generate`` waits until
    :meth:`open`. The rest may be called as soon as ``prepare`` has returned.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.address = _worker_address()
        self._engine: InferenceEngine | None = None
        self._opened: asyncio.Event | None = None  # made on the loop that will use it
        self._facts: dict[str, Any] = {}
        self._loading, self._closed = asyncio.Lock(), False
        self._request_timeout_s = float(spec.config.get("request_timeout_s", 300.0))
        self._patience = Patience(self._request_timeout_s, self._sampled)
        self._requests = RequestGate(spec.in_flight, spec.in_flight_timeout_s)
        with _actors_lock:
            before = _actors.get(self.address)
            # outside of a worker engines of other slots stand beside each other
            succeeds = before is not None and (self.address or before.spec.slot == spec.slot)
            self._predecessor = before if succeeds else None
            _actors[self.address] = self
            awaited = _awaited[:]
            _awaited.clear()
        for loop, event in awaited:
            loop.call_soon_threadsafe(event.set)

    # life -------------------------------------------------------------------------------
    async def prepare(self) -> dict[str, Any]:
        """Build the engine, load the model, and have it closed with the worker.

        The engine that this worker had before is over by then: a device has room for one.
        """
        async with self._loading:
            if (before := self._predecessor) is not None:
                await before.close()
                async with before._loading:  # it closes what it was loading
                    self._predecessor = None
            engine = await asyncio.to_thread(build_engine, self.spec)
            facts = await engine.prepare()
            if self._closed:
                await engine.close()
                raise RuntimeError(f"{self.spec.slot} was closed while it was loading")
            self._engine = engine
        worker = current_worker()
        if worker is not None:
            await worker.plugin_add(EngineCloser(self), name=f"close-{self.spec.slot}")
            serve_engine(worker, self)  # for workflows on runner workers
        atexit.register(self._close_at_exit)
        self._facts = {"slot": self.spec.slot, "engine": self.spec.engine_type, **facts}
        return self._facts

    def serves(self, run: str) -> bool:
        """Whether a caller of launch ``run`` may have answers; one that names none always may."""
        return not run or not self.spec.run or run == self.spec.run

    async def open(self) -> None:
        """Let rollouts in: the engine holds the weights it is supposed to hold."""
        self._gate().set()

    async def describe(self) -> dict[str, Any]:
        """Where the engine runs and what it holds."""
        return {
            **self._facts,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "address": self.address,
            "model_version": self._engine.model_version if self._engine else None,
            "open": self._gate().is_set(),
        }

    async def close(self) -> None:
        """Close the engine; a second call does nothing."""
        with _actors_lock:
            if _actors.get(self.address) is self:
                del _actors[self.address]
        self._closed = True
        engine, self._engine = self._engine, None
        atexit.unregister(self._close_at_exit)
        if engine is not None:
            await engine.close()

    def _close_at_exit(self) -> None:
        """A worker that never reached its plugin's teardown still ends its children."""
        with contextlib.suppress(Exception):  # the interpreter is going down; nobody can act
            asyncio.run(asyncio.wait_for(self.close(), CLOSE_TIMEOUT_S))

    # the engine -------------------------------------------------------------------------
    @property
    def model_version(self) -> int:
        return self._ready.model_version

    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingParams, request_id: str
    ) -> list[Completion]:
        if not self._gate().is_set():
            limit_s = float(self.spec.config.get("prepare_timeout_s", 600.0))
            try:
                async with asyncio.timeout(limit_s):
                    await self._gate().wait()
            except TimeoutError:
                raise TimeoutError(
                    f"engine {self.spec.slot} was not opened within {limit_s:g} s; it waits for "
                    "the current weights (EngineActor.open)"
                ) from None

        async def ask() -> list[Completion]:
            try:
                with _ending_worker():
                    async with self._patience.limit(request_id):
                        return await self._ready.generate(prompt_token_ids, sampling, request_id)
            except TimeoutError:
                raise TimeoutError(
                    f"engine {self.spec.slot} did not go on with request {request_id} within "
                    f"explorer.rollout_model.request_timeout_s = {self._request_timeout_s:g} s"
                ) from None

        return await self._requests.sample(ask)

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        async def ask() -> np.ndarray:
            with _ending_worker():
                return await self._ready.logprobs(token_ids, temperature)

        return await self._requests.sample(ask)

    async def logprobs_of(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """:meth:`logprobs` of each, by one call."""
        return list(await asyncio.gather(*(self.logprobs(ids) for ids in sequences)))

    async def init_weight_group(self, spec: WeightGroupSpec) -> None:
        await self._ready.init_weight_group(spec)

    async def teardown_weight_group(self) -> None:
        await self._ready.teardown_weight_group()

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Load a version; ``spec.in_flight`` says what becomes of the running requests."""
        with _ending_worker(), self._patience.held():
            async with self._requests.update() as aborted:
                receipt = await self._ready.update_weights(update)
                return replace(receipt, aborted=aborted())

    async def label_weights(self, version: int) -> None:
        await self._ready.label_weights(version)

    async def stats(self) -> dict[str, float]:
        return {**await self._ready.stats(), "aborted": float(self._requests.aborted)}

    def _sampled(self, request_id: str) -> int:
        said = getattr(self._engine, "sampled_tokens", None)  # an engine need not say
        return 0 if said is None else int(said(request_id))

    @property
    def _ready(self) -> InferenceEngine:
        if self._engine is None:
            raise RuntimeError(f"engine {self.spec.slot} is not prepared, or is closed already")
        return self._engine

    def _gate(self) -> asyncio.Event:
        if self._opened is None:
            self._opened = asyncio.Event()
        return self._opened

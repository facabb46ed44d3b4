"""The Dask actor that owns one engine, and how tasks on its worker find it.

Invariant: a worker process has at most one live :class:`EngineActor` per worker; its engine
is closed before the worker's process ends; and no rollout samples from it between its
(re-)creation and :meth:`EngineActor.open`, which says that it holds the current weights.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import socket
import threading
from dataclasses import replace
from typing import Any

import numpy as np

from trinity_dask.cluster.context import current_worker
from trinity_dask.models.actor.in_flight import InFlight
from trinity_dask.models.errors import EngineDead
from trinity_dask.models.protocol import (
    Completion,
    EngineSpec,
    InferenceEngine,
    SamplingParams,
    WeightGroupSpec,
    WeightReceipt,
    WeightUpdate,
)

ENGINE_TYPES = ("vllm", "torch", "fake")
CLOSE_TIMEOUT_S = 15.0
EXIT_ENGINE_DEAD = 70

log = logging.getLogger("trinity_dask.engines")

_actors: dict[str, EngineActor] = {}  # by worker address; "" outside of a worker
_actors_lock = threading.Lock()
_awaited: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []  # told of the next engine


def build_engine(spec: EngineSpec) -> InferenceEngine:
    """The engine that ``spec.engine_type`` names, not yet prepared. Imports its library.

    Raises:
        ValueError: unknown engine type.
        ImportError: the engine's library is not installed; the message says what to do.
    """
    if spec.engine_type == "vllm":
        from trinity_dask.models.vllm.engine import VLLMEngine

        return VLLMEngine(spec)
    if spec.engine_type == "torch":
        from trinity_dask.models.torch.engine import TorchEngine

        return TorchEngine(spec)
    if spec.engine_type == "fake":
        from trinity_dask.models.fake_engine import FakeEngine

        return FakeEngine(spec)
    raise ValueError(
        f"engine_type {spec.engine_type!r} is unknown; use one of {', '.join(ENGINE_TYPES)}"
    )


def local_engine() -> EngineActor:
    """The engine actor of the worker that runs the calling code.

    Raises:
        RuntimeError: this worker has none (yet, or any more).
    """
    address = _worker_address()
    actor = _actors.get(address)
    if actor is None:
        raise RuntimeError(
            f"worker {address or 'of this process'} has no engine; rollout tasks must carry "
            "the resource 'rollout', and its engine actor must exist before they are submitted"
        )
    return actor


async def ready_engine(timeout_s: float) -> EngineActor:
    """This worker's engine, once it is there and lets rollouts in.

    Raises:
        TimeoutError: not within ``timeout_s``.
    """
    address = _worker_address()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                arrival = asyncio.Event()
                with _actors_lock:
                    engine = _actors.get(address)
                    if engine is None:
                        _awaited.append((asyncio.get_running_loop(), arrival))
                if engine is not None:
                    await engine._gate().wait()
                    return engine
                await arrival.wait()
    except TimeoutError:
        raise TimeoutError(
            f"the engine of worker {address} did not serve within {timeout_s:g} s"
        ) from None


def _worker_address() -> str:
    worker = current_worker()
    return "" if worker is None else worker.address


def _end_worker(error: EngineDead) -> None:
    """End this Dask worker's process, so that an engine death is healed like a worker death.

    Nanny and supervisor then rebuild worker, actor and engine; the tasks run elsewhere or
    again. Outside of a worker that a nanny watches, the error alone has to do.
    """
    worker = current_worker()
    if worker is None or worker.nanny is None:
        return
    log.critical("%s; ending worker %s so that it is rebuilt", error, worker.address)
    logging.shutdown()
    os._exit(EXIT_ENGINE_DEAD)


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
        self._request_timeout_s = float(spec.config.get("request_timeout_s", 300.0))
        self._in_flight = InFlight(spec.in_flight, spec.in_flight_timeout_s)
        with _actors_lock:
            _actors[self.address] = self
            awaited = _awaited[:]
            _awaited.clear()
        for loop, event in awaited:
            loop.call_soon_threadsafe(event.set)

    # life -------------------------------------------------------------------------------
    async def prepare(self) -> dict[str, Any]:
        """Build the engine, load the model, and have it closed with the worker."""
        engine = await asyncio.to_thread(build_engine, self.spec)
        facts = await engine.prepare()
        self._engine = engine
        await self._close_with_worker()
        self._facts = {"slot": self.spec.slot, "engine": self.spec.engine_type, **facts}
        return self._facts

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
        engine, self._engine = self._engine, None
        atexit.unregister(self._close_at_exit)
        if engine is not None:
            await engine.close()

    async def _close_with_worker(self) -> None:
        worker = current_worker()
        if worker is not None:
            from trinity_dask.models.actor.engine_closer import EngineCloser
            from trinity_dask.models.actor.remote import serve_engine

            await worker.plugin_add(EngineCloser(self), name=f"close-{self.spec.slot}")
            serve_engine(worker, self)  # for workflows on runner workers
        atexit.register(self._close_at_exit)

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
        gate = self._gate()
        if not gate.is_set():
            await self._wait_open(gate)
        return await self._in_flight.sample(
            lambda: self._generate(prompt_token_ids, sampling, request_id)
        )

    async def _generate(
        self, prompt_token_ids: list[int], sampling: SamplingParams, request_id: str
    ) -> list[Completion]:
        try:
            async with asyncio.timeout(self._request_timeout_s):
                return await self._ready.generate(prompt_token_ids, sampling, request_id)
        except EngineDead as error:
            _end_worker(error)
            raise
        except TimeoutError:
            raise TimeoutError(
                f"engine {self.spec.slot} did not answer request {request_id} within "
                f"explorer.rollout_model.request_timeout_s = {self._request_timeout_s:g} s"
            ) from None

    async def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        return await self._in_flight.sample(lambda: self._logprobs(token_ids, temperature))

    async def logprobs_of(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """:meth:`logprobs` of each, by one call."""
        return list(await asyncio.gather(*(self.logprobs(ids) for ids in sequences)))

    async def _logprobs(self, token_ids: list[int], temperature: float) -> np.ndarray:
        try:
            return await self._ready.logprobs(token_ids, temperature)
        except EngineDead as error:
            _end_worker(error)
            raise

    async def init_weight_group(self, spec: WeightGroupSpec) -> None:
        await self._ready.init_weight_group(spec)

    async def teardown_weight_group(self) -> None:
        await self._ready.teardown_weight_group()

    async def update_weights(self, update: WeightUpdate) -> WeightReceipt:
        """Load a version; ``spec.in_flight`` says what becomes of the running requests."""
        try:
            async with self._in_flight.update() as aborted:
                receipt = await self._ready.update_weights(update)
                return replace(receipt, aborted=aborted())
        except EngineDead as error:
            _end_worker(error)
            raise

    async def label_weights(self, version: int) -> None:
        await self._ready.label_weights(version)

    async def stats(self) -> dict[str, float]:
        return {**await self._ready.stats(), "aborted": float(self._in_flight.aborted)}

    @property
    def _ready(self) -> InferenceEngine:
        if self._engine is None:
            raise RuntimeError(f"engine {self.spec.slot} is not prepared, or is closed already")
        return self._engine

    def _gate(self) -> asyncio.Event:
        if self._opened is None:
            self._opened = asyncio.Event()
        return self._opened

    async def _wait_open(self, gate: asyncio.Event) -> None:
        timeout_s = float(self.spec.config.get("prepare_timeout_s", 600.0))
        try:
            async with asyncio.timeout(timeout_s):
                await gate.wait()
        except TimeoutError:
            raise TimeoutError(
                f"engine {self.spec.slot} was not opened within {timeout_s:g} s; it waits for "
                "the current weights (EngineActor.open)"
            ) from None

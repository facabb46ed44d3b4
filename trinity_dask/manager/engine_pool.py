"""The engines of a stage: created on their slots, prepared, watched, re-created.

Invariant: an engine counts as ready only after it was prepared *and* holds the weights the
others hold; an engine lost with its worker is re-created at the same slot label, a bounded
number of times, and anything beyond ends the run with the slot's name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from trinity_dask.cluster.actors import (
    ActorRef,
    create_actor,
    on_lost,
    recreate_actor,
    release_actor,
)
from trinity_dask.cluster.rpc import ActorHandle, ActorLost, rpc
from trinity_dask.manager.weight_group import Member
from trinity_dask.models.engine_actor import EngineActor
from trinity_dask.models.protocol import EngineSpec

log = logging.getLogger("trinity_dask.engines")

CREATE_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 20.0
LOOK_TIMEOUT_S = 30.0


class EngineFailed(RuntimeError):
    """An engine could not be started, or died more often than allowed."""


@dataclass
class _Engine:
    spec: EngineSpec
    ref: ActorRef
    incarnation: int = 0
    ready: bool = False
    restarts: int = 0


class EnginePool:
    """All engines of one stage; lives on the control worker's event loop.

    ``on_reborn(slot)`` is awaited between an engine's re-creation and its return to
    service: it has to bring the current weights.
    """

    def __init__(
        self,
        specs: list[EngineSpec],
        run_id: str,
        prepare_timeout_s: float,
        max_restarts: int = 3,
    ) -> None:
        self.specs = specs
        self.run_id = run_id
        self.prepare_timeout_s = prepare_timeout_s
        self.max_restarts = max_restarts
        self.on_reborn: Callable[[str], Awaitable[None]] | None = None
        self.facts: dict[str, dict[str, Any]] = {}
        self._engines: dict[str, _Engine] = {}
        self._changed = asyncio.Condition()
        self._rebuilds: set[asyncio.Task[None]] = set()
        self._rebuilding: set[str] = set()
        self._failure: BaseException | None = None
        self._closing = False

    # start and stop -------------------------------------------------------------------
    async def start(self) -> None:
        """Create and prepare every engine, all at once. Raises what the first failure raised."""
        await asyncio.gather(*(self._start_one(spec) for spec in self.specs))

    async def _start_one(self, spec: EngineSpec) -> None:
        ref = await create_actor(
            EngineActor,
            spec,
            slot=spec.slot,
            key=f"{self.run_id}-{spec.slot}",
            timeout=CREATE_TIMEOUT_S,
        )
        engine = _Engine(spec, ref)
        self._engines[spec.slot] = engine
        self._watch(engine)
        await self._prepare(engine)

    async def _prepare(self, engine: _Engine) -> None:
        facts = await rpc(engine.ref.handle, "prepare", timeout=self.prepare_timeout_s)
        self.facts[engine.spec.slot] = facts
        log.info("engine %s ready to load weights: %s", engine.spec.slot, facts)

    async def close(self) -> None:
        """Close every engine (bounded) and release the actors."""
        self._closing = True
        for task in self._rebuilds:
            task.cancel()
        await asyncio.gather(*(self._close_one(e) for e in self._engines.values()))
        self._engines.clear()

    async def _close_one(self, engine: _Engine) -> None:
        try:
            await rpc(engine.ref.handle, "close", timeout=CLOSE_TIMEOUT_S)
        except Exception as error:
            log.warning("engine %s did not close cleanly: %s", engine.spec.slot, error)
        await release_actor(engine.ref)

    # membership -----------------------------------------------------------------------
    def handle(self, slot: str) -> ActorHandle:
        return self._engines[slot].ref.handle

    def slots(self) -> list[str]:
        return [spec.slot for spec in self.specs if spec.slot in self._engines]

    def members(self, slots: list[str] | None = None) -> tuple[Member, ...]:
        """The group members of ``slots`` (default: every engine that can be reached)."""
        chosen = self.slots() if slots is None else slots
        return tuple(self._member(self._engines[slot]) for slot in chosen)

    @staticmethod
    def _member(engine: _Engine) -> Member:
        ranks = int(engine.spec.config.get("tensor_parallel_size", 1))
        return Member(engine.spec.slot, f"{engine.incarnation}@{engine.ref.handle.address}", ranks)

    @property
    def n_ready(self) -> int:
        return sum(engine.ready for engine in self._engines.values())

    @property
    def restarts(self) -> int:
        return sum(engine.restarts for engine in self._engines.values())

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    async def mark_ready(self, slots: list[str]) -> None:
        """These engines hold the current weights; rollouts may use them."""
        for slot in slots:
            await rpc(self.handle(slot), "open", timeout=CLOSE_TIMEOUT_S)
            self._engines[slot].ready = True
        await self._notify()

    async def wait_all_present(self, timeout_s: float) -> None:
        """Until no engine is being rebuilt.

        Raises:
            EngineFailed: an engine cannot be brought back.
            TimeoutError: not within ``timeout_s``.
        """

        def settled() -> bool:
            return self._failure is not None or not self._rebuilds

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(settled), timeout_s)
            except TimeoutError:
                raise TimeoutError(
                    f"engines were not back within {timeout_s:.0f} s: {self._missing()}"
                ) from None
        if self._failure is not None:
            raise self._failure

    def _missing(self) -> list[str]:
        return [slot for slot, engine in self._engines.items() if not engine.ready]

    async def wait_failed(self) -> None:
        """Wait until an engine is beyond repair, then raise why. Never returns otherwise."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None)
        assert self._failure is not None
        raise self._failure

    # supervision ----------------------------------------------------------------------
    async def look_for_lost(self) -> None:
        """Ask every engine whether it is there, instead of waiting for the scheduler's word."""
        await asyncio.gather(*(self._look(engine) for engine in self._engines.values()))

    async def _look(self, engine: _Engine) -> None:
        try:
            await rpc(engine.ref.handle, "describe", timeout=LOOK_TIMEOUT_S)
        except ActorLost:
            self._lost(engine)

    def _watch(self, engine: _Engine) -> None:
        on_lost(engine.ref, lambda *_: self._lost(engine))

    def _lost(self, engine: _Engine) -> None:
        slot = engine.spec.slot
        if self._closing or slot in self._rebuilding:
            return
        self._rebuilding.add(slot)
        engine.ready = False
        log.warning("engine %s was lost with its worker; re-creating it", engine.spec.slot)
        task = asyncio.get_running_loop().create_task(self._rebuild(engine))
        self._rebuilds.add(task)

    async def _rebuild(self, engine: _Engine) -> None:
        try:
            await self._rebuild_until_it_serves(engine)
        except Exception as error:
            self._failure = EngineFailed(f"engine {engine.spec.slot} is lost: {error}")
            self._failure.__cause__ = error
        finally:
            self._rebuilding.discard(engine.spec.slot)
            self._rebuilds.discard(asyncio.current_task())
            await self._notify()

    async def _rebuild_until_it_serves(self, engine: _Engine) -> None:
        """One that dies while it starts counts as the next loss."""
        while True:
            try:
                await self._rebuild_once(engine)
                return
            except ActorLost as error:
                log.warning("engine %s was lost while it started: %s", engine.spec.slot, error)

    async def _rebuild_once(self, engine: _Engine) -> None:
        if engine.restarts >= self.max_restarts:
            raise EngineFailed(f"it was re-created {engine.restarts} times already")
        engine.restarts += 1
        engine.ref = await recreate_actor(engine.ref, timeout=CREATE_TIMEOUT_S)
        engine.incarnation += 1
        self._watch(engine)
        await self._prepare(engine)
        if self.on_reborn is not None:
            await self.on_reborn(engine.spec.slot)
        await self.mark_ready([engine.spec.slot])
        log.info("engine %s serves again", engine.spec.slot)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

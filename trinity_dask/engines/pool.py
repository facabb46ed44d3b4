"""The engines of a stage: created on their slots, watched, re-created; they may join and leave.

Invariant: an engine takes part in transfers and serves only after it was prepared *and* holds
the weights that the others hold. One that is lost with its worker is left out at once and
re-created at the same slot label, a bounded number of times; if its worker does not come
back, the run goes on with the other engines, and ends with the slot's name if there is none.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trinity_dask.aio import Background, Changes
from trinity_dask.cluster.actors import (
    ActorRef,
    create_actor,
    on_lost,
    recreate_actor,
    release_actor,
)
from trinity_dask.cluster.context import worker_client
from trinity_dask.cluster.placement import LEAVING, listen, slot_labels
from trinity_dask.cluster.rpc import ActorHandle, ActorLost, rpc
from trinity_dask.models.actor.actor import EngineActor
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.weights.broadcast import Member, engine_ranks

log = logging.getLogger("trinity_dask.engines")

CREATE_TIMEOUT_S = 120.0  # also how long a lost worker has to come back
CLOSE_TIMEOUT_S = 20.0
LOOK_TIMEOUT_S = 30.0
ENGINE = "engine-"  # begins the slots of engines


class WeightMismatch(RuntimeError):
    """An engine does not hold the trainer's weights. The run has to stop."""


class EngineFailed(RuntimeError):
    """No engine is left, or one could not be started."""


class EngineGone(RuntimeError):
    """An engine does not come back: its worker has left, or it dies again and again."""


@dataclass
class _Engine:
    spec: EngineSpec
    ref: ActorRef
    incarnation: int = 0
    holds: bool = False  # the weights that the others hold, so it takes part in transfers
    ready: bool = False
    restarts: int = 0
    leaves: bool = False  # its worker has said that it is about to go
    version: int | None = None  # of its weights; None: the start model
    served: bool = False  # before, or now

    @property
    def slot(self) -> str:
        return self.spec.slot


class EnginePool:
    """All engines of one stage; lives on the control worker's event loop.

    ``on_reborn(slot)`` is awaited before an engine that was born again, or has joined, takes
    part: it has to bring the current weights. ``spec_of(slot)`` says what an engine is on a
    slot that was not there at the start (None: it is not for this run); without it nobody
    joins. A lost worker has ``rejoin_timeout_s`` to come back.
    """

    def __init__(
        self,
        specs: list[EngineSpec],
        run_id: str,
        prepare_timeout_s: float,
        max_restarts: int = 3,
        spec_of: Callable[[str], EngineSpec | None] | None = None,
        rejoin_timeout_s: float = CREATE_TIMEOUT_S,
    ) -> None:
        self.specs = specs
        self.run_id = run_id
        self.prepare_timeout_s = prepare_timeout_s
        self.max_restarts = max_restarts
        self.rejoin_timeout_s = rejoin_timeout_s
        self.on_reborn: Callable[[str], Awaitable[None]] | None = None
        self.facts: dict[str, dict[str, Any]] = {}
        self.restarts = 0
        self.losses = 0  # engines that took part and were lost
        self._spec_of = spec_of
        self._engines: dict[str, _Engine] = {}
        self._labels: Callable[[], Awaitable[set[str]]] | None = None  # slots of all workers
        self._unlisten: Callable[[], None] | None = None
        self._looks = Background("the workers that joined could not be looked at")
        self._foreign: set[str] = set()  # slots that were there and were not asked for
        self._joins = itertools.count(1)
        self._refused: Counter[str] = Counter()  # slot -> joins in a row that failed
        self._changes = Changes()
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: set[str] = set()  # slots that are being rebuilt or are joining
        self._closing = False

    # start and stop -------------------------------------------------------------------
    async def start(self) -> None:
        """Create and prepare every engine, all at once. Raises what the first failure raised."""
        await asyncio.gather(*(self._start_one(spec) for spec in self.specs))
        if self._spec_of is not None:
            client = await worker_client()
            self._labels = partial(slot_labels, client)
            self._foreign = set(await self._present_slots()) - set(self._engines)
            self._unlisten = listen(client, self._heard)

    async def _start_one(self, spec: EngineSpec) -> None:
        engine = await self._create(spec, f"{self.run_id}-{spec.slot}")
        self._watch(engine)
        await self._prepare(engine)
        engine.holds = True  # the start model, like all others

    async def _create(self, spec: EngineSpec, key: str) -> _Engine:
        spec = replace(spec, run=self.run_id)
        ref = await create_actor(
            EngineActor, spec, slot=spec.slot, key=key, timeout=CREATE_TIMEOUT_S
        )
        engine = self._engines[spec.slot] = _Engine(spec, ref)
        return engine

    async def _prepare(self, engine: _Engine) -> None:
        facts = await rpc(engine.ref.handle, "prepare", timeout=self.prepare_timeout_s)
        self.facts[engine.slot] = facts
        log.info("engine %s ready to load weights: %s", engine.slot, facts)

    async def close(self) -> None:
        """Close every engine (bounded) and release the actors."""
        self._closing = True
        if self._unlisten is not None:
            self._unlisten()
        await self._looks.close()
        for task in self._tasks:
            task.cancel()
        engines = list(self._engines.values())
        closing = (rpc(e.ref.handle, "close", timeout=CLOSE_TIMEOUT_S) for e in engines)
        ends = await asyncio.gather(*closing, return_exceptions=True)
        for engine, error in zip(engines, ends, strict=True):
            if isinstance(error, Exception):
                log.warning("engine %s did not close cleanly: %s", engine.slot, error)
            await release_actor(engine.ref)
        self._engines.clear()

    # membership -----------------------------------------------------------------------
    def handle(self, slot: str) -> ActorHandle:
        return self._engines[slot].ref.handle

    def slots(self) -> list[str]:
        """The engines that take part in transfers."""
        holding = [slot for slot, engine in self._engines.items() if engine.holds]
        return sorted(holding, key=lambda slot: (len(slot), slot))

    def members(self, slots: list[str] | None = None) -> tuple[Member, ...]:
        """The group members of ``slots`` (default: every engine that takes part)."""
        chosen = self.slots() if slots is None else slots
        engines = [self._engines[slot] for slot in chosen]
        return tuple(
            Member(e.slot, f"{e.ref.handle.key}/{e.incarnation}", engine_ranks(e.spec.config))
            for e in engines
        )

    @property
    def n_ready(self) -> int:
        return sum(engine.ready for engine in self._engines.values())

    @property
    def failure(self) -> BaseException | None:
        return self._changes.failure

    def took_weights(self, slots: list[str], version: int) -> None:
        """These engines hold the weights of ``version`` now."""
        for slot in slots:
            if slot in self._engines:
                self._engines[slot].version = version

    def states(self) -> dict[str, dict[str, Any]]:
        """Of every engine by its slot: ``state`` (``starting``, ``waiting`` for weights or to be
        let in, ``serving``, ``leaving``, ``lost``), ``version`` of its weights, ``restarts``."""
        return {
            slot: {"state": self._state(e), "version": e.version, "restarts": e.restarts}
            for slot, e in self._engines.items()
        }

    def _state(self, engine: _Engine) -> str:
        if engine.leaves:
            return "leaving"
        if engine.slot in self._busy and engine.served:
            return "lost"  # and perhaps on its way back
        if engine.ready:
            return "serving"
        return "waiting" if engine.holds else "starting"

    async def mark_ready(self, slots: list[str]) -> None:
        """These engines hold the current weights; rollouts may use them."""
        for slot in slots:
            await rpc(self.handle(slot), "open", timeout=CLOSE_TIMEOUT_S)
            self._engines[slot].ready = self._engines[slot].served = True
        self._changes.notify()

    async def wait_present(self, timeout_s: float) -> None:
        """Until an engine is there to take weights. Nobody waits for one that is away: it gets
        the weights of its moment when it is back.

        Raises:
            EngineFailed: there is none any more.
            TimeoutError: not within ``timeout_s``.
        """
        if not await self._changes.until(lambda: bool(self.slots()), timeout_s):
            away = ", ".join(sorted(self._engines))
            raise TimeoutError(f"no engine was back within {timeout_s:.0f} s ({away})")

    async def wait_failed(self) -> None:
        """Wait until an engine is beyond repair, then raise why. Never returns otherwise."""
        await self._changes.until(lambda: False)

    # losses ---------------------------------------------------------------------------
    async def look_for_lost(self) -> None:
        """Ask every engine whether it is there, instead of waiting for the scheduler's word."""
        await asyncio.gather(*(self._look(e) for e in self._engines.values() if e.holds))

    async def _look(self, engine: _Engine) -> None:
        incarnation = engine.incarnation
        if await self._is_gone(engine) and engine.incarnation == incarnation:
            self._lost(engine)

    async def is_gone(self, slot: str) -> bool:
        """Whether the engine at ``slot`` is no more; asked of it, and at most LOOK_TIMEOUT_S."""
        return await self._is_gone(self._engines[slot])

    @staticmethod
    async def _is_gone(engine: _Engine) -> bool:
        for _ in range(2):  # a connection that broke is no death: the second one is new
            try:
                facts = await rpc(engine.ref.handle, "describe", timeout=LOOK_TIMEOUT_S)
            except ActorLost as error:
                log.info("%s", error)
                continue
            except TimeoutError as error:
                log.warning("%s; it is taken to be busy", error)
                return False
            # closed: its worker is about to leave
            return facts.get("model_version", 0) is None
        return True

    def _watch(self, engine: _Engine) -> None:
        on_lost(engine.ref, lambda *_: self._lost(engine))

    def _lost(self, engine: _Engine) -> None:
        stale = self._engines.get(engine.slot) is not engine  # it has been given up meanwhile
        if self._closing or stale or engine.slot in self._busy:
            return
        engine.holds = engine.ready = False
        self.losses += 1
        log.warning("engine %s was lost with its worker; re-creating it", engine.slot)
        self._work_on(engine.slot, self._rebuild(engine))

    def _work_on(self, slot: str, work: Coroutine[Any, Any, None]) -> None:
        """One thing at a time happens to a slot."""
        self._busy.add(slot)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        task.add_done_callback(lambda task: self._worked_on(slot, task))

    def _worked_on(self, slot: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._busy.discard(slot)
        if self._closing:
            return
        engine = self._engines.get(slot)
        if engine is not None and engine.holds:
            self._watch(engine)  # only now: while it is busy, a loss is noticed by that work
        elif self._unlisten is not None:
            self._looks.start(self._look_for_arrivals())  # its worker may have come meanwhile

    async def _rebuild(self, engine: _Engine) -> None:
        try:
            while not await self._rebuilt(engine):
                pass  # one that dies while it starts counts as the next loss
        except WeightMismatch as error:
            self._fail(engine.slot, error)
        except Exception as error:  # whatever keeps it from coming back
            await self._leaves(engine, error)
        self._changes.notify()

    async def _rebuilt(self, engine: _Engine) -> bool:
        announced, engine.leaves = engine.leaves, False  # which is no fault of the engine
        if engine.restarts >= self.max_restarts and not announced:
            raise EngineGone(f"it was re-created {engine.restarts} times already")
        engine.holds = engine.ready = False
        engine.restarts += not announced
        self.restarts += 1
        try:
            engine.ref = await recreate_actor(engine.ref, timeout=self.rejoin_timeout_s)
        except TimeoutError as error:
            raise EngineGone(str(error)) from error
        engine.incarnation += 1
        try:
            await self._prepare(engine)
            await self._take_in(engine)
        except WeightMismatch:
            raise
        except Exception as error:
            # whoever of a group sees the loss first reports it in its own words
            if not isinstance(error, ActorLost) and not await self._is_gone(engine):
                raise
            log.warning("engine %s was lost while it started: %s", engine.slot, error)
            return False
        log.info("engine %s serves again", engine.slot)
        return True

    async def _take_in(self, engine: _Engine) -> None:
        """Bring the current weights, then let it serve."""
        if self.on_reborn is not None:
            await self.on_reborn(engine.slot)
        engine.holds = True  # nothing is awaited between the weights and this
        await self.mark_ready([engine.slot])

    async def _leaves(self, engine: _Engine, reason: Exception) -> None:
        """Go on without it, if anyone is left."""
        if len(self._engines) == 1:
            self._fail(engine.slot, reason)
            return
        if engine.restarts >= self.max_restarts:
            self._foreign.add(engine.slot)  # or it would join at once, and die again
        await self._forget(engine)
        others = ", ".join(sorted(self._engines))
        log.warning("engine %s has left (%s); going on with %s", engine.slot, reason, others)

    async def _forget(self, engine: _Engine) -> None:
        self._engines.pop(engine.slot, None)
        await release_actor(engine.ref)

    def _fail(self, slot: str, error: Exception) -> None:
        failure = EngineFailed(f"engine {slot} is lost: {error}")
        failure.__cause__ = error
        self._changes.fail(failure)

    # arrivals -------------------------------------------------------------------------
    def _heard(self, message: dict[str, Any]) -> None:
        if message.get("action") == "add-worker":
            self._looks.start(self._look_for_arrivals())
        elif message.get("action") == LEAVING:
            for engine in self._engines.values():
                if engine.ref.handle.address == message.get("worker"):
                    engine.holds = engine.ready = False
                    engine.leaves = True

    async def _look_for_arrivals(self) -> None:
        """Every engine slot there is, whenever a worker has joined; a look that fails is made up
        for by the one that the next announcement brings."""
        for slot in await self._present_slots():
            self._present(slot)

    async def _present_slots(self) -> list[str]:
        """The engine slots that running workers carry."""
        assert self._labels is not None
        return sorted(s for s in await self._labels() if s.startswith(ENGINE))

    def _present(self, slot: str) -> None:
        """A worker with ``slot`` is there; if that is news, its engine joins."""
        known = slot in self._engines or slot in self._busy or slot in self._foreign
        if self._closing or known or self._refused[slot] > self.max_restarts:
            return
        spec = self._spec_of(slot) if self._spec_of is not None else None
        if spec is None:
            self._foreign.add(slot)
            return
        # unique: a key that was released a moment ago may still be on its way out
        self._work_on(slot, self._join(spec, f"{self.run_id}-{slot}-{next(self._joins)}"))

    async def _join(self, spec: EngineSpec, key: str) -> None:
        """Start an engine and take it in. One that cannot join is no harm to the others."""
        log.info("engine %s joins", spec.slot)
        engine = None
        try:
            engine = await self._create(spec, key)
            await self._prepare(engine)
            await self._take_in(engine)
        except WeightMismatch as error:
            self._fail(spec.slot, error)
        except Exception as error:
            self._refused[spec.slot] += 1
            log.warning("engine %s could not join: %s", spec.slot, error)
            if engine is not None:
                await self._forget(engine)
        else:
            del self._refused[spec.slot]
            log.info("engine %s has joined and serves", spec.slot)
        self._changes.notify()

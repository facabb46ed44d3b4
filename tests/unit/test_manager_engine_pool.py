"""Engines that die, come back, join and leave at any moment, beside transfers.

The cluster is played here: actors, their deaths and their calls are objects of this process, so
that every order of events can be had. The pool is the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.cluster.rpc import ActorHandle, ActorLost
from trinity_dask.engines import pool as engine_pool
from trinity_dask.engines.pool import EnginePool
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.weights.broadcast import Member, TransferMembers

AWAY_TICKS = 5  # a killed worker is back after these
PATIENCE_TICKS = 25  # and one that is not back after these is not waited for
SLOTS = ("engine-0", "engine-1", "engine-2")


@dataclass(eq=False)
class Actor:
    slot: str
    alive: bool = True
    version: Optional[int] = None  # None: the start model
    open: bool = False


@dataclass(eq=False)
class Ref:
    handle: ActorHandle
    actor: Actor
    lost: list[Callable[..., None]] = field(default_factory=list)


class World:
    """Workers by slot, the actors on them, and the version that was sent last."""

    def __init__(self, start: tuple[str, ...], max_restarts: int = 50) -> None:
        self.answer_ticks = 0  # how long an engine thinks about an answer
        self.present = set(start)
        self.actors: dict[str, Actor] = {}  # by key
        self.refs: list[Ref] = []
        self.version = 0
        self.lock = asyncio.Lock()
        self.pool = EnginePool(
            [self.spec(slot) for slot in start], "run", 1.0, max_restarts, spec_of=self.spec
        )
        self.pool.on_reborn = self.bring
        engine_pool.create_actor, engine_pool.recreate_actor = self.create, self.recreate
        engine_pool.rpc, engine_pool.on_lost = self.rpc, self.on_lost
        engine_pool.release_actor = self.release
        engine_pool.worker_client, engine_pool.slot_labels = self.client, self.slot_labels
        engine_pool.listen = self.listen

    @staticmethod
    def spec(slot: str) -> EngineSpec:
        return EngineSpec(slot, "fake", "")

    # the cluster ------------------------------------------------------------------------
    async def create(self, cls: type, spec: EngineSpec, *, slot: str, key: str, timeout: float):
        actor = await self._placed(slot)
        self.actors[key] = actor
        self.refs.append(Ref(ActorHandle(key, "tcp://host", slot), actor))
        return self.refs[-1]

    async def recreate(self, ref: Ref, timeout: float) -> Ref:
        ref.actor = self.actors[ref.handle.key] = await self._placed(ref.handle.slot)
        return ref

    async def _placed(self, slot: str) -> Actor:
        for _ in range(PATIENCE_TICKS):
            await asyncio.sleep(0)
            if slot in self.present:
                return Actor(slot)
        raise TimeoutError(f"no worker carries slot {slot}")

    async def rpc(self, handle: ActorHandle, method: str, *args: Any, timeout: float) -> Any:
        actor = self.actors[handle.key]
        for _ in range(2):
            if not actor.alive:
                for _ in range(self.answer_ticks):
                    await asyncio.sleep(0)
                raise ActorLost(handle, method, None)
            await asyncio.sleep(0)
        if method == "open":
            assert actor.version is None or actor.version <= self.version
            actor.open = True
        return {}

    def on_lost(self, ref: Ref, callback: Callable[..., None]) -> None:
        ref.lost.append(callback)
        if not ref.actor.alive:
            self._tell(ref)

    def _tell(self, ref: Ref) -> None:
        callbacks, ref.lost = ref.lost, []
        for callback in callbacks:
            asyncio.get_running_loop().call_soon(callback, ref)

    async def release(self, ref: Ref) -> None:
        ref.lost.clear()

    async def client(self) -> None:
        return None

    async def slot_labels(self, client: Any) -> list[str]:
        return ["control", *self.present]

    def listen(self, client: Any, heard: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        self.announce = heard
        return lambda: None

    # events -----------------------------------------------------------------------------
    def kill(self, slot: str, comes_back: bool = True) -> None:
        for ref in self.refs:
            if ref.actor.slot == slot and ref.actor.alive:
                ref.actor.alive = False
                self._tell(ref)
        if slot in self.present:
            self.present.discard(slot)
            if comes_back:
                asyncio.get_running_loop().create_task(self._revive(slot))

    async def _revive(self, slot: str) -> None:
        for _ in range(AWAY_TICKS):
            await asyncio.sleep(0)
        self.arrive(slot)

    def arrive(self, slot: str) -> None:
        self.present.add(slot)
        self.announce({"action": "add-worker"})

    # weights ----------------------------------------------------------------------------
    async def bring(self, slot: str) -> None:
        async with self.lock:
            await self._load(slot, self.version)

    async def _load(self, slot: str, version: int) -> None:
        try:
            await self.rpc(self.pool.handle(slot), "update_weights", timeout=1.0)
        except ActorLost as error:  # the other end of the group sees it first
            raise RuntimeError("connection closed by peer") from error
        self.actors[self.pool.handle(slot).key].version = version

    async def transfer(self) -> None:
        """To everybody who takes part; a loss on the way costs another attempt."""
        while self.pool.failure is None:
            await self.pool.wait_present(60.0)
            try:
                async with self.lock:
                    slots = self.pool.slots()
                    await asyncio.gather(*(self._load(s, self.version + 1) for s in slots))
                    if slots:
                        self.version += 1
                        return
            except RuntimeError:
                await self.pool.look_for_lost()

    def check(self) -> None:
        """Nobody serves an older version than the last one that was sent to all."""
        for slot, engine in self.pool._engines.items():
            actor = self.actors[engine.ref.handle.key]
            if actor.open and engine.holds:
                assert (actor.version or 0) >= self.version - self.lock.locked(), slot


EVENTS = st.tuples(
    st.integers(0, 120), st.sampled_from(["kill", "leave", "arrive", "transfer"]),
    st.sampled_from(SLOTS),
)  # fmt: skip


async def play(start: tuple[str, ...], events: list[tuple[int, str, str]]) -> World:
    world = World(start)
    await world.pool.start()
    await world.pool.mark_ready(world.pool.slots())
    tasks = []
    for tick in range(121):
        for _, event, slot in (e for e in events if e[0] == tick):
            if event == "transfer":
                tasks.append(asyncio.ensure_future(world.transfer()))
            elif event == "arrive":
                world.arrive(slot)
            else:
                world.kill(slot, comes_back=event == "kill")
        await asyncio.sleep(0)
        world.check()
    for _ in range(400):  # until everything that was begun has ended
        await asyncio.sleep(0)
        world.check()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    if world.pool.failure is None:
        assert results == [None] * len(tasks)
    return world


@pytest.fixture(autouse=True, scope="module")
def played_cluster():
    names = (
        "create_actor", "recreate_actor", "rpc", "on_lost", "release_actor",
        "worker_client", "slot_labels", "listen",
    )  # fmt: skip
    before = {name: getattr(engine_pool, name) for name in names}
    yield
    for name, value in before.items():
        setattr(engine_pool, name, value)


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3), events=st.lists(EVENTS, max_size=12))
def test_whoever_is_there_serves_the_newest_version(
    n: int, events: list[tuple[int, str, str]]
) -> None:
    world = asyncio.run(play(SLOTS[:n], events))
    pool = world.pool
    if pool.failure is not None:
        assert "is lost: no worker carries slot" in str(pool.failure)
        return
    assert pool.slots() == sorted(world.present & set(pool._engines))
    assert world.present <= set(pool._engines), "a worker is there and its engine is not"
    for slot in pool.slots():
        actor = world.actors[pool.handle(slot).key]
        assert actor.alive
        assert actor.open
        assert (actor.version or 0) == world.version
    assert pool.n_ready == len(pool.slots())


@pytest.mark.parametrize("ticks", range(1, 30))
def test_a_second_death_at_any_moment_of_a_start_is_one_more_loss(ticks: int) -> None:
    events = [(0, "transfer", ""), (10, "kill", "engine-0"), (10 + ticks, "kill", "engine-0")]
    world = asyncio.run(play(SLOTS[:1], events))
    assert world.pool.failure is None
    assert world.pool.n_ready == 1


@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize("answer_ticks", range(0, 24, 3))
def test_a_loss_that_is_noticed_twice_is_one_loss(max_restarts: int, answer_ticks: int) -> None:
    """By the scheduler's word and by a look whose answer comes when the first notice has been
    acted upon: the engine has come back, or has been given up."""

    async def main() -> None:
        world = World(SLOTS[:2], max_restarts)
        await world.pool.start()
        await world.pool.mark_ready(world.pool.slots())
        world.answer_ticks = answer_ticks
        actor = world.actors[world.pool.handle("engine-1").key]
        actor.alive = False  # the look finds it dead before the scheduler has said so
        look = asyncio.ensure_future(world.pool.look_for_lost())
        await asyncio.sleep(0)
        actor.alive = True
        world.kill("engine-1")
        await asyncio.wait_for(look, 60)
        for _ in range(200):
            await asyncio.sleep(0)
        assert world.pool.failure is None
        assert world.pool.slots() == ["engine-0", "engine-1"][: 1 + max_restarts]
        assert world.pool.restarts == max_restarts

    asyncio.run(main())


@pytest.mark.parametrize(("broken", "losses"), [(1, 0), (2, 1)])
def test_one_broken_connection_is_no_death(broken: int, losses: int) -> None:
    """The engine answers on the next one; given up, it would be waited for until it is missed
    by the scheduler, which never misses it."""

    async def main() -> None:
        world = World(SLOTS[:1])
        await world.pool.start()
        await world.pool.mark_ready(world.pool.slots())
        left, answer = [broken], engine_pool.rpc

        async def rpc(handle: ActorHandle, method: str, *args: Any, timeout: float) -> Any:
            if method == "describe" and left[0] > 0:
                left[0] -= 1
                raise ActorLost(handle, method, ConnectionResetError("by peer"))
            return await answer(handle, method, *args, timeout=timeout)

        engine_pool.rpc = rpc
        await world.pool.look_for_lost()
        assert world.pool.losses == losses

    asyncio.run(main())


def test_a_change_of_members_is_a_new_generation() -> None:
    group = TransferMembers(backend="gloo", timeout_s=1.0)
    two = (Member("engine-0", "a"), Member("engine-1", "b", ranks=2))
    specs = group.next_generation("t", two, "host", 1)
    assert {s: (p.rank_offset, p.world_size) for s, p in specs.items()} == {
        "trainer": (0, 4), "engine-0": (1, 4), "engine-1": (2, 4),
    }  # fmt: skip
    assert (group.trainer, group.members, group.formed) == ("t", two, False)
    group.formed = True
    group.next_generation("t", two[:1], "host", 1)
    assert (group.generation, group.members, group.formed) == (2, two[:1], False)
    with pytest.raises(ValueError, match="at least one engine"):
        group.next_generation("t", (), "host", 1)

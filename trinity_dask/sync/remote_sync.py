"""An explorer's side of a synchronizer that lives in another process.

Invariant: the engines of this process are loaded by this process, from the published file and
with its proof; the synchronizer learns the outcome of every version it has lent.
"""

from __future__ import annotations

import asyncio
from typing import Any, Optional

from trinity_dask.cluster.rpc import ActorHandle, rpc
from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.engines.pool import EnginePool
from trinity_dask.sync.shelf import Published
from trinity_dask.sync.transfer_retries import until_through
from trinity_dask.sync.transport import WeightTransport

CALL_TIMEOUT_S = 30.0


class RemoteSynchronizer:
    """The explorer-side calls of :class:`~trinity_dask.sync.synchronizer.Synchronizer`,
    for one explorer. ``name`` arguments are there for the sake of one interface."""

    def __init__(
        self,
        handle: ActorHandle,
        cfg: SynchronizerConfig,
        name: str,
        pool: EnginePool,
        transport: WeightTransport,
    ) -> None:
        self.handle, self.cfg, self.name = handle, cfg, name
        self.metrics: dict[str, float] = {}
        self._pool, self._transport = pool, transport
        self._current: Optional[Published] = None
        self._lock = asyncio.Lock()
        pool.on_reborn = self._bring_current_weights

    async def _call(self, method: str, *args: Any, waits: bool = False) -> Any:
        # the synchronizer's own deadline comes first and says more
        timeout = CALL_TIMEOUT_S + (self.cfg.sync_timeout_s if waits else 0.0)
        return await rpc(self.handle, method, *args, timeout=timeout)

    # the calls of an explorer ---------------------------------------------------------
    async def register_explorer(self, name: str, submitted: int = 0) -> int:
        """Join, load the newest version if there is one, and let rollouts in."""
        await self._call("register_explorer", self.name, submitted)
        published = await self._call("first_weights", self.name, waits=True)
        version = await self._load(published, 0) if published else 0
        await self._pool.mark_ready(self._pool.slots())
        return version

    async def explorer_should_sync(self, name: str, step: int) -> bool:
        return await self._call("explorer_should_sync", self.name, step)

    async def explorer_sync(self, name: str, step: int, final: bool = False) -> int:
        published = await self._call("explorer_acquire", self.name, step, final, waits=True)
        return await self._served() if published is None else await self._load(published, step)

    async def watch(self, name: str, timeout_s: Optional[float] = None) -> int:
        published = await self._call("watch_acquire", self.name, timeout_s, waits=True)
        return await self._served() if published is None else await self._load(published, None)

    async def explorer_stopped(self, name: str, step: int) -> None:
        await self._call("explorer_stopped", self.name, step)

    async def get_latest_model_version(self) -> int:
        return await self._call("get_latest_model_version")

    async def _served(self) -> int:
        return self._current.version if self._current is not None else 0

    # loading --------------------------------------------------------------------------
    async def _load(self, published: Published, step: Optional[int]) -> int:
        """Into every engine of this process; the synchronizer is told how it went."""
        try:
            await until_through(
                self._pool,
                lambda: self._load_once(published),
                f"loading version {published.version}",
                self.cfg.sync_timeout_s,
            )
        except BaseException:
            await self._call("explorer_loaded", self.name, None, step)
            raise
        self._current = published
        return await self._call("explorer_loaded", self.name, published.version, step)

    async def _load_once(self, published: Published) -> None:
        async with self._lock:
            self.metrics = await self._transport.load(published, self._pool.slots())

    async def _bring_current_weights(self, slot: str) -> None:
        """The version that the others serve; its file stays while it is served."""
        async with self._lock:
            if self._current is not None:
                await self._transport.load(self._current, [slot])

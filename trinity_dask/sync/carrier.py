"""Moves versions: publishes them, loads them into attached engines, retries what may be.

Invariant: the trainer's weights are read only between ``state.sending += 1`` and its end, a
time in which the trainer is not let go; a reborn engine is labelled with the version of the
weights it really got.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional

from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.engines.errors import WeightMismatch
from trinity_dask.engines.pool import EnginePool
from trinity_dask.models.protocol import WeightReceipt, WeightUpdate
from trinity_dask.sync.shelf import Published, WeightShelf
from trinity_dask.sync.state import RunningStatus, SyncState
from trinity_dask.sync.trainer_side import TrainerSide
from trinity_dask.sync.transfer_retries import TRANSFER_ATTEMPTS, until_through
from trinity_dask.sync.transport import WeightTransport

log = logging.getLogger("trinity_dask.synchronizer")


@dataclass
class _Attached:
    pool: EnginePool
    transport: WeightTransport
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one load into its engines


class WeightCarrier:
    """The bytes' side of the synchronizer."""

    def __init__(self, cfg: SynchronizerConfig, state: SyncState, shelf: WeightShelf) -> None:
        self.cfg = cfg
        self.state = state
        self.shelf = shelf
        self.trainer = TrainerSide(cfg.sync_timeout_s)
        self.ensure_trainer: Callable[[], Awaitable[None]] = _nothing
        self.transfers = 0
        self.metrics: dict[str, float] = {}
        self._attached: dict[str, _Attached] = {}
        self._publishing: Optional[asyncio.Lock] = None

    # explorers ------------------------------------------------------------------------
    def attach(self, name: str, pool: EnginePool, transport: WeightTransport) -> None:
        if not self._attached and not self.shelf.versions:
            self.shelf = transport.shelf  # one run, one place for its files
        transport.shelf, transport.trainer, transport.user = self.shelf, self.trainer, name
        self.shelf.users.add(name)
        self._attached[name] = _Attached(pool, transport)
        pool.on_reborn = lambda slot: self.bring_current_weights(name, slot)

    @property
    def names(self) -> list[str]:
        return list(self._attached)

    def pool(self, name: str) -> EnginePool:
        return self._attached[name].pool

    def transport(self, name: str) -> WeightTransport:
        return self._attached[name].transport

    # transfers ------------------------------------------------------------------------
    async def load(self, name: str, version: int) -> None:
        """Bring ``version`` to every engine of ``name``; the trainer stands still, or the
        version is published."""
        with self._standing_still(version):
            await until_through(
                self.pool(name),
                # not under the lock: an engine that comes back takes it for its own weights
                lambda: self._load_once(name, version),
                f"sending version {version}",
                self.cfg.sync_timeout_s,
                self._ensure_standing_trainer,
            )

    async def _load_once(self, name: str, version: int) -> None:
        to = self._attached[name]
        async with to.lock:
            slots = to.pool.slots()
            if self.cfg.sync_method == "nccl":
                metrics = await to.transport.send(version, slots, self._probe_is_due())
            else:
                metrics = await to.transport.load(await self._published(version), slots)
        self._moved(metrics, slots)

    async def publish(self, version: int) -> Published:
        """The file of ``version``; written now, with the trainer standing still, if it is
        not there. Lost ranks are brought back and asked again."""
        with self._standing_still(version):
            for attempt in range(1, TRANSFER_ATTEMPTS + 1):
                try:
                    return await self._published(version)
                except Exception as error:
                    if attempt == TRANSFER_ATTEMPTS:
                        raise
                    log.warning("writing version %d failed (%s); once more", version, error)
                    await self._ensure_standing_trainer()
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _published(self, version: int) -> Published:
        if self._publishing is None:
            self._publishing = asyncio.Lock()
        async with self._publishing:
            found = self.shelf.get(version)
            if found is None:
                probe = self._probe_is_due()
                found = await self.trainer.publish(self.shelf, version, probe)
                self.state.version_published(version)
                self.sweep(self.state)
        return found

    async def put(self, version: int, weights: Mapping[str, Any] | str) -> Published:
        """Publish what somebody else has: tensors by name, or a file or directory of them."""
        found = await asyncio.to_thread(_on_shelf, self.shelf, version, weights)
        self.shelf.put(found)
        self.state.version_published(version)
        self.sweep(self.state)
        return found

    @contextmanager
    def _standing_still(self, version: int) -> Iterator[None]:
        needs_trainer = self.shelf.get(version) is None
        self.state.sending += needs_trainer
        try:
            yield
        finally:
            self.state.sending -= needs_trainer

    def sweep(self, state: SyncState) -> None:
        """Remove the files nobody reads and no reborn engine could ask for."""
        live = state.live_explorers
        self.shelf.sweep({v for e in live for v in (e.version, e.loading) if v is not None})

    def _probe_is_due(self) -> bool:
        self.transfers += 1
        interval = self.cfg.probe_interval
        return interval > 0 and (self.transfers - 1) % interval == 0

    def _moved(self, metrics: dict[str, float], slots: list[str]) -> None:
        self.metrics = metrics
        floor = metrics.get("sync/floor_share")
        log.info(
            "version %d on %d engine(s): %.1f MB in %.3f s%s",
            metrics["sync/version"],
            len(slots),
            metrics["sync/bytes"] / 1e6,
            metrics["sync/seconds"],
            "" if floor is None else f", {floor:.0%} of it on the bare way",
        )

    # losses ---------------------------------------------------------------------------
    async def _ensure_standing_trainer(self) -> None:
        if self.state.trainer is not RunningStatus.RUNNING:
            await self.ensure_trainer()

    async def bring_current_weights(self, name: str, slot: str) -> None:
        """A reborn or new engine gets the version the others serve before its first token.

        From a file it is just that version. Over a group it is what the trainer has, which
        may be newer; the engine's label says which.
        """
        for attempt in range(1, TRANSFER_ATTEMPTS + 1):
            try:
                # what the others serve is looked at under the lock: a load may be under way
                async with self._attached[name].lock:
                    if self.state.explorers[name].version >= 0:
                        await self._bring(name, slot)
                return
            except WeightMismatch:
                raise
            except Exception as error:
                if attempt == TRANSFER_ATTEMPTS or await self.pool(name).is_gone(slot):
                    raise
                log.warning("weights for reborn %s failed (%s); once more", slot, error)
                await self.ensure_trainer()

    async def _bring(self, name: str, slot: str) -> None:
        transport, state = self.transport(name), self.state
        if self.cfg.sync_method != "nccl":
            published = self.shelf.get(state.explorers[name].version)
            if published is not None:  # else it is the start model, which the engine has
                self._moved(await transport.load(published, [slot]), [slot])
            return
        standing = state.standing
        state.sending += standing
        try:
            # a probe compares with the trainer's own log-probs, so it needs it standing still
            probe = self._probe_is_due() and standing
            version = state.trainer_version
            metrics = await transport.send(version, [slot], probe, relabel=not standing)
        finally:
            state.sending -= standing
        self._moved(metrics, [slot])


def _on_shelf(shelf: WeightShelf, version: int, weights: Mapping[str, Any] | str) -> Published:
    """Write or read ``weights``, which gives their checksum."""
    from trinity_dask.weights.checksum import Digest
    from trinity_dask.weights.files import read_safetensors
    from trinity_dask.weights.urls import fetched, write_weights

    options = shelf.storage_options
    start = time.perf_counter()
    if isinstance(weights, str):
        path, digest = shelf.hold(version, weights), Digest()
        update = WeightUpdate(version, "checkpoint", path=path, storage_options=options)
        with fetched(update) as here:
            for _ in read_safetensors(str(here.path), digest):
                pass  # read for its checksum only
    else:
        path = shelf.path(version)
        digest = write_weights(path, weights.items(), options)
    seconds = time.perf_counter() - start
    return Published(version, path, WeightReceipt(version, digest.value, digest.n_bytes, seconds))


async def _nothing() -> None:
    """No trainer to look after."""

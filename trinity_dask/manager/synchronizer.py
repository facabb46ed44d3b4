"""The synchronizer: a Dask actor that lets explorer and trainer meet.

Invariant: every waiter is woken by an event or by its deadline; weights move only while the
trainer stands still (it waits here) and the explorer has drained (it waits here too); after
a transfer every engine's checksum equals the trainer's, or the run stops.

The decisions are :class:`~trinity_dask.manager.sync_state.SyncState`; this module waits
and moves bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from trinity_dask.cluster.rpc import ActorHandle, ActorLost, rpc
from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.manager.engine_pool import LOOK_TIMEOUT_S, EnginePool
from trinity_dask.manager.sync_state import SyncState, TrainerStatus
from trinity_dask.manager.weight_transport import WeightMismatch, WeightTransport

log = logging.getLogger("trinity_dask.synchronizer")

TRANSFER_ATTEMPTS = 3


class Synchronizer:
    """Style ``fixed`` of the explorer/trainer hand-shake.

    All methods run on the control worker's event loop. ``attach`` must be called before
    any side waits.
    """

    def __init__(self, cfg: SynchronizerConfig) -> None:
        self.cfg = cfg
        self.state = SyncState()
        self.metrics: dict[str, float] = {}
        self._transport: WeightTransport | None = None
        self._pool: EnginePool | None = None
        self._condition: asyncio.Condition | None = None
        self._failure: BaseException | None = None
        self._transfers = 0
        self._moving: asyncio.Lock | None = None
        self._rows_available: Callable[[], bool] = lambda: False
        self._ensure_trainer: Callable[[], Awaitable[None]] = _nothing

    # set-up ---------------------------------------------------------------------------
    def attach(
        self,
        pool: EnginePool,
        transport: WeightTransport,
        rows_available: Callable[[], bool] = lambda: False,
        ensure_trainer: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """``rows_available()`` says whether the buffer could serve the next train step;
        ``ensure_trainer()`` brings back trainer ranks that died while they were waiting."""
        self._pool, self._transport = pool, transport
        self._rows_available = rows_available
        self._ensure_trainer = ensure_trainer or _nothing
        pool.on_reborn = self._bring_current_weights

    def set_trainer_rank0(self, handle: ActorHandle) -> None:
        assert self._transport is not None
        self._transport.rank0 = handle

    # trainer side ---------------------------------------------------------------------
    async def trainer_sync(self, step: int, progress: int) -> int:
        """The trainer has finished ``step`` and all batches up to ``progress``.

        Returns the engines' version once no explorer boundary needs this very step.
        Returns at once between sync points.
        """
        if step % self.cfg.sync_interval:
            return self.state.engine_version
        self.state.trainer_at_sync(step, progress)
        await self._notify()
        await self._wait(
            lambda: self.state.trainer_may_continue,
            f"trainer at step {step}: the explorer to take its weights",
        )
        self.state.trainer_running()
        return self.state.engine_version

    async def trainer_starved(self, step: int) -> None:
        """The trainer cannot train on without new rows."""
        self.state.trainer_starved(step, self.state.progress)
        await self._notify()

    async def trainer_resumed(self) -> None:
        """Rows arrived; weights are about to change again."""
        async with self._lock():
            self.state.trainer_running()

    async def trainer_stopped(self, step: int, progress: int | None = None) -> None:
        """No more steps. The last weights can still be fetched."""
        self.state.trainer_stopped(step, self.state.progress if progress is None else progress)
        await self._notify()

    # explorer side --------------------------------------------------------------------
    async def explorer_sync(self, step: int) -> int:
        """Wait until the trainer has caught up with batch ``step`` (less the offset), move
        the weights, return the version the engines now serve."""
        self.state.explorer_waiting(max(step - self.cfg.sync_offset, 0))
        await self._notify()
        await self._wait(
            lambda: self.state.should_transfer or self.state.explorer_may_pass,
            f"explorer at step {step}: the trainer to finish batch {self.state.required}",
        )
        if self.state.should_transfer:
            await self._transfer()
        self.state.explorer_running(self._next_required(step))
        await self._notify()
        return self.state.engine_version

    async def explorer_stopped(self, step: int) -> None:
        self.state.explorer_stopped()
        await self._notify()

    def _next_required(self, step: int) -> int:
        interval = self.cfg.sync_interval
        base = max(step - self.cfg.sync_offset, 0)
        return (base // interval + 1) * interval

    # first weights --------------------------------------------------------------------
    async def initial_sync(self, trainer_step: int, progress: int) -> dict[str, float]:
        """Send the trainer's weights as version ``trainer_step`` before anything runs."""
        assert self._pool is not None
        self.state.trainer_version, self.state.progress = trainer_step, progress
        await self._transfer()
        self.state.explorer_running(self._next_required(progress + self.cfg.sync_offset))
        await self._pool.mark_ready(self._pool.slots())
        return dict(self.metrics)

    # transfers ------------------------------------------------------------------------
    async def _transfer(self) -> None:
        version = self.state.trainer_version
        self.state.transfer_started()
        try:
            await self._send_with_retry(version)
        except BaseException as error:
            self.state.transfer_ended(None)
            if isinstance(error, Exception):  # a cancelled explorer is no fault of the weights
                await self.fail(error)
            raise
        self.state.transfer_ended(version)
        await self._notify()

    async def _send_with_retry(self, version: int) -> None:
        assert self._pool is not None
        assert self._transport is not None
        for attempt in range(1, TRANSFER_ATTEMPTS + 1):
            # not under the lock: an engine that is coming back takes it for its own weights
            await self._pool.wait_all_present(self.cfg.sync_timeout_s)
            try:
                async with self._lock():
                    await self._send(version, self._pool.slots())
                return
            except WeightMismatch:
                raise
            except Exception as error:
                if attempt == TRANSFER_ATTEMPTS:
                    raise
                log.warning("sending version %d failed (%s); once more", version, error)
                await self._revive()

    async def _revive(self) -> None:
        """Notice who died in a transfer now: the next attempt needs everyone."""
        assert self._pool is not None
        await self._pool.look_for_lost()
        if self.state.trainer is not TrainerStatus.RUNNING:
            await self._ensure_trainer()

    async def _send(self, version: int, slots: list[str]) -> None:
        assert self._transport is not None
        self._transfers += 1
        interval = self.cfg.probe_interval
        probe = interval > 0 and (self._transfers - 1) % interval == 0
        self.metrics = await self._transport.send(version, slots, probe)
        log.info(
            "version %d on %d engine(s): %.1f MB in %.3f s",
            version,
            len(slots),
            self.metrics["sync/bytes"] / 1e6,
            self.metrics["sync/seconds"],
        )

    async def _bring_current_weights(self, slot: str) -> None:
        """A reborn engine gets the version the others serve before its first token.

        While the trainer trains on, its weights are newer than that version; the newcomer
        then starts with the newer ones and every token says so.
        """
        if self.state.engine_version < 0:
            return
        for attempt in range(1, TRANSFER_ATTEMPTS + 1):
            try:
                async with self._lock():
                    await self._send(self.state.trainer_version, [slot])
                return
            except WeightMismatch:
                raise
            except Exception as error:
                if attempt == TRANSFER_ATTEMPTS or await self._is_lost(slot):
                    raise
                log.warning("weights for reborn %s failed (%s); once more", slot, error)
                await self._ensure_trainer()

    async def _is_lost(self, slot: str) -> bool:
        assert self._pool is not None
        try:
            await rpc(self._pool.handle(slot), "describe", timeout=LOOK_TIMEOUT_S)
        except ActorLost:
            return True
        return False

    # waiting --------------------------------------------------------------------------
    async def fail(self, error: BaseException) -> None:
        """Wake every waiter with ``error``."""
        self._failure = self._failure or error
        await self._notify()

    async def _wait(self, ready: Callable[[], bool], what: str) -> None:
        condition = self._cond()

        def woken() -> bool:
            self.state.rows_available = self._rows_available()
            return self._failure is not None or ready()

        async with condition:
            try:
                await asyncio.wait_for(
                    condition.wait_for(woken),
                    self.cfg.sync_timeout_s,
                )
            except TimeoutError:
                raise TimeoutError(
                    f"{what}: not within synchronizer.sync_timeout_s = "
                    f"{self.cfg.sync_timeout_s:g} s ({self._where()})"
                ) from None
        if self._failure is not None:
            raise RuntimeError(f"weight synchronisation failed: {self._failure}") from self._failure

    def _where(self) -> str:
        s = self.state
        return (
            f"trainer {s.trainer.value} at version {s.trainer_version}, batches trained "
            f"{s.progress}; explorer {s.explorer.value}, requires {s.required}; engines at "
            f"{s.engine_version}"
        )

    async def _notify(self) -> None:
        async with self._cond():
            self._cond().notify_all()

    def _cond(self) -> asyncio.Condition:
        # made here, not in __init__: actors are constructed in a thread, not on the loop
        if self._condition is None:
            self._condition = asyncio.Condition()
        return self._condition

    def _lock(self) -> asyncio.Lock:
        if self._moving is None:
            self._moving = asyncio.Lock()
        return self._moving

    # queries --------------------------------------------------------------------------
    async def get_latest_model_version(self) -> int:
        return self.state.engine_version

    async def stats(self) -> dict[str, Any]:
        s = self.state
        return {
            "trainer": s.trainer.value,
            "explorer": s.explorer.value,
            "model_version": s.engine_version,
            "trainer_version": s.trainer_version,
            "progress": s.progress,
            "transfers": self._transfers,
        }


async def _nothing() -> None:
    """No trainer to look after."""

"""What all of the synchronizer's calls stand on: the state, the waiting, the moving.

Invariant: a decision is taken on what the buffer says at that moment, and nothing is awaited
between a decision and the event that it leads to.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Optional

from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.sync.carrier import WeightCarrier
from trinity_dask.sync.shelf import Published, WeightShelf
from trinity_dask.sync.state import SyncState
from trinity_dask.sync.transport import WeightMismatch
from trinity_dask.sync.waiting import Waiting


class SyncCore:
    """State, waiting and moving."""

    def __init__(self, cfg: SynchronizerConfig, job_dir: Optional[str], run_id: str) -> None:
        self.cfg = cfg
        self.job_dir = job_dir
        self.state = SyncState(cfg.sync_style, cfg.sync_method, cfg.sync_interval, cfg.sync_offset)
        self.state.max_staleness = cfg.max_staleness
        self.timeouts = 0
        # awaited when every module has left; set for a synchronizer that outlives its creator
        self.on_abandoned: Optional[Callable[[], Awaitable[None]]] = None
        shelf = WeightShelf.for_run(
            cfg.sync_method, job_dir or ".", run_id, cfg.path, cfg.storage_options
        )
        self._carrier = WeightCarrier(cfg, self.state, shelf)
        self._waiting = Waiting(cfg.sync_timeout_s)
        self._rows_available: Callable[[], bool] = lambda: False
        self._writes_blocked: Callable[[], bool] = lambda: False

    # waiting --------------------------------------------------------------------------
    async def fail(self, error: BaseException) -> None:
        """Wake every waiter with ``error``."""
        await self._waiting.fail(error)

    async def _notify(self) -> None:
        await self._waiting.notify()

    async def _wait(
        self,
        ready: Callable[[], bool],
        what: Callable[[], str],
        timeout_s: Optional[float] = None,
    ) -> None:
        def woken() -> bool:
            self._look()
            return ready()

        await self._waiting.until(woken, lambda: f"{what()} ({self._where()})", timeout_s)

    def _look(self) -> None:
        self.state.rows_available = self._rows_available()
        self.state.writes_blocked = self._writes_blocked()

    def _where(self) -> str:
        s = self.state
        explorers = "; ".join(
            f"explorer {name!r} {e.status.value} at version {e.version}, requires {e.required}"
            for name, e in s.explorers.items()
        )
        return (
            f"trainer {s.trainer.value} at version {s.trainer_version}, batches trained "
            f"{s.progress}; {explorers or 'no explorer'}"
        )

    # moving ---------------------------------------------------------------------------
    @property
    def metrics(self) -> dict[str, float]:
        """Of the last transfer: bytes, seconds, version, and the probe's gap in nats."""
        return self._carrier.metrics

    async def _load(self, name: str, version: int) -> None:
        """Load into attached engines. An error ends the run of a lone explorer; beside
        others it is that explorer's own, unless engine and trainer differ."""
        self.state.load_started(name, version)
        try:
            await self._carrier.load(name, version)
        except BaseException as error:
            self.state.load_ended(name, None)
            # a cancelled explorer is no fault of the weights
            alone = isinstance(error, Exception) and len(self.state.live_explorers) <= 1
            if alone or isinstance(error, WeightMismatch):
                await self.fail(error)
            raise
        self.state.load_ended(name, version)
        self._carrier.sweep(self.state)
        await self._notify()

    async def _publish(self, version: int) -> Published:
        published = await self._carrier.publish(version)
        await self._notify()
        return published

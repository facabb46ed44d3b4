"""The explorer's side of weights: when it asks for them, and its engines' weight group.

Invariant: outside of style ``fully_async`` the engines' weights change only in
:meth:`WeightCalls.sync_weight`, after everything that was submitted is committed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Optional

from trinity_dask.config.schema import Config
from trinity_dask.explorer.engine_weights import EngineWeights
from trinity_dask.monitor.monitor import Monitor
from trinity_dask.sync.synchronizer import Synchronizer

FULLY_ASYNC = "fully_async"
WATCH_S = 30.0  # one long-poll for new weights


class WeightCalls:
    """Base of :class:`~trinity_dask.explorer.explorer.Explorer`."""

    def __init__(
        self,
        cfg: Config,
        synchronizer: Optional[Synchronizer],
        monitor: Monitor,
        weights: Optional[EngineWeights],
    ) -> None:
        self.cfg = cfg
        self.name = cfg.explorer.name
        self.step = 0
        self.model_version = -1
        self._synchronizer = synchronizer
        self._monitor = monitor
        self._weights = weights

    async def finish_current_steps(self) -> None:
        """Commit everything that was submitted."""
        raise NotImplementedError

    async def need_sync(self) -> bool:
        """Whether to drain and ask for weights now; the style decides."""
        if self._synchronizer is None:
            return False
        return await self._synchronizer.explorer_should_sync(self.name, self.step)

    async def _wait_young_enough(self, step: int, in_flight: Callable[[], int]) -> None:
        """Until batch ``step`` may begin under ``synchronizer.max_staleness``."""
        if self._synchronizer is None or self.cfg.synchronizer.max_staleness is None:
            return
        while not await self._synchronizer.explorer_may_submit(self.name, step, in_flight):
            await self.sync_weight()

    def _last_boundary(self) -> int:
        cfg = self.cfg.synchronizer
        past = self.step - cfg.sync_offset
        alone = self._synchronizer is None or cfg.sync_style == FULLY_ASYNC
        if alone or past < cfg.sync_interval:
            return 0
        return self.step - past % cfg.sync_interval

    async def sync_weight(self, boundary: Optional[int] = None, final: bool = False) -> int:
        """Drain, then wait for the trainer and take its weights; the engines' version.

        ``boundary`` is the step to wait for (default: the current one); ``final`` waits for
        the last weights that the committed rows can give.
        """
        await self.finish_current_steps()
        if self._synchronizer is None:
            return self.model_version
        started = time.monotonic()
        step = boundary or self.step
        self.model_version = await self._synchronizer.explorer_sync(self.name, step, final=final)
        self._log_sync({"time/sync_wait": time.monotonic() - started})
        return self.model_version

    async def _watch_weights(self) -> None:
        """Style ``fully_async``: weights change under running rollouts. Never returns."""
        if self._synchronizer is None or self.cfg.synchronizer.sync_style != FULLY_ASYNC:
            await asyncio.Event().wait()
            return
        while True:
            version = await self._synchronizer.watch(self.name, WATCH_S)
            if version != self.model_version:
                self.model_version = version
                self._log_sync({})

    def _log_sync(self, times: dict[str, float]) -> None:
        assert self._synchronizer is not None
        version = {"explorer/model_version": float(self.model_version)}
        self._monitor.log(self.step, {**self._synchronizer.metrics, **times, **version})

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Any = None
    ) -> None:
        """Have every engine join the weight group whose rank 0 serves at this address.

        A run forms its groups itself, when it first sends weights and whenever a member has
        changed; this is for callers that drive an explorer by hand.
        """
        await self._engines.join_group(master_address, master_port)

    async def teardown_weight_sync_group(self) -> None:
        """Have every engine leave its weight group."""
        await self._engines.leave_group()

    async def setup_model_level_weight_sync_group(self) -> None:
        """Nothing to form: with ``checkpoint`` and ``memory`` each engine reads for itself."""

    async def get_weight(self, name: str) -> Any:
        """The tensor ``name`` of the checkpoint that the engines hold (mode bench), else of
        the job's newest one.

        Raises:
            LookupError: no checkpoint, or no such tensor.
        """
        return await self._engines.get_weight(name)

    @property
    def _engines(self) -> EngineWeights:
        if self._weights is None:
            raise RuntimeError("this explorer was made without engines (weights=None)")
        return self._weights

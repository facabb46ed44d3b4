"""Keeps the status board up to date while a stage runs, and the accounts under watch.

Invariant: a status shows numbers of one moment of the parts themselves (nothing is counted
here), and accounts that stay out of balance stop the stage: one look may fall between two
steps of a commit, but numbers that are wrong and do not move for ten seconds are a loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.launcher.accounts import Accounts, AccountsError
from trinity_dask.launcher.status import StatusBoard

if TYPE_CHECKING:
    from trinity_dask.launcher.stages.base import StageRunner

log = logging.getLogger("trinity_dask.stage")

PERIOD_S = 0.5
IMBALANCE_S = 10.0


class Reporter:
    """Samples the parts of ``stage`` every half second into ``board``."""

    def __init__(self, stage: StageRunner, board: StatusBoard) -> None:
        self.stage = stage
        self.board = board
        self._task: Optional[asyncio.Task[None]] = None
        self._unbalanced: Optional[Accounts] = None
        self._unbalanced_since = 0.0
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait_failed(self) -> None:
        """Wait until the accounts are wrong for good, then raise. Never returns otherwise."""
        await asyncio.shield(self._failed)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _loop(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("the status could not be refreshed")
            await asyncio.sleep(PERIOD_S)

    async def refresh(self) -> None:
        await self.board.update(**await self.snapshot())
        accounts = await self.stage.accounts()
        if accounts is not None:
            await self.board.update(accounts=accounts.as_dict())
            self._watch(accounts)

    def _watch(self, accounts: Accounts) -> None:
        now = asyncio.get_running_loop().time()
        if not accounts.errors():
            self._unbalanced = None
        elif accounts != self._unbalanced:
            self._unbalanced, self._unbalanced_since = accounts, now
        elif now - self._unbalanced_since > IMBALANCE_S and not self._failed.done():
            self._failed.set_exception(AccountsError("; ".join(accounts.errors())))

    async def snapshot(self) -> dict[str, Any]:
        """The status keys of the moment (see docs/architecture.md)."""
        stage, seen = self.stage, {}
        if stage.trainer is not None:
            seen.update(stage.trainer.status())
        if stage.explorer is not None:
            seen.update(stage.explorer.status())
        if stage.synchronizer is not None:
            seen["model_version"] = stage.synchronizer.state.engine_version
        if stage.buffer is not None:
            stats = await stage.buffer.stats()
            seen["queue_batches"] = stats["queued_batches"]
            seen["queue_rows"] = stats["queued_rows"]
        if stage.coordinator is not None:
            seen.update(stage.coordinator.status())
        if stage.pool is not None:
            seen["workers"] = {"engines": stage.pool.n_ready, "restarts": stage.pool.restarts}
        return seen

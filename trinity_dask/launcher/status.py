"""What is told of a run: its status as it goes on, and how a side of it ended.

Invariant: the version of a status grows with every change, so a reader that passes the version
it has seen never misses the last change and never polls in a loop. An end says in one line why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.aio import Changes, ended
from trinity_dask.config.secrets import shown_text
from trinity_dask.launcher.accounts import Accounts, AccountsError
from trinity_dask.launcher.telling import EngineWatch

if TYPE_CHECKING:
    from trinity_dask.launcher.stages import StageRunner

log = logging.getLogger("trinity_dask.stage")

FINAL_STATES = ("done", "failed", "interrupted")
PERIOD_S = 0.5
IMBALANCE_S = 10.0


@dataclass(frozen=True)
class End:
    """How a side of a job ended: ``done``, ``interrupted`` or ``failed``, and why."""

    outcome: str
    message: str = ""


def end_of(error: Optional[BaseException], stopping: bool) -> End:
    """How a stage ended that was left with ``error`` (None: without)."""
    if error is None or isinstance(error, asyncio.CancelledError):
        return End("interrupted" if stopping or error is not None else "done")
    return End("failed", describe(error))


def describe(error: BaseException) -> str:
    """The type, the message, and the root cause when it says more; without secrets."""
    line = f"{type(error).__name__}: {error}"
    cause = error.__cause__
    if cause is not None and str(cause) not in line:
        line += f" (caused by {type(cause).__name__}: {cause})"
    return shown_text(line)


class StatusBoard:
    """Made and used on one event loop. ``told`` is given the status after every change."""

    def __init__(
        self, told: Optional[Callable[[dict[str, Any]], object]] = None, **initial: Any
    ) -> None:
        self._told = told
        self._values: dict[str, Any] = {"state": "starting", "message": "", **initial}
        self._version = 1
        self._started = time.monotonic()
        self._changes = Changes()

    @property
    def values(self) -> dict[str, Any]:
        elapsed = round(time.monotonic() - self._started, 1)
        return {**self._values, "elapsed_s": elapsed, "version": self._version}

    @property
    def state(self) -> str:
        return self._values["state"]

    async def update(self, **changes: Any) -> None:
        if all(self._values.get(key) == value for key, value in changes.items()):
            return
        self._values.update(changes)
        self._version += 1
        self._changes.notify()
        if self._told is not None:
            self._told(self._values)

    async def wait(self, seen: int, timeout_s: float) -> dict[str, Any]:
        """The status as soon as its version exceeds ``seen``, or after ``timeout_s``."""
        await self._changes.until(lambda: self._version > seen, timeout_s)
        return self.values


class Reporter:
    """Samples the parts of ``stage`` every half second into ``board``, and watches the accounts.

    A status shows numbers of one moment of the parts themselves (nothing is counted here).
    Accounts that stay out of balance stop the stage: one look may fall between two steps of a
    commit, but numbers that are wrong and do not move for ten seconds are a loss.
    """

    def __init__(self, stage: StageRunner, board: StatusBoard) -> None:
        self.stage = stage
        self.board = board
        self._task: Optional[asyncio.Task[None]] = None
        self._unbalanced: Optional[Accounts] = None
        self._unbalanced_since = 0.0
        self._engines = EngineWatch()
        # fails when the accounts are wrong for good
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def close(self) -> None:
        if self._task is not None:
            await ended([self._task])
        self.stage.events.end(self._engines.states(self.stage))

    async def _loop(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("the status could not be refreshed")
            await asyncio.sleep(PERIOD_S)

    async def refresh(self) -> None:
        """Put the status keys of the moment (see docs/architecture.md) on the board."""
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
        await self.board.update(**seen)
        if news := self._engines.look(stage):
            stage.events.engines(news)
        accounts = await stage.accounts()
        if accounts is not None:
            await self.board.update(accounts=accounts.as_dict())
            self._watch(accounts)

    def _watch(self, accounts: Accounts) -> None:
        now = asyncio.get_running_loop().time()
        if not accounts.errors():
            self._unbalanced = None
        elif accounts != self._unbalanced:
            self._unbalanced, self._unbalanced_since = accounts, now
        elif now - self._unbalanced_since > IMBALANCE_S and not self.failed.done():
            self.failed.set_exception(AccountsError("; ".join(accounts.errors())))

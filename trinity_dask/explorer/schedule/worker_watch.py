"""Asks every worker how late its event loop runs and what its runners are doing.

Invariant: a worker that does not answer in time costs one warning and a lag that says so,
never the others' answers, and its last known state stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from distributed import Client

from trinity_dask.aio import ended
from trinity_dask.cluster.loop_watch import OP, WARN_S
from trinity_dask.cluster.placement import scheduler_of
from trinity_dask.cluster.rpc import ActorHandle, ActorLost, exchange

log = logging.getLogger("trinity_dask.watch")

LAG_PERIOD_S = 2.0
ANSWER_S = 2.0
IDENTITY_S = 60.0
METRIC = "explorer/loop_lag_s"


@dataclass
class _Worker:
    """What is known of one worker; ``asked`` is when it last answered."""

    lag_s: float = 0.0
    asked: float = 0.0
    told: bool = False


class WorkerWatch:
    """Polls the workers of ``client`` (used on its event loop) until :meth:`stop`.

    Every ``interval_s`` the states of the runners are fetched and given to ``learn`` (0:
    never); loop lags are looked at in any case, at least every two seconds.
    """

    def __init__(
        self, client: Client, interval_s: float, learn: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        self._client = client
        self._interval_s = interval_s
        self._learn = learn
        self._workers: dict[str, _Worker] = {}
        self._worst: dict[str, float] = {}  # since the last take
        self._fetched = 0.0
        self._task: Optional[asyncio.Task[None]] = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._loop())

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await ended([task])

    # what it knows ----------------------------------------------------------------------
    def take_lag(self) -> dict[str, float]:
        """``explorer/loop_lag_s``: the longest delay of any event loop since the last call.

        The Dask scheduler counts as well. Empty when nobody was asked meanwhile.
        """
        worst, self._worst = self._worst, {}
        return {METRIC: round(max(worst.values()), 3)} if worst else {}

    def lags(self) -> dict[str, float]:
        """The last lag of every worker, and of the scheduler, in seconds."""
        return {name: worker.lag_s for name, worker in self._workers.items()}

    # asking -----------------------------------------------------------------------------
    async def _loop(self) -> None:
        period = min(self._interval_s or LAG_PERIOD_S, LAG_PERIOD_S)
        while True:
            try:
                await self.look()
            except (OSError, RuntimeError) as error:  # a time-out is an OSError
                log.warning("the workers could not be asked for their state: %s", error)
            await asyncio.sleep(period)

    async def look(self) -> None:
        """Ask everybody once; the time that the scheduler takes to say who there is is its lag."""
        now = time.monotonic()
        full = self._interval_s > 0 and now - self._fetched >= self._interval_s
        if full:
            self._fetched = now
        started = time.monotonic()
        async with asyncio.timeout(IDENTITY_S):
            identity = await scheduler_of(self._client).identity(n_workers=-1)
        self._note("scheduler", time.monotonic() - started)
        workers = {str(info["name"]): address for address, info in identity["workers"].items()}
        for name in self._workers.keys() - {*workers, "scheduler"}:
            del self._workers[name]
        await asyncio.gather(*(self._ask(name, at, full) for name, at in workers.items()))

    async def _ask(self, name: str, address: str, full: bool) -> None:
        worker = self._workers.setdefault(name, _Worker())
        started = time.monotonic()
        since = worker.asked or started - LAG_PERIOD_S
        message = {"op": OP, "window_s": started - since, "full": full}
        handle = ActorHandle("watch", address, name)
        try:
            async with asyncio.timeout(ANSWER_S):
                reply = await exchange(self._client.rpc, handle, "watch", ANSWER_S, message)
        except TimeoutError:
            self._note(name, time.monotonic() - since)
            return
        except ActorLost:
            return  # gone, or going: its supervisor deals with that
        if not isinstance(reply, dict):
            return  # a worker that has no watch yet
        worker.asked = started
        self._note(name, float(reply["loop_lag_s"]))
        if reply.get("runners"):
            self._learn([{**state, "worker": name} for state in reply["runners"]])

    def _note(self, name: str, lag_s: float) -> None:
        worker = self._workers.setdefault(name, _Worker())
        worker.lag_s = lag_s
        self._worst[name] = max(self._worst.get(name, 0.0), lag_s)
        if lag_s > WARN_S and not worker.told:
            log.warning(
                "the event loop of %s is late by %.1f s; nothing else can happen there "
                "meanwhile (log/%s.log names the code)",
                name,
                lag_s,
                name,
            )
        worker.told = lag_s > WARN_S

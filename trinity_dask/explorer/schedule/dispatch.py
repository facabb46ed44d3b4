"""The scheduler's hands: one Dask future for each attempt that is out.

Invariant: nothing here polls. A finished future is announced at once, so that its lane is
given away while its payload is still being fetched; payloads are fetched worker by worker,
all that are ready in one go, so that a dead worker delays nobody else's. As many futures
are held as attempts are out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from distributed import Client, Future, KilledWorker

from trinity_dask.cluster.slots import slot_resource
from trinity_dask.explorer.rollout.subtask import SubTaskSpec, run_subtask
from trinity_dask.explorer.schedule.outcome import Outcome, RunError
from trinity_dask.explorer.schedule.state import WORKER_LOST

log = logging.getLogger("trinity_dask.scheduler")

GATHER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Job:
    """An attempt to be executed at a place (a slot) that belongs to a group of workers."""

    attempt_id: int
    key: str
    spec: SubTaskSpec
    place: str
    group: str


@dataclass(frozen=True)
class Report:
    """How an attempt came back: with an outcome and its payload, or with an error."""

    attempt_id: int
    outcome: Optional[Outcome] = None
    payload: Optional[bytes] = None
    error: Optional[RunError] = None


@dataclass
class _Out:
    future: Future
    place: str
    watcher: asyncio.Task[None]


class Dispatcher:
    """Submits and cancels attempts, and hands their reports over.

    ``on_ended(attempt_ids)`` is called when attempts have left their workers,
    ``on_reports(reports)`` when what they returned is here, ``on_failure(error)`` when
    results cannot be collected any more. All on the event loop.
    """

    def __init__(
        self,
        client: Client,
        on_ended: Callable[[list[int]], None],
        on_reports: Callable[[list[Report]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._client = client
        self._on_ended = on_ended
        self._on_reports = on_reports
        self._on_failure = on_failure
        self._out: dict[int, _Out] = {}
        self._ended: list[int] = []
        self._to_fetch: dict[str, list[int]] = {}
        self._fetchers: dict[str, asyncio.Task[None]] = {}
        self._cancelling: set[asyncio.Future[None]] = set()

    def submit(self, jobs: Sequence[Job]) -> None:
        """All of a place at once: one graph costs the Dask scheduler less than many."""
        by_place: dict[tuple[str, str], list[Job]] = {}
        for job in jobs:
            by_place.setdefault((job.place, job.group), []).append(job)
        loop = asyncio.get_running_loop()
        for (place, group), some in by_place.items():
            futures = self._client.map(
                run_subtask,
                [job.spec for job in some],
                key=[job.key for job in some],
                resources={slot_resource(place): 1, group: 1},
                pure=False,
                priority=0,
            )
            for job, future in zip(some, futures, strict=True):
                watcher = loop.create_task(self._watch(job.attempt_id, future))
                self._out[job.attempt_id] = _Out(future, place, watcher)

    def cancel(self, attempt_ids: Sequence[int]) -> None:
        """Stop attempts; nothing is reported of them any more."""
        outs = [out for a in attempt_ids if (out := self._out.pop(a, None)) is not None]
        for out in outs:
            out.watcher.cancel()
        if outs:
            futures = [out.future for out in outs]
            cancelling = asyncio.ensure_future(self._client.cancel(futures, asynchronous=True))
            self._cancelling.add(cancelling)
            cancelling.add_done_callback(self._cancelled)

    def keys_by_place(self, attempt_ids: Sequence[int]) -> dict[str, list[str]]:
        """Dask keys of attempts that are out."""
        found: dict[str, list[str]] = {}
        for attempt_id in attempt_ids:
            out = self._out.get(attempt_id)
            if out is not None:
                found.setdefault(out.place, []).append(str(out.future.key))
        return found

    async def close(self) -> None:
        """Cancel everything and wait until nothing of this is left on the loop."""
        self.cancel(list(self._out))
        for fetcher in self._fetchers.values():
            fetcher.cancel()
        await asyncio.gather(*self._fetchers.values(), *self._cancelling, return_exceptions=True)
        self._fetchers.clear()
        self._to_fetch.clear()
        self._ended.clear()

    # ----------------------------------------------------------------------------------
    def _cancelled(self, cancelling: asyncio.Future[None]) -> None:
        self._cancelling.discard(cancelling)
        if not cancelling.cancelled() and (error := cancelling.exception()) is not None:
            log.warning("attempts could not be cancelled: %s", error)

    async def _watch(self, attempt_id: int, future: Future) -> None:
        # not distributed.wait: that costs a timer and three tasks for each future
        assert future._state is not None
        await future._state.wait()
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._announce)
        self._ended.append(attempt_id)

    def _announce(self) -> None:
        """What ended in this turn of the loop, together."""
        ended, self._ended = self._ended, []
        ended = [a for a in ended if a in self._out]
        for attempt_id in ended:
            place = self._out[attempt_id].place
            self._to_fetch.setdefault(place, []).append(attempt_id)
            if place not in self._fetchers:
                fetcher = asyncio.ensure_future(self._fetch_from(place))
                self._fetchers[place] = fetcher
        self._on_ended(ended)

    async def _fetch_from(self, place: str) -> None:
        try:
            while ready := self._to_fetch.pop(place, []):
                await self._fetch_some([a for a in ready if a in self._out])
        except Exception as error:
            log.exception("results of rollouts cannot be collected any more")
            self._on_failure(error)
        finally:
            self._fetchers.pop(place, None)

    async def _fetch_some(self, attempt_ids: Sequence[int]) -> None:
        futures = {a: self._out[a].future for a in attempt_ids}
        payloads = await self._gather({a: f for a, f in futures.items() if f.status == "finished"})
        reports = []
        for attempt_id, future in futures.items():
            if self._out.pop(attempt_id, None) is not None:  # else cancelled meanwhile
                reports.append(await _report(attempt_id, future, payloads.get(attempt_id)))
        self._on_reports(reports)

    async def _gather(self, futures: dict[int, Future]) -> dict[int, Any]:
        """Payloads of finished futures; one that was lost meanwhile is missing."""
        if not futures:
            return {}
        try:
            async with asyncio.timeout(GATHER_TIMEOUT_S):
                return await self._client.gather(
                    futures, errors="skip", direct=True, asynchronous=True
                )
        except (TimeoutError, OSError) as error:
            log.warning("%d results could not be fetched: %s", len(futures), error)
            return {}


async def _report(attempt_id: int, future: Future, payload: Optional[bytes]) -> Report:
    if payload is None:
        return Report(attempt_id, error=await _error_of(future))
    return Report(attempt_id, Outcome.of_payload(payload), payload)


async def _error_of(future: Future) -> RunError:
    """Why a future has no result."""
    if future.status == "error":
        error = await future.exception()
        kind = WORKER_LOST if isinstance(error, (KilledWorker, OSError)) else type(error).__name__
        return RunError(kind, f"{type(error).__name__}: {error}")
    return RunError(WORKER_LOST, f"its Dask task is {future.status}")

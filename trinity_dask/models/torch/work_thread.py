"""One thread that works on batches of requests and, between them, on single calls.

Invariant: every submitted request and call ends: with its result, with the error that its
batch raised, or with an error when the thread is closed. Calls overtake waiting requests
but never interrupt a batch. Results go back to each caller's event loop, one wake-up per
loop and batch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Req = TypeVar("Req")
Res = TypeVar("Res")

CLOSE_TIMEOUT_S = 10.0
# requests that belong together arrive within a moment; a pause this long ends the wait
QUIET_S = 0.002
LINGER_S = 0.05  # the longest wait for more requests


@dataclass
class _Waiter:
    """Where the result of one request or call goes."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class WorkThread(Generic[Req, Res]):
    """Runs ``process(requests) -> results`` (same order) on batches of waiting requests.

    A batch takes requests in order while their weights sum to at most ``max_weight``; it
    always takes at least one.
    """

    def __init__(
        self,
        name: str,
        process: Callable[[list[Req]], list[Res]],
        max_weight: int,
        weight: Callable[[Req], int],
    ) -> None:
        self._process = process
        self._max_weight = max_weight
        self._weight = weight
        self._requests: deque[tuple[Req, _Waiter]] = deque()
        self._calls: deque[tuple[Callable[[], Any], _Waiter]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.running = 0  # requests in the batch that is being processed

    @property
    def waiting(self) -> int:
        return len(self._requests)

    def start(self) -> None:
        self._thread.start()

    async def submit(self, request: Req) -> Res:
        """Have ``request`` processed in the next batch that has room."""
        return await self._enqueue(self._requests, request)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` in the thread as soon as the current batch is done."""
        return await self._enqueue(self._calls, function)

    async def close(self) -> None:
        """End the thread after its current batch; everything that waits fails."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        self._fail_waiting()

    async def _enqueue(self, queue: deque[Any], item: Any) -> Any:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop, loop.create_future())
        with self._wake:
            if self._closed:
                raise RuntimeError(f"{self._thread.name} is closed")
            queue.append((item, waiter))
            self._wake.notify()
        return await waiter.future

    # in the thread ----------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._calls or self._requests)
                if self._closed:
                    break
                call = self._calls.popleft() if self._calls else None
            if call is None:
                self._run_batch()
                continue
            function, waiter = call
            try:
                result = function()
            except Exception as error:
                _deliver([(waiter, None, error)])
            else:
                _deliver([(waiter, result, None)])
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        with self._wake:
            waiters = [waiter for _, waiter in (*self._requests, *self._calls)]
            self._requests.clear()
            self._calls.clear()
        error = RuntimeError(f"{self._thread.name} was closed while the request waited")
        _deliver([(waiter, None, error) for waiter in waiters])

    def _run_batch(self) -> None:
        batch = self._take_batch()
        if not batch:
            return
        self.running = len(batch)
        try:
            results = self._process([request for request, _ in batch])
        except Exception as error:
            _deliver([(waiter, None, error) for _, waiter in batch])
        else:
            pairs = zip(batch, results, strict=True)
            _deliver([(waiter, result, None) for (_, waiter), result in pairs])
        finally:
            self.running = 0

    def _take_batch(self) -> list[tuple[Req, _Waiter]]:
        """The next batch, after a moment for requests that are just arriving."""
        batch: list[tuple[Req, _Waiter]] = []
        weight = 0
        end = time.monotonic() + LINGER_S
        with self._wake:
            while True:
                while self._requests and self._fits(batch, weight):
                    request, waiter = self._requests.popleft()
                    if not waiter.future.cancelled():
                        weight += self._weight(request)
                        batch.append((request, waiter))
                full = bool(self._requests) or weight >= self._max_weight
                if full or self._closed or self._calls or time.monotonic() >= end:
                    break
                if not self._wake.wait(QUIET_S):
                    break
        return batch

    def _fits(self, batch: list[Any], weight: int) -> bool:
        return not batch or weight + self._weight(self._requests[0][0]) <= self._max_weight


def _deliver(outcomes: list[tuple[_Waiter, Any, BaseException | None]]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Waiter, Any, Any]]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, mine in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, mine)


def _settle(outcomes: list[tuple[_Waiter, Any, BaseException | None]]) -> None:
    for waiter, result, error in outcomes:
        if waiter.future.done():
            continue  # its caller was cancelled
        if error is None:
            waiter.future.set_result(result)
        else:
            waiter.future.set_exception(error)

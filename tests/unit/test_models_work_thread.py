"""Everything that is handed to the thread comes back, in batches that respect the limit."""

import asyncio
import threading

import pytest
from models_support import run

from trinity_dask.models.torch import work_thread
from trinity_dask.models.torch.work_thread import WorkThread


def make(process, max_weight=4) -> WorkThread:
    thread = WorkThread("test", process, max_weight=max_weight, weight=lambda request: request)
    thread.start()
    return thread


def test_results_keep_their_requests_and_batches_their_limit():
    batches = []

    def process(requests):
        batches.append(list(requests))
        return [10 * request for request in requests]

    async def main():
        thread = make(process)
        requests = [1, 2, 3, 1, 9, 1, 1, 1]
        results = await asyncio.gather(*(thread.submit(r) for r in requests))
        await thread.close()
        assert results == [10 * r for r in requests]

    run(main())
    assert [r for batch in batches for r in batch] == [1, 2, 3, 1, 9, 1, 1, 1]
    assert all(sum(batch) <= 4 or len(batch) == 1 for batch in batches)


def test_requests_that_come_one_after_another_become_one_batch(monkeypatch):
    """However many they are: each waits for the next one, until the longest wait is over."""
    monkeypatch.setattr(work_thread, "QUIET_S", 5.0)
    monkeypatch.setattr(work_thread, "LINGER_S", 60.0)
    batches = []

    def process(requests):
        batches.append(len(requests))
        return requests

    async def main():
        thread = make(process, max_weight=40)
        tasks = []
        for _ in range(40):  # the last one fills the batch
            tasks.append(asyncio.ensure_future(thread.submit(1)))
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        await thread.close()

    run(main())
    assert batches == [40]


def test_an_error_reaches_every_request_of_its_batch_and_no_other():
    def process(requests):
        if 2 in requests:
            raise ValueError("batch with a 2")
        return requests

    async def main():
        thread = make(process, max_weight=2)
        results = await asyncio.gather(
            *(thread.submit(r) for r in (2, 1, 1)), return_exceptions=True
        )
        await thread.close()
        assert isinstance(results[0], ValueError)
        assert results[1:] == [1, 1]

    run(main())


def test_calls_overtake_waiting_requests():
    order = []
    gate = threading.Event()

    def process(requests):
        gate.wait(30)
        order.extend(requests)
        return requests

    async def main():
        thread = make(process, max_weight=1)
        first = asyncio.create_task(thread.submit(1))
        while not thread.running:
            await asyncio.sleep(0.001)
        rest = [asyncio.create_task(thread.submit(1)), asyncio.create_task(thread.submit(1))]
        call = asyncio.create_task(thread.call(lambda: order.append("call")))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, call, *rest)
        await thread.close()

    run(main())
    assert order == [1, "call", 1, 1]


def test_closing_fails_what_waits_and_what_comes():
    gate = threading.Event()

    def process(requests):
        gate.wait(30)
        return requests

    async def main():
        thread = make(process, max_weight=1)
        running = asyncio.create_task(thread.submit(1))
        while not thread.running:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(thread.submit(1))
        await asyncio.sleep(0)
        closing = asyncio.create_task(thread.close())
        await asyncio.sleep(0)
        gate.set()
        await closing
        assert await running == 1
        with pytest.raises(RuntimeError, match="closed"):
            await waiting
        with pytest.raises(RuntimeError, match="closed"):
            await thread.submit(1)

    run(main())


def test_errors_of_calls_are_raised_to_their_caller():
    async def main():
        thread = make(lambda requests: requests)
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda: 1 / 0)
        assert await thread.submit(1) == 1
        await thread.close()

    run(main())

"""The one way of waiting: by event, failure or deadline, with nothing left behind."""

import asyncio
import time

import pytest

from trinity_dask.aio import Background, Changes, all_or_first_error, ended, retry


def test_a_waiter_is_woken_by_a_change_that_made_its_condition_true():
    async def main():
        changes, seen = Changes(), []
        waiting = asyncio.ensure_future(changes.until(lambda: len(seen) == 2, timeout_s=60))
        for _ in range(2):
            await asyncio.sleep(0)
            assert not waiting.done()
            seen.append(1)
            changes.notify()
        return await waiting

    assert asyncio.run(main()) is True


def test_a_wait_ends_at_its_deadline_and_leaves_no_waiter():
    async def main():
        changes = Changes()
        start = time.monotonic()
        assert await changes.until(lambda: False, timeout_s=0.05) is False
        assert 0.04 < time.monotonic() - start < 10
        assert not changes._waiters
        assert await changes.until(lambda: True, timeout_s=0.0) is True

    asyncio.run(main())


def test_a_condition_that_announces_no_change_is_asked_again():
    async def main():
        due = time.monotonic() + 0.05
        return await Changes().until(lambda: time.monotonic() > due, 60, recheck_s=0.01)

    assert asyncio.run(main()) is True


def test_a_failure_ends_every_wait_now_and_later_and_the_first_counts():
    async def main():
        changes = Changes()
        waits = [asyncio.ensure_future(changes.until(lambda: False)) for _ in range(3)]
        await asyncio.sleep(0)
        changes.fail(KeyError("first"))
        changes.fail(ValueError("second"))
        found = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(error) for error in found] == [KeyError] * 3
        with pytest.raises(KeyError):
            await changes.until(lambda: True)

    asyncio.run(main())


def test_a_cancelled_wait_is_cancelled_even_while_it_is_notified():
    async def main():
        changes = Changes()
        waiting = asyncio.ensure_future(changes.until(lambda: False, timeout_s=60))
        await asyncio.sleep(0)
        changes.notify()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())


def test_the_first_error_ends_the_others_before_it_is_raised():
    over = []

    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            over.append("slow")

    async def bad():
        await asyncio.sleep(0)
        raise ValueError("the reason")

    async def main():
        with pytest.raises(ValueError, match="the reason"):
            await all_or_first_error(slow(), bad())
        assert over == ["slow"]
        return await all_or_first_error(asyncio.sleep(0.01, "a"), asyncio.sleep(0, "b"))

    assert asyncio.run(main()) == ["a", "b"]


def test_retry_counts_attempts_and_never_repeats_a_final_error():
    async def main():
        calls, betweens = [], []

        async def once():
            calls.append(1)
            if len(calls) < 3:
                raise OSError("not yet")
            return "done"

        async def between():
            betweens.append(len(calls))

        assert await retry(once, 3, "it", between=between) == "done"
        assert betweens == [1, 2]
        calls.clear()
        with pytest.raises(OSError, match="not yet"):
            await retry(once, 2, "it")
        calls.clear()
        with pytest.raises(OSError, match="not yet"):
            await retry(once, 3, "it", final=(OSError,))
        assert len(calls) == 1

    asyncio.run(main())


def test_background_work_is_logged_when_it_fails_and_ended_when_it_is_closed(caplog):
    async def main():
        background, over = Background("the side work"), []

        async def bad():
            raise ValueError("broken")

        async def long():
            try:
                await asyncio.sleep(60)
            finally:
                over.append(1)

        await asyncio.wait([background.start(bad())])
        background.start(long())
        await asyncio.sleep(0)
        assert len(background) == 1
        await background.close()
        assert over == [1]
        assert len(background) == 0
        await ended([])

    asyncio.run(main())
    assert "the side work: ValueError: broken" in caplog.text

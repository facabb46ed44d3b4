"""Calls in helper processes: their values, their errors, and their end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from trinity_dask.rewards import process
from trinity_dask.rewards.process import HelperDied, Helpers, ProcessCallError
from trinity_dask.workflows import scoring
from trinity_dask.workflows.scoring import Reward, RewardError, score_all
from trinity_dask.workflows.threads import run_in_thread


@pytest.fixture
def helpers():
    helpers = Helpers(1)
    yield helpers
    helpers.close()


def test_a_call_returns_its_value_and_the_helper_is_used_again(helpers):
    pids = [helpers.call("os:getpid", ()) for _ in range(2)]
    assert len(set(pids)) == 1
    assert helpers.call("math:hypot", (3, 4)) == 5.0


def test_fault_10_an_error_comes_back_and_a_death_is_one(helpers):
    with pytest.raises(ProcessCallError, match=r"ValueError: .*domain"):
        helpers.call("math:sqrt", (-1,))
    with pytest.raises(ProcessCallError, match="ModuleNotFoundError"):
        helpers.call("no_such_module:f", ())
    pid = helpers.call("os:getpid", ())
    with pytest.raises(ProcessCallError, match="the helper process of os:_exit died"):
        helpers.call("os:_exit", (3,))
    assert helpers.call("os:getpid", ()) != pid


def test_fault_10_a_call_that_never_returns_is_killed_at_its_deadline(helpers):
    pid = helpers.call("os:getpid", ())
    with pytest.raises(TimeoutError, match=r"did not return within 0\.5 s"):
        helpers.call("time:sleep", (600,), 0.5)
    assert helpers.call("os:getpid", ()) != pid


def test_whoever_is_interrupted_in_a_call_leaves_no_helper_behind_that_is_busy(helpers):
    async def main():
        with pytest.raises(TimeoutError):
            await run_in_thread(helpers.call, "time:sleep", (600,), timeout_s=0.5)

    pid = helpers.call("os:getpid", ())
    asyncio.run(main())
    assert helpers.call("os:getpid", ()) != pid


def test_calls_wait_for_a_helper(helpers):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: helpers.call("math:sqrt", (n * n,)), range(4)))
    assert found == [0.0, 1.0, 2.0, 3.0]


LIBRARY = "trinity_dask.rewards.library:equal_by_library"


def test_the_library_has_its_time_limits_in_a_helper(helpers):
    """They need SIGALRM, and so the main thread of a process."""
    failed: list[object] = []

    def compare():
        failed.append(helpers.call(LIBRARY, ("1/2", "0.5", 5)))
        failed.append(helpers.call(LIBRARY, ("1/3", "0.5", 5)))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join(120)
    assert failed == [True, False]


def test_fault_10_an_answer_that_cannot_be_computed_ends_and_the_next_one_works(helpers):
    """Python's integer power is one long C call, which no thread can be interrupted in."""
    with suppress(TimeoutError, ProcessCallError):
        assert helpers.call(LIBRARY, ("9^{9^{9^{9}}}", "3", 1), 10.0) is False
    assert helpers.call(LIBRARY, ("1/2", "0.5", 5))


def test_a_death_in_a_call_is_told_from_one_before_it(helpers):
    with pytest.raises(HelperDied):
        helpers.call("os:_exit", (3,))
    with pytest.raises(ProcessCallError) as failure:
        helpers.call("math:sqrt", (4,), first=("os:_exit", (3,)))
    assert not isinstance(failure.value, HelperDied)


def test_a_helper_that_was_killed_while_free_is_replaced(helpers):
    pid = helpers.call("os:getpid", ())
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while helpers._free[0].alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert helpers.call("os:getpid", ()) != pid
    assert helpers.count == 1


def test_what_is_called_first_is_called_once_in_every_helper(helpers, tmp_path):
    for _ in range(3):
        assert helpers.call("os:getcwd", (), first=("os:makedirs", (str(tmp_path / "made"),)))
    assert (tmp_path / "made").is_dir()


SLOW = "import time\ndef slow(response):\n    time.sleep(float(response))\n    return 1.0\n"


def scores_at_once(monkeypatch, tmp_path, helpers, responses, timeout_s):
    """One score of each group of one answer, all groups at the same time."""
    monkeypatch.setattr(scoring, "call_in_process", helpers.call)
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    reward = Reward.load(f"{file}:slow", {}, in_process=True)

    async def main():
        groups = [score_all(reward, [{"response": r}], timeout_s) for r in responses]
        return [score for (score,) in await asyncio.gather(*groups)]

    return asyncio.run(main())


def test_eight_healthy_rewards_that_wait_for_one_helper_all_succeed(monkeypatch, tmp_path, helpers):
    """In turn they take eight seconds, twice the limit of each."""
    found = scores_at_once(monkeypatch, tmp_path, helpers, ["1.0"] * 8, timeout_s=4.0)
    assert found == [{"reward": 1.0}] * 8
    assert helpers.count == 1


def test_async_rewards_that_wait_for_a_helper_in_threads_all_succeed(helpers):
    """In turn they take five seconds, twice the limit of each."""
    helpers.call("os:getpid", ())

    async def slow(response):
        two = (asyncio.to_thread(helpers.call, "time:sleep", (s,)) for s in (response, 0.0))
        await asyncio.gather(*two)
        return 1.0

    facts = [{"response": 1.0}] * 5
    found = asyncio.run(score_all(Reward("slow", slow, {}), facts, timeout_s=2.5))
    assert found == [{"reward": 1.0}] * 5


def test_a_stuck_reward_costs_itself_and_not_those_that_wait_behind_it(
    monkeypatch, tmp_path, helpers
):
    found = scores_at_once(monkeypatch, tmp_path, helpers, ["600", "0", "0"], timeout_s=3.0)
    assert isinstance(found[0], RewardError)
    assert found[1:] == [{"reward": 1.0}] * 2


def test_helpers_become_more_while_calls_wait_and_fewer_afterwards(monkeypatch):
    monkeypatch.setattr(process, "GROW_AFTER_S", 0.1)
    helpers = Helpers(1, most=3)
    seen: list[int] = []

    def sleep(_):
        helpers.call("time:sleep", (2.0,))
        seen.append(helpers.count)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sleep, range(8)))
    helpers.call("time:sleep", (0,))
    assert 1 < max(seen) <= 3
    assert helpers.count == 1
    helpers.close()


def test_nobody_waits_for_ever_where_nothing_moves(monkeypatch, helpers):
    monkeypatch.setattr(process, "STALLED_S", 1.0)
    helpers.call("os:getpid", ())
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(helpers.call, "time:sleep", (6.0,))
        while helpers._free:
            time.sleep(0.01)
        with pytest.raises(TimeoutError, match="no helper process was free"):
            helpers.call("os:getpid", ())
        busy.result()


def test_a_reward_in_a_process_sees_its_facts_and_is_killed_at_its_deadline(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os, time\n"
        "def mine(response, truth, bonus=0.0):\n"
        "    if response == 'stuck':\n"
        "        time.sleep(600)\n"
        "    return {'same': response == truth, 'bonus': bonus, 'pid': os.getpid()}\n"
    )
    reward = Reward.load(f"{file}:mine", {"bonus": 0.5}, in_process=True)

    def scores(*responses, timeout_s):
        facts = [{"response": r, "truth": "a", "raw_task": {}} for r in responses]
        return asyncio.run(score_all(reward, facts, timeout_s))

    one, two = scores("a", "b", timeout_s=90.0)
    assert (one["same"], one["bonus"], two["same"]) == (1.0, 0.5, 0.0)
    (late,) = scores("stuck", timeout_s=1.0)
    assert isinstance(late, RewardError)
    (again,) = scores("a", timeout_s=90.0)
    assert again["pid"] != one["pid"] == two["pid"]

"""Calls in helper processes: their values, their errors, and their end."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trinity_dask.rewards.math import equal_here
from trinity_dask.rewards.process import Helpers, ProcessCallError
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


def test_signals_work_in_a_helper_though_not_in_this_thread(helpers):
    """What SIGALRM needs is the main thread of a process."""
    failed: list[object] = []

    def compare():
        with pytest.raises(ValueError, match="signal"):
            equal_here("1/2", "0.5")
        failed.append(helpers.call("trinity_dask.rewards.math:equal_here", ("1/2", "0.5")))
        failed.append(helpers.call("trinity_dask.rewards.math:equal_here", ("1/3", "0.5")))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join(120)
    assert failed == [True, False]


def test_fault_10_an_answer_that_cannot_be_computed_is_an_error_and_the_next_one_works(helpers):
    """Python's integer power is one long C call, which no thread can be interrupted in."""
    target = "trinity_dask.rewards.math:equal_here"
    with pytest.raises((TimeoutError, ProcessCallError)):
        helpers.call(target, ("9^{9^{9^{9}}}", "3", 1), 10.0)
    assert helpers.call(target, ("1/2", "0.5"))


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

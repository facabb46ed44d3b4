"""Rewards that misbehave cost the answer they misbehave on, and nothing else."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from trinity_dask.demo.tokenizer import ascii_tokenizer
from trinity_dask.experience import Experience
from trinity_dask.rewards import REWARD_FUNCTIONS
from trinity_dask.workflows import Task
from trinity_dask.workflows.scoring import Reward, RewardError, score_all
from trinity_dask.workflows.simple import SimpleWorkflow
from trinity_dask.workflows.threads import run_in_thread


def facts(*responses):
    return [
        {"response": r, "truth": "t", "prompt": "p", "finish_reason": "stop"} for r in responses
    ]


def score(fn, *responses, timeout_s=30.0, args=None):
    reward = Reward("mine", fn, args or {})
    return asyncio.run(score_all(reward, facts(*responses), timeout_s))


def test_a_reward_gets_what_it_names_and_its_fixed_arguments():
    def mine(response, truth, bonus=0.0):
        return len(response) + bonus

    assert score(mine, "ab", args={"bonus": 0.5}) == [{"reward": 2.5}]


def test_a_reward_with_kwargs_gets_everything():
    assert score(
        lambda **f: float(sorted(f) == ["finish_reason", "prompt", "response", "truth"]), "a"
    ) == [{"reward": 1.0}]


def test_a_class_is_made_once_with_its_arguments():
    class Mine:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, response, **_):
            return {"length": len(response) * self.scale, "flag": True}

    assert score(Mine, "abc", args={"scale": 2}) == [{"length": 6.0, "flag": 1.0}]


def test_numpy_numbers_are_numbers():
    assert score(lambda response: np.float32(0.5), "a") == [{"reward": 0.5}]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", {}, {"a": None}, [1]])
def test_fault_10_no_number_is_an_error_and_never_zero(value):
    (found,) = score(lambda response: value, "a")
    assert isinstance(found, RewardError)


def test_fault_10_a_raising_reward_costs_its_own_answer():
    def mine(response):
        return 1 / (len(response) - 1)

    one, two, three = score(mine, "ab", "a", "abc")
    assert (one, three) == ({"reward": 1.0}, {"reward": 0.5})
    assert isinstance(two, ZeroDivisionError)


def test_fault_10_a_reward_that_loops_for_ever_costs_its_own_answer():
    spinning = threading.Event()

    def mine(response):
        while response == "stuck":
            spinning.set()
        return 1.0

    found = score(mine, "a", "stuck", "b", timeout_s=1.0)
    assert spinning.is_set()
    assert found[0] == found[2] == {"reward": 1.0}
    assert isinstance(found[1], RewardError)
    assert "did not return within 1 s" in str(found[1])


def test_fault_10_the_thread_of_an_endless_loop_ends():
    threads = []

    def spin():
        threads.append(threading.current_thread())
        while True:
            pass

    async def main():
        with pytest.raises(TimeoutError, match="did not return within"):
            await run_in_thread(spin, timeout_s=0.3)

    asyncio.run(main())
    threads[0].join(30)
    assert not threads[0].is_alive()


def test_fault_10_a_signal_in_a_thread_is_an_error():
    def mine(response):
        import signal

        signal.signal(signal.SIGALRM, lambda *_: None)
        return 1.0

    (found,) = score(mine, "a")
    assert isinstance(found, RewardError)
    assert "work only in a main thread" in str(found)
    assert "reward_timeout_s" in str(found)


def test_fault_06_a_slow_reward_leaves_the_event_loop_free():
    async def main():
        reward = Reward("slow", lambda response: time.sleep(0.5) or 1.0, {})
        scoring = asyncio.ensure_future(score_all(reward, facts("a")))
        turns = 0
        while not scoring.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns, await scoring

    turns, found = asyncio.run(main())
    assert found == [{"reward": 1.0}]
    assert turns > 5


def test_an_async_reward_is_awaited_and_bounded():
    async def mine(response):
        if response == "stuck":
            await asyncio.Event().wait()
        return 2.0

    one, two = score(mine, "a", "stuck", timeout_s=0.5)
    assert one == {"reward": 2.0}
    assert isinstance(two, RewardError)


def test_a_thread_call_passes_results_and_errors():
    async def main():
        assert await run_in_thread(lambda x: x + 1, 1) == 2
        with pytest.raises(RuntimeError, match="StopIteration"):
            await run_in_thread(lambda: next(iter([])))
        with pytest.raises(RuntimeError, match="SystemExit"):  # it would end the worker
            await run_in_thread(lambda: exit(3))

    asyncio.run(main())


def test_an_exit_in_a_reward_costs_its_answer_and_not_the_worker():
    def leaves(response: str) -> float:
        if response == "bad":
            raise SystemExit(3)
        return 1.0

    async def main():
        good, bad, last = await score_all(
            Reward("leaves", leaves, {}), [{"response": r} for r in ("good", "bad", "good")]
        )
        assert good == last == {"reward": 1.0}
        assert "sys.exit(3)" in str(bad)

    asyncio.run(main())


def test_an_exit_in_an_async_reward_costs_its_answer_and_not_the_worker():
    async def leaves(response: str) -> float:
        if response == "bad":
            raise SystemExit(3)
        return 1.0

    facts = [{"response": r} for r in ("good", "bad", "good")]
    good, bad, last = asyncio.run(score_all(Reward("leaves", leaves, {}), facts))
    assert (good, last) == ({"reward": 1.0}, {"reward": 1.0})
    assert str(bad) == "user code raised SystemExit: 3"


class Wrapper:
    """The tokenizer of a model wrapper; nothing is sampled here."""

    tokenizer = ascii_tokenizer()


def sampled(text):
    """An experience of an answer that ends in the end-of-sequence token."""
    tokenizer = Wrapper.tokenizer
    tokens = [*tokenizer.encode("Q", add_special_tokens=False)]
    tokens += [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return Experience(
        tokens=np.asarray(tokens, np.int32),
        prompt_length=1,
        logprobs=np.zeros(len(tokens) - 1, np.float32),
        response_text=text,
    )


def asks_for_special_tokens(response, response_with_special_tokens):
    return float(len(response_with_special_tokens) - len(response))


def takes_everything(**facts):
    return float("response_with_special_tokens" in facts)


@pytest.mark.parametrize(
    ("fn", "reward"),
    [(asks_for_special_tokens, len(Wrapper.tokenizer.eos_token)), (takes_everything, 0)],
)
def test_special_tokens_reach_the_reward_that_asks_for_them_by_name(fn, reward):
    REWARD_FUNCTIONS.register_module(fn.__name__, force=True)(fn)
    task = Task(
        workflow="simple_workflow",
        raw_task={"prompt": "Q", "response": "7"},
        reward_fn=fn.__name__,
    )
    workflow = SimpleWorkflow(task, Wrapper())
    (parts,) = asyncio.run(workflow.score([sampled("7")]))
    assert parts == {"reward": float(reward)}

"""The built-in rewards, value by value."""

from __future__ import annotations

import threading

import pytest
from timing_support import thread_seconds

from trinity_dask.rewards import REWARD_FUNCTIONS
from trinity_dask.rewards.countdown import countdown_reward
from trinity_dask.rewards.math import math_equal
from trinity_dask.rewards.text import boxed_answer, tagged_answer


@pytest.mark.parametrize(
    ("response", "truth", "total"),
    [
        (r"\boxed{2}", "2", 0.9),
        ("<think> easy </think> <answer> 2 </answer>", "2", 1.1),
        ("<think> easy </think> <answer> 3 </answer>", "2", 0.1),
        ("<answer> 3 </answer>", "2", -0.1),
        (r"\boxed{\frac{40}{400}}", "$\\frac{1}{10}$", 0.9),
        (r"first \boxed{1}, then \boxed{2}", "2", 0.9),
    ],
)
def test_math_reward(response, truth, total):
    parts = REWARD_FUNCTIONS.get("math_reward")()(response=response, truth=truth)
    assert sum(parts.values()) == pytest.approx(total)
    assert set(parts) == {"accuracy", "format_score"}


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [("1/2", "0.5", True), (r"\frac{1}{2}", "0.5", True), ("x+1", "1+x", True), ("2", "3", False)],
)
def test_equality_is_mathematical(answer, truth, equal):
    assert math_equal(answer, truth) is equal


def test_fault_10_the_math_reward_works_outside_the_main_thread():
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(math_equal("1/2", "0.5")))
    thread.start()
    thread.join(60)
    assert found == [True]


def test_format_reward_takes_a_pattern_and_a_score():
    reward = REWARD_FUNCTIONS.get("format_reward")(pattern="^yes", score=0.5)
    assert reward(response="yes!") == {"format_score": 0.5}
    assert reward(response="no, yes") == {"format_score": -0.5}


WELL_FORMED = "<think>1 and 1</think>\n<answer>2</answer>"


@pytest.mark.parametrize(
    ("response", "prompt", "fits"),
    [
        (WELL_FORMED, None, True),
        (WELL_FORMED + " \n", "plain", True),
        ("first " + WELL_FORMED, None, True),
        (WELL_FORMED + " so", None, False),
        ("1 and 1</think><answer>2</answer>", None, False),
        ("1 and 1</think><answer>2</answer>", "Q<think>\n", True),
        (WELL_FORMED, "Q<think>\n", True),
        ("2", "Q<think>\n", False),
        ("<answer>2</answer>", "Q<think>", False),
        ("<think>a</think> so <answer>2</answer>", None, False),
        ("<think>a</think><answer>2", None, False),
        ("<answer>2</answer><think>a</think>", None, False),
        ("<think>a</think><answer></think><answer>2</answer>", None, True),
        ("", None, False),
    ],
)
def test_the_form_of_a_response(response, prompt, fits):
    reward = REWARD_FUNCTIONS.get("format_reward")()
    assert (reward(response=response, prompt=prompt)["format_score"] > 0) is fits


def test_a_pattern_of_ones_own_may_speak_of_the_tag_in_the_prompt_or_not():
    reward = REWARD_FUNCTIONS.get("format_reward")
    assert reward("^yes")(response="yes", prompt="<think>")["format_score"] > 0
    assert reward("^<think>yes")(response="yes", prompt="<think>")["format_score"] > 0


@pytest.mark.parametrize(
    "piece",
    [
        "<think>a</think> <answer>1</answer> ",
        "<think>",
        "</think>" + " " * 20,
        "</think><answer>",
        "<think></think>\n",
    ],
)
def test_the_form_is_judged_in_linear_time(piece):
    reward = REWARD_FUNCTIONS.get("format_reward")()
    response = piece * (500_000 // len(piece)) + "and so"
    assert reward(response=response)["format_score"] < 0
    assert thread_seconds(lambda: reward(response=response), 0.5) < 0.5


@pytest.mark.parametrize(
    ("response", "accuracy"),
    [("2 and 3 make 5", 0.0), ("so</think>5", 1.0), ("<think>5</think>6", 0.0), ("5</think>", 0.0)],
)
def test_a_response_to_a_prompt_that_opens_a_think_block_begins_inside_it(response, accuracy):
    reward = REWARD_FUNCTIONS.get("accuracy_reward")()
    assert reward(response, "5", prompt="2 + 3?<think>\n") == {"accuracy": accuracy}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("no tags", 0.0),
        ("<answer>3 + 7 - 5</answer>", 1.0),
        ("<answer>3 + 7 - 5 = 5</answer>", 1.0),
        ("<answer>3 + 7</answer>", 0.1),  # 5 is not used
        ("<answer>3 + 7 - 5 + 5 - 5</answer>", 0.1),  # 5 is used three times
        ("<answer>5</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer>3 / 0</answer>", 0.1),
        ("<answer>((</answer>", 0.1),
    ],
)
def test_countdown_reward(response, score):
    truth = {"target": 5, "numbers": [3, 5, 7]}
    assert countdown_reward(response=response, truth=truth) == {"score": score}


def test_countdown_names_a_truth_it_cannot_use():
    with pytest.raises(ValueError, match="needs 'target' and 'numbers'"):
        countdown_reward(response="<answer>1</answer>", truth='{"target": 3}')


def test_the_last_answer_counts():
    assert tagged_answer("<answer>1</answer> no, <answer> 2 </answer>") == "2"
    assert boxed_answer(r"\boxed{1} \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed_answer(r"\boxed{1") is None
    assert tagged_answer("none") is None


@pytest.mark.parametrize("name", REWARD_FUNCTIONS.names())
def test_every_name_leads_to_something_callable(name):
    assert callable(REWARD_FUNCTIONS.get(name))

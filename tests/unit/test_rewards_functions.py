"""The built-in rewards, value by value."""

from __future__ import annotations

import threading

import pytest

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

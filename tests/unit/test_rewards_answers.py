"""What is read in an answer, kind by kind, and that no text at all can break it."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from timing_support import thread_seconds

from trinity_dask.rewards import math as rewards_math
from trinity_dask.rewards.answers.comparison import compare
from trinity_dask.rewards.answers.expression import equal, exact, proportion
from trinity_dask.rewards.answers.forms import read
from trinity_dask.rewards.answers.grammar import parse
from trinity_dask.rewards.answers.kinds import Opaque, Text
from trinity_dask.rewards.answers.notation import clean, spelled_numbers
from trinity_dask.rewards.answers.units import parse_unit
from trinity_dask.rewards.math import AccuracyReward, math_equal
from trinity_dask.rewards.text import final_answer, without_thoughts


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (r"\frac{3}{\sqrt{3}}", r"\sqrt3"),
        ("2x(x-3)", "2x^2-6x"),
        (r"\tan x", r"\frac{\sin x}{\cos x}"),
        (r"\log_{10} 1000", "3"),
        (r"0.\overline{142857}", "1/7"),
        ("(2^{3})^2", "64"),
        (r"\frac{7!}{5!}", "42"),
        (r"\sqrt[4]{16}", "2"),
    ],
)
def test_equal_expressions(one, two):
    assert equal(parse(one), parse(two))
    assert equal(parse(two), parse(one))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (r"\frac{1}{7^{80}}", r"\frac{1}{7^{81}}"),
        (r"\sqrt{x^2}", "x"),
        ("x^y", "y^x"),
        ("1/0", "1/0"),
        (r"\infty", r"-\infty"),
        ("9^{9^{9^{9}}}", "9^{9^{9}}"),
        ("1.7320508", r"\sqrt3"),
        ("a_1", "a_2"),
    ],
)
def test_expressions_that_differ(one, two):
    assert not equal(parse(one), parse(two))


@pytest.mark.parametrize("text", ["10^{9^9}", "999999!", "1e400", "2^{2^{2^{2^{2^2}}}}", "3!!!!!!"])
def test_computing_is_bounded(text):
    assert compare(text, "1") is not True
    assert thread_seconds(lambda: compare(text, "1"), 0.05) < 0.05


def test_equations_are_equal_up_to_a_factor():
    left, right = parse("2x - 4y"), parse("2y - x")
    assert proportion(left, right) == pytest.approx(-2)
    assert proportion(parse("x - 1"), parse("x - 2")) is None


def test_rational_values_are_exact():
    assert exact(parse("0.1 + 0.2")) == exact(parse("3/10"))
    assert exact(parse(r"\sqrt{2}")) is None


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("meters per second", "m/s", True),
        ("kg*m/s^2", "kg m s^{-2}", True),
        ("cubic inches", "in^3", True),
        ("liters", "L", True),
        ("days", "h", False),
        ("mi/h", "mph", True),
    ],
)
def test_units_by_any_name(one, two, same):
    left, right = parse_unit(one), parse_unit(two)
    assert left is not None
    assert right is not None
    assert (left == right) is same


def test_a_word_that_is_no_unit_is_none():
    assert parse_unit("bananas") is None
    assert math_equal("6 bananas", "6")


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        (r"\left( 1,\; 2 \right)", "( 1, 2 )"),
        ("８÷２", "8/2"),
        ("$$7$$", "7"),
        (r"\textbf{\text{no}}", "no"),
        ("四百零五", "405"),
        ("一億", "100000000"),
        ("**8**", "8"),
        ("2**8 * 2**8", "2**8 * 2**8"),
    ],
)
def test_dressing_goes_and_meaning_stays(written, plain):
    assert clean(written) == plain


@pytest.mark.parametrize(
    ("words", "digits"),
    [
        ("thirty-one days", "31 days"),
        ("two hundred", "200"),
        ("minus six", "-6"),
        ("four thousand and twelve", "4012"),
        ("three quarters", "3/4"),
        ("tension", "tension"),
    ],
)
def test_numbers_in_words(words, digits):
    assert spelled_numbers(words) == digits


@pytest.mark.parametrize("text", ["state", "No", "tar", "hello world", "abc", "Ann Lee"])
def test_text_stays_text(text):
    assert isinstance(read(text), Text)
    assert compare(text[::-1], text) is False


def test_what_is_not_read_here_is_left_open():
    assert isinstance(read(r"\int_0^1 x dx"), Opaque)
    assert compare(r"\int_0^1 x dx", "0.5") is None


def test_what_is_left_open_is_decided_by_math_verify_in_a_helper():
    assert math_equal(r"\sum_{k=1}^{4} k", "10")
    assert not math_equal(r"\sum_{k=1}^{4} k", "11")


def test_a_library_that_never_returns_says_no(monkeypatch):
    def never(*args, **kwargs):
        raise TimeoutError("too slow")

    monkeypatch.setattr(rewards_math, "call_in_process", never)
    assert not math_equal(r"\int_0^1 x dx", "0.5")


@pytest.mark.parametrize(
    ("response", "prompt", "left"),
    [
        ("<think>a</think>b", None, "b"),
        ("a</think>b", None, "b"),
        ("a", "Q <think>\n", ""),
        ("<think>a</think>b", "Q <think>", "b"),
        ("b<think>a", None, "b"),
        ("<Thinking>a</Thinking>b", None, "b"),
        ("<think>a</think>b<think>c</think>d", None, "b d"),
    ],
)
def test_thoughts_do_not_count(response, prompt, left):
    assert without_thoughts(response, prompt).strip() == left


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{3}, \boxed{4}", "3, 4"),
        (r"\boxed{3}. After a correction of the sum: \boxed{4}", "4"),
        (r"p=\boxed{3}, q=\boxed{4}", "p = 3, q = 4"),
        (r"\boxed{3", None),
        ("<answer>3", None),
        ("<answer>3</answer> <answer></answer>", None),
        ("#### 3\n", "3"),
        ("", None),
    ],
)
def test_the_answer_that_is_found(response, answer):
    found = final_answer(response)
    assert (found and found.text) == answer


def test_a_sentence_that_was_cut_off_holds_no_answer():
    reward = AccuracyReward()
    assert reward("The answer is 12", "12", finish_reason="stop") == {"accuracy": 1.0}
    assert reward("The answer is 12", "12", finish_reason="length") == {"accuracy": 0.0}
    assert reward(r"It is \boxed{12}, because", "12", finish_reason="length") == {"accuracy": 1.0}


@pytest.mark.parametrize("response", [None, 5, b"5", ["5"], 5.0, {"answer": "5"}])
def test_what_is_no_text_earns_nothing(response):
    assert AccuracyReward()(response, "5") == {"accuracy": 0.0}


@pytest.mark.parametrize(
    ("truth", "earned"), [(5, 1.0), (5.0, 1.0), (None, 0.0), (float("nan"), 0.0), ([5], 1.0)]
)
def test_a_truth_may_be_a_number(truth, earned):
    assert AccuracyReward()("<answer>5</answer>", truth) == {"accuracy": earned}


JUNK = {
    "braces": "{" * 100_000,
    "boxes": r"\boxed{" * 14_000,
    "digits": "9" * 100_000,
    "dollars": "$1$ " * 25_000,
    "tags": "<answer>" * 12_000,
    "thoughts": "<think>" * 14_000,
    "spaces": "answer" + " " * 99_000,
    "powers": "9^" * 50_000,
    "superscripts": "²" * 100_000,
    "fractions": r"\frac" * 20_000,
    "sentences": "It is 5. So " * 8_000,
}


@pytest.mark.parametrize(
    "wrapped", ["{}", "<answer>{}</answer>", r"\boxed{{{}}}", "The answer is {}"]
)
@pytest.mark.parametrize("name", JUNK)
def test_a_long_reply_is_judged_in_linear_time(name, wrapped, monkeypatch):
    monkeypatch.setattr(rewards_math, "call_in_process", lambda *args, **kwargs: False)
    reward, response = AccuracyReward(), wrapped.format(JUNK[name])
    assert reward(response, "12345") == {"accuracy": 0.0}
    assert thread_seconds(lambda: reward(response, "12345"), 0.5) < 0.5


PIECES = (
    r"\frac \sqrt \boxed { } ( ) [ ] $ ^ _ , ; : . = < > \leq \cup \pm \infty \text & \\ 1 23 4.5 "
    r".6 \begin{pmatrix} \end{pmatrix} 1e9 x y \pi ! % | km °C <answer> </answer> <think> </think> "
    "#### answer is A (B) 9:00 3:4 √ ² ½ 十 万 分之 July and or not - + * / **"
)
SCRAPS = st.lists(st.sampled_from(PIECES.split()), max_size=25)
TEXTS = st.one_of(st.text(max_size=200), SCRAPS.map(" ".join), SCRAPS.map("".join))


@settings(max_examples=300, deadline=None)
@given(response=TEXTS, truth=TEXTS)
@example(response="<answer>²₀½</answer>", truth="²")
@example(response="\\boxed{\\begin{pmatrix}\\end{pmatrix}}", truth="[[]]")
@example(response="\ud800", truth="0")
def test_any_text_earns_a_finite_number_in_time(response, truth):
    def unexpected(*args, **kwargs):
        raise AssertionError(args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewards_math.log, "warning", unexpected)
        patch.setattr(rewards_math, "call_in_process", lambda *args, **kwargs: False)
        facts = {"response": response, "truth": truth, "prompt": truth}
        parts = rewards_math.MathReward()(**facts)
        assert thread_seconds(lambda: rewards_math.MathReward()(**facts), 0.25) < 0.25
    assert all(math.isfinite(value) for value in parts.values())
    assert parts["accuracy"] in (0.0, 1.0)


@pytest.mark.parametrize(
    "piece",
    ["A, so ", "三", "*", " (abc", "one hundred and ", "[1,2]\\cap ", "I choose ", "<b>", "3 cm ",
     "\\begin{pmatrix}", "leaving ", "half past ", "March 3, "],
)  # fmt: skip
def test_what_goes_on_and_on_is_judged_in_time(piece, monkeypatch):
    monkeypatch.setattr(rewards_math, "call_in_process", lambda *args, **kwargs: False)
    reward, text = AccuracyReward(), (piece * 9000)[:9000]
    for reply in (text, f"x {text} 7", f"\\boxed{{{text}}}"):
        for truth in ("7", "B", "[1,2]"):
            took = thread_seconds(lambda r=reply, t=truth: reward(r, t), 0.05)
            assert took < 0.05, (reply[:20], truth)

"""One row in full, and where answers differ."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.view import detail


def test_numbers_stand_at_the_tokens_of_the_answer() -> None:
    row = {
        "tokens": [1, 2, 3, 4, 5],
        "logprobs": [-1.0, -2.0, math.nan],
        "train_logprobs": [-1.5, -2.0, -3.0],
        "action_mask": [True, False, True],
    }
    whole = detail.tokens(row, 2, 0, 5, None)
    assert whole["ids"] == [1, 2, 3, 4, 5]
    assert whole["pieces"] is None
    assert whole["numbers"]["logprob"] == [-1.0, -2.0, None]
    assert whole["numbers"]["difference"] == [-0.5, 0.0, None]
    later = detail.tokens(row, 2, 3, 99, None)
    assert later["ids"] == [4, 5]
    assert later["numbers"]["mask"] == [False, True]
    assert detail.tokens(row, 2, 0, 2, None)["numbers"]["logprob"] == []
    json.dumps(whole, allow_nan=False)


def test_a_slice_is_bounded() -> None:
    row = {"tokens": list(range(5 * detail.MAX_TOKENS))}
    told = detail.tokens(row, 0, 10, 10**9, None)
    assert (told["start"], told["stop"]) == (10, 10 + detail.MAX_TOKENS)
    assert told["total"] == 5 * detail.MAX_TOKENS


def test_messages_of_any_form_are_shown() -> None:
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    told = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, "odd"], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "7", "content": {"sum": 3}},
        "no message",
        {"content": 5},
    ]
    found = detail.messages(json.dumps(told))
    assert found is not None
    assert [m["role"] for m in found] == ["user", "assistant", "tool", "?", "?"]
    assert found[0]["text"] == "a\nb"
    assert found[1]["calls"][0] == {"name": "add", "arguments": '{"a": 1}'}
    assert found[1]["calls"][1]["name"] == "?"
    assert found[1]["reasoning"] == "hm"
    assert json.loads(found[2]["text"]) == {"sum": 3}
    assert found[2]["name"] == "7"
    assert found[4]["text"] == "5"
    assert detail.messages("{}") is None
    assert detail.messages("broken [") is None


def test_long_texts_say_what_is_left_out() -> None:
    text = detail.cut("x" * (detail.MAX_TEXT + 7))
    assert text is not None
    assert text.endswith("[7 more characters]")


@pytest.mark.parametrize(
    ("base", "other", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], []),
        ([1, 2, 3], [1, 9, 3], [(1, 2)]),
        ([1, 2, 3], [1, 3], [(1, 1)]),
        ([], [4, 5], [(0, 2)]),
        ([1, 2, 3, 4, 5], [1, 8, 3, 9, 5], [(1, 2), (3, 4)]),
    ],
)
def test_differences(base: list[int], other: list[int], expected: list[tuple[int, int]]) -> None:
    assert detail.differences(base, other) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_what_does_not_differ_is_in_both_in_order(base: list[int], other: list[int]) -> None:
    gone = {i for start, stop in detail.differences(base, other) for i in range(start, stop)}
    left = iter(base)
    assert all(token in left for i, token in enumerate(other) if i not in gone)


def test_long_middles_differ_as_a_whole_within_a_bounded_time() -> None:
    base, other = [1] * 5000, [2, 1] * 2500
    assert detail.differences([0, *base, 7], [0, *other, 7]) == [(1, 5000)]

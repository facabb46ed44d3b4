"""The valid name a user most likely meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_dask.config.nearest import distance, hint, nearest

WORDS = st.text("abcd_", max_size=8)


@pytest.mark.parametrize(
    ("left", "right", "slips"),
    [
        ("", "abc", 3),
        ("lr", "lr", 0),
        ("lrr", "lr", 1),
        ("batch_sise", "batch_size", 1),
        ("bacth", "batch", 1),
        ("kitten", "sitting", 3),
    ],
)
def test_the_distance_counts_single_slips(left, right, slips):
    assert distance(left, right) == slips


@given(WORDS, WORDS)
def test_the_distance_is_symmetric_and_bounded(left, right):
    assert distance(left, right) == distance(right, left)
    assert abs(len(left) - len(right)) <= distance(left, right) <= max(len(left), len(right))
    assert (distance(left, right) == 0) == (left == right)


def test_the_nearest_is_near():
    assert nearest("max_timeot_s", ["max_timeout_s", "batch_timeout_s"]) == "max_timeout_s"
    assert nearest("Max-Timeout", ["max_timeout_s", "name"]) == "max_timeout_s"
    assert nearest("zebra", ["max_timeout_s", "name"]) is None
    assert nearest("x", []) is None


def test_a_hint_lists_what_is_allowed_when_nothing_is_near():
    assert hint("torhc", ["torch", "vllm"]) == "did you mean 'torch'?"
    assert hint("zebra", ["torch", "vllm"]) == "allowed: torch, vllm"
    assert hint("zebra", [f"name{i}" for i in range(30)]).endswith("... (30 in all)")

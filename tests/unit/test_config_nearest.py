"""The valid name a user most likely meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_dask.config.errors import hint, nearest

NAMES = ["max_timeout_s", "batch_timeout_s", "name", "sync_interval", "learning_rate"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("lrr", "lr"),
        ("batch_sise", "batch_size"),
        ("bacth", "batch"),
        ("Batch-Size", "batch_size"),
        ("exper", "experiment"),
    ],
)
def test_a_slip_a_spelling_and_a_beginning_are_near(wrong, right):
    assert nearest(wrong, ["lr", "batch", "batch_size", "experiment"]) == right


@given(st.sampled_from(NAMES), st.data())
def test_one_dropped_doubled_or_swapped_letter_is_near(name, data):
    i = data.draw(st.integers(0, len(name) - 2))
    swapped = name[:i] + name[i + 1] + name[i] + name[i + 2 :]
    for wrong in (name[:i] + name[i + 1 :], name[: i + 1] + name[i:], swapped):
        assert nearest(wrong, NAMES) == name


def test_the_nearest_is_near():
    assert nearest("max_timeot_s", NAMES) == "max_timeout_s"
    assert nearest("Max-Timeout", ["max_timeout_s", "name"]) == "max_timeout_s"
    assert nearest("zebra", ["max_timeout_s", "name"]) is None
    assert nearest("x", []) is None


def test_a_hint_lists_what_is_allowed_when_nothing_is_near():
    assert hint("torhc", ["torch", "vllm"]) == "did you mean 'torch'?"
    assert hint("zebra", ["torch", "vllm"]) == "allowed: torch, vllm"
    assert hint("zebra", [f"name{i}" for i in range(30)]).endswith("... (30 in all)")

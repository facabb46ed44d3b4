"""Labelled replies: what ``accuracy_reward`` gives for each, and how long that takes.

Invariant: a label says what a reader of both texts would say; none was taken from the reward.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
from timing_support import thread_seconds

from trinity_dask.rewards import math
from trinity_dask.rewards.math import AccuracyReward

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "answers.jsonl").read_text("utf-8").splitlines()
]
BY_KIND = defaultdict(list)
for row in ROWS:
    BY_KIND[row["kind"]].append(row)

LONGEST_S = 0.05


@pytest.mark.parametrize("kind", BY_KIND)
def test_every_reply_earns_what_its_label_says(kind):
    reward = AccuracyReward()
    given = [reward(row["reply"], row["truth"])["accuracy"] for row in BY_KIND[kind]]
    wrong = [row for row, value in zip(BY_KIND[kind], given, strict=True) if value != row["reward"]]
    assert wrong == []


def test_the_labels_are_many_and_of_both_kinds():
    assert len(ROWS) >= 300
    assert 0.4 < sum(row["reward"] for row in ROWS) / len(ROWS) < 0.75
    assert min(len(rows) for rows in BY_KIND.values()) >= 5


def test_a_call_is_short_where_no_helper_has_a_part_in_it(monkeypatch):
    """Time of this thread alone: neighbours on the machine have no say."""
    monkeypatch.setattr(math, "call_in_process", lambda *args, **kwargs: False)
    reward = AccuracyReward()
    took = {}
    for row in ROWS:
        judge = partial(reward, row["reply"], row["truth"])
        took[row["reply"]] = thread_seconds(judge, LONGEST_S)
    assert {reply: s for reply, s in took.items() if s > LONGEST_S} == {}

"""One train step of every algorithm type: the same for any cut into passes and ranks."""

from __future__ import annotations

import pytest
import torch
from roles_support import TYPES, gradients_of, rows_for, train_alone, train_on_ranks

ROW_TOKENS = 14  # padded tokens of the widest row


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=2e-6, rtol=1e-3)


@pytest.mark.parametrize("kind", TYPES)
def test_fault_31_accumulation_and_ranks_change_neither_loss_nor_gradient(kind):
    algorithm, experiences = {"algorithm_type": kind}, rows_for(kind)
    whole, metrics = train_alone(algorithm, experiences)
    expected = gradients_of(whole)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-5
    for passes in (2, 4, 16):
        budget = ROW_TOKENS * -(-len(experiences) // passes)
        cut, same = train_alone(algorithm, experiences, micro_batch_tokens=budget)
        assert_same(gradients_of(cut), expected)
        assert_close_metrics(same, metrics)
    ranks = train_on_ranks(algorithm, experiences, micro_batch_tokens=4 * ROW_TOKENS)
    for engine, same in ranks:
        assert_same(gradients_of(engine), expected)
        assert_close_metrics(same, metrics)


def assert_close_metrics(got, expected):
    names = [n for n in expected if n.startswith(("actor/", "critic/", "advantage/"))]
    assert names
    for name in names:
        assert got[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-3), name


@pytest.mark.parametrize("kind", TYPES)
def test_several_mini_batches_and_epochs_are_the_same_on_two_ranks(kind):
    settings = {"mini_batches": 2, "ppo_epochs": 2, "micro_batch_tokens": 4 * ROW_TOKENS}
    algorithm, experiences = {"algorithm_type": kind}, rows_for(kind, n=10)
    _, metrics = train_alone(algorithm, experiences, **settings)
    assert metrics["actor/updates"] == 4
    for _, same in train_on_ranks(algorithm, experiences, **settings):
        assert_close_metrics(same, metrics)

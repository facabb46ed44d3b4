"""Importance correction: rules, bounds, and metrics taken before the clipping."""

from __future__ import annotations

import pytest
import torch

from trinity_dask.algorithm.rollout_correction import (
    CORRECTION_MODES,
    RolloutCorrection,
    correction_metrics,
    ratio_metrics,
)


def tensors(rows=4, width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator)
    rollout = old + 0.8 * torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) > 0.3
    mask[:, 0] = True
    return old, rollout, mask


@pytest.mark.parametrize("mode", CORRECTION_MODES)
@pytest.mark.parametrize("row_filter", ["none", "product", "geometric"])
def test_weights_are_bounded_detached_and_blind_to_the_padding(mode, row_filter):
    correction = RolloutCorrection(mode, sequence_filter=row_filter, filter_low=0.5, filter_high=2)
    old, rollout, mask = tensors()
    weights = correction.weights(old.clone().requires_grad_(), rollout, mask)
    assert not weights.requires_grad
    assert (weights >= 0).all()
    assert (weights[mask] <= 2.0 + 1e-6).all()
    wide = [torch.cat([t, torch.full_like(t, 5.0)], dim=1) for t in (old, rollout * 0)]
    wide[1][:, :6] = rollout
    wide_mask = torch.cat([mask, torch.zeros_like(mask)], dim=1)
    again = correction.weights(*wide, wide_mask)
    torch.testing.assert_close(again[:, :6][mask], weights[mask])


def test_rows_do_not_move_each_other():
    correction = RolloutCorrection("sequence_mask", sequence_filter="geometric", cap=5.0)
    old, rollout, mask = tensors()
    before = correction.weights(old, rollout, mask)
    old[0] -= 3.0
    torch.testing.assert_close(correction.weights(old, rollout, mask)[1:], before[1:])


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_no_gap_means_no_correction(mode):
    old, _, mask = tensors()
    weights = RolloutCorrection(mode, sequence_filter="geometric").weights(old, old, mask)
    torch.testing.assert_close(weights, torch.ones_like(weights))


def test_dppo_judges_the_current_policy():
    mu = torch.full((1, 2), 0.3).log()
    old = mu.clone()
    now = torch.tensor([[0.6, 0.6]]).log()
    correction = RolloutCorrection(dppo_delta=0.2)
    advantages = torch.tensor([[1.0, -1.0]])
    assert correction.weights(old, mu, None, advantages).tolist() == [[1, 1]]
    assert correction.weights(old, mu, None, advantages, now).tolist() == [[0, 1]]
    with pytest.raises(ValueError, match="advantages"):
        correction.weights(old, mu)


def test_fault_42_metrics_show_the_raw_ratio_and_what_each_rule_drops():
    old = torch.tensor([[0.5, 1.0, 4.0], [1.0, 1.0, 1.0]]).log()
    mask = torch.tensor([[True, True, True], [True, True, False]])
    correction = RolloutCorrection("token_mask", sequence_filter="geometric", dppo_delta=0.2)
    advantages = torch.ones_like(old)
    metrics = correction_metrics(correction, old, torch.zeros_like(old), mask, advantages)
    assert metrics["correction/ratio_max"] == pytest.approx(4.0)
    assert metrics["correction/masked_share/token_mask"] == pytest.approx(1 / 5)
    assert metrics["correction/masked_share/geometric_filter"] == pytest.approx(3 / 5)
    assert metrics["correction/masked_share/dppo"] == pytest.approx(1 / 5)
    assert metrics["correction/weight_mean"] == pytest.approx(2 / 5)
    w = torch.tensor([0.5, 1, 4, 1, 1])
    assert metrics["correction/ess"] == pytest.approx(float(w.sum() ** 2 / (5 * (w**2).sum())))
    assert ratio_metrics(old, old, torch.zeros_like(mask)) == {}
    assert ratio_metrics(old, old, mask, "actor/ratio")["actor/ratio/ess"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    "args",
    [
        {"floor": 3.0},
        {"floor": -0.1},
        {"filter_low": 1.2, "filter_high": 1.1},
        {"dppo_delta": 0.0},
        {"sequence_filter": "geometrc"},
    ],
    ids=str,
)
def test_impossible_bounds_are_refused(args):
    with pytest.raises(ValueError, match=next(iter(args))):
        RolloutCorrection("token_tis", **args)

"""Losses: cut into parts they add up, and what is masked has no influence."""

from __future__ import annotations

import pytest
import torch

from trinity_dask.algorithm.aggregate import AGGREGATION_MODES, Denominator, aggregate
from trinity_dask.algorithm.entropy import EntropyLoss
from trinity_dask.algorithm.kl import KL_ESTIMATORS, KLLoss
from trinity_dask.algorithm.policy_losses import PPOLoss, SFTLoss


def inputs(rows=6, width=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    return {
        "logprob": -torch.rand(rows, width, generator=generator),
        "old_logprob": -torch.rand(rows, width, generator=generator),
        "advantages": torch.randn(rows, width, generator=generator),
        "action_mask": torch.arange(width) < lengths[:, None],
    }


def run(loss_fn, tensors, denominator, mode):
    logprob = tensors["logprob"].clone().requires_grad_()
    loss, metrics = loss_fn(
        **{**tensors, "logprob": logprob}, denominator=denominator, loss_agg_mode=mode
    )
    loss.backward()
    return loss.detach(), metrics, logprob.grad


@pytest.mark.parametrize("loss_fn", [PPOLoss(), SFTLoss()], ids=["ppo", "sft"])
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_fault_31_parts_add_up_to_the_whole(loss_fn, mode, parts):
    tensors = inputs()
    whole = Denominator.count(tensors["action_mask"])
    loss, metrics, gradient = run(loss_fn, tensors, whole, mode)
    pieces = [
        run(loss_fn, {n: t.chunk(parts)[k] for n, t in tensors.items()}, whole, mode)
        for k in range(parts)
    ]
    torch.testing.assert_close(sum(p[0] for p in pieces), loss)
    torch.testing.assert_close(torch.cat([p[2] for p in pieces]), gradient)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(p[1][name] for p in pieces), value)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_fault_29_masked_rows_count_neither_above_nor_below(mode):
    tensors = inputs()
    half = {name: t[:3] for name, t in tensors.items()}
    tensors["action_mask"][3:] = False
    alone, _, _ = run(PPOLoss(), half, Denominator.count(half["action_mask"]), mode)
    both, _, gradient = run(PPOLoss(), tensors, Denominator.count(tensors["action_mask"]), mode)
    torch.testing.assert_close(both, alone)
    assert not gradient[3:].any()


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("loss_fn", [PPOLoss(), SFTLoss()], ids=["ppo", "sft"])
def test_fault_26_padding_to_twice_the_width_changes_nothing(loss_fn, mode):
    tensors = inputs()
    denominator = Denominator.count(tensors["action_mask"])
    loss, _, gradient = run(loss_fn, tensors, denominator, mode)
    wide = {n: torch.cat([t, torch.zeros_like(t)], dim=1) for n, t in tensors.items()}
    wide_loss, _, wide_gradient = run(loss_fn, wide, Denominator.count(wide["action_mask"]), mode)
    torch.testing.assert_close(wide_loss, loss)
    torch.testing.assert_close(wide_gradient[:, : gradient.shape[1]], gradient)
    assert not wide_gradient[:, gradient.shape[1] :].any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_fault_30_what_lies_in_the_padding_does_not_leak(poison):
    tensors = inputs()
    mask = tensors["action_mask"]
    denominator = Denominator.count(mask)
    clean = run(PPOLoss(), tensors, denominator, "token-mean")
    for name in ("old_logprob", "advantages"):
        tensors[name] = torch.where(mask, tensors[name], poison)
    loss, metrics, gradient = run(PPOLoss(), tensors, denominator, "token-mean")
    torch.testing.assert_close(loss, clean[0])
    torch.testing.assert_close(gradient, clean[2])
    assert all(torch.isfinite(value) for value in metrics.values())


def test_a_fully_masked_part_gives_zero_attached_to_the_graph():
    tensors = inputs()
    tensors["action_mask"][:] = False
    for mode in AGGREGATION_MODES:
        loss, _, gradient = run(PPOLoss(), tensors, Denominator(100.0, 10.0), mode)
        assert loss == 0
        assert not gradient.any()


def test_weights_multiply_the_loss_of_a_token_and_carry_no_gradient():
    tensors = inputs()
    denominator = Denominator.count(tensors["action_mask"])
    plain, _, gradient = run(PPOLoss(), tensors, denominator, "token-mean")
    tensors["weights"] = torch.full_like(tensors["logprob"], 0.5)
    weighted, metrics, half = run(PPOLoss(), tensors, denominator, "token-mean")
    torch.testing.assert_close(weighted, plain / 2)
    torch.testing.assert_close(half, gradient / 2)
    torch.testing.assert_close(metrics["pg_loss"], weighted)


def test_extreme_ratios_stay_finite():
    mask = torch.ones(1, 2, dtype=torch.bool)
    tensors = {
        "logprob": torch.tensor([[0.0, -500.0]]),
        "old_logprob": torch.tensor([[-500.0, 0.0]]),
        "advantages": torch.tensor([[-1.0, 1.0]]),
        "action_mask": mask,
    }
    loss, _, gradient = run(
        PPOLoss(clip_ratio_c=None), tensors, Denominator.count(mask), "token-mean"
    )
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_kl_is_zero_at_the_reference_and_only_counts_valid_tokens(name):
    tensors = inputs()
    mask = tensors["action_mask"]
    penalty = KLLoss(name, kl_coef=0.5)
    call = {"action_mask": mask, "denominator": Denominator.count(mask)}
    same, _ = penalty(logprob=tensors["logprob"], ref_logprob=tensors["logprob"], **call)
    assert same == 0
    far = torch.where(mask, tensors["logprob"], 50.0)
    assert penalty(logprob=far, ref_logprob=tensors["logprob"], **call)[0] == 0
    assert not KLLoss("none").active
    assert not KLLoss(name, kl_coef=0.0).active


def test_entropy_bonus_is_scaled_and_masked():
    mask = torch.tensor([[True, False]])
    bonus, metrics = EntropyLoss("default", 0.1)(
        entropy=torch.tensor([[2.0, 9.0]]), action_mask=mask, denominator=Denominator.count(mask)
    )
    assert bonus == pytest.approx(0.2)
    assert metrics["entropy_loss"] == pytest.approx(0.2)
    assert EntropyLoss("default", 0.0).measured
    assert not EntropyLoss("default", 0.0).active
    assert not EntropyLoss("none", 0.5).active


@pytest.mark.parametrize(
    "args",
    [{"clip_range": -0.1}, {"clip_range_low": 1.5}, {"clip_ratio_c": 1.0}],
    ids=lambda a: next(iter(a)),
)
def test_impossible_clip_ranges_are_refused(args):
    with pytest.raises(ValueError, match="clip"):
        PPOLoss(**args)


def test_an_unknown_mode_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'token-mean'"):
        aggregate(torch.ones(1, 1), torch.ones(1, 1) > 0, "tokn-mean", Denominator(1, 1))

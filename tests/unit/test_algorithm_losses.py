"""Losses: cut into parts they add up, and what is masked has no influence."""

from __future__ import annotations

import pytest
import torch

from trinity_dask.algorithm.aggregate import (
    AGGREGATION_MODES,
    ALL_MODES,
    Denominator,
    aggregate,
)
from trinity_dask.algorithm.entropy import EntropyLoss, MixEntropyLoss, NoEntropyLoss
from trinity_dask.algorithm.kl import KL_FN, KLLoss
from trinity_dask.algorithm.policy_losses import POLICY_LOSS_FN, PPOLoss

# every loss with its defaults, and the variants that take other paths
VARIANTS = {
    "ppo": {"enable_sequence_masking": True, "delta_sequence_masking": 0.01},
    "cispo": {"enable_mask_clip": True, "mask_clip_range_low": 0.2},
    "rec": {"clip_mode": "gspo-one-side", "weight": "importance_sampling"},
    "gspo": {"clip_range_low": 0.2, "clip_range_high": 0.2},
    "mix_chord": {"mu_warmup_steps": 4},
}
ALL = {name: POLICY_LOSS_FN.get(name)() for name in POLICY_LOSS_FN.names()}
ALL |= {f"{name}+": POLICY_LOSS_FN.get(name)(**args) for name, args in VARIANTS.items()}
RATIO_BASED = [name for name, loss in ALL.items() if "old_logprob" in loss.needs]


def every_loss(names=None):
    return pytest.mark.parametrize(
        "loss_fn", [ALL[n] for n in names or ALL], ids=names or list(ALL)
    )


def inputs(rows=6, width=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)

    def draw():
        return -torch.rand(rows, width, generator=generator)

    return {
        "logprob": draw(),
        "old_logprob": draw(),
        "advantages": torch.randn(rows, width, generator=generator),
        "action_mask": torch.arange(width) < lengths[:, None],
        "ref_logprob": draw(),
        "expert_mask": torch.arange(rows) % 3 == 0,
        "logits": torch.randn(rows, width, 5, generator=generator),
        "teacher_logits": torch.randn(rows, width, 5, generator=generator),
    }


def counted(tensors):
    return Denominator.count(tensors["action_mask"], tensors["expert_mask"])


def run(loss_fn, tensors, denominator, mode):
    logprob = tensors["logprob"].clone().requires_grad_()
    logits = tensors["logits"].clone().requires_grad_() if "logits" in tensors else None
    loss, metrics = loss_fn(
        **{**tensors, "logprob": logprob, "logits": logits},
        denominator=denominator,
        loss_agg_mode=mode,
        step=2,
    )
    loss.backward()
    gradient = logits.grad.sum(dim=-1) if logprob.grad is None else logprob.grad
    return loss.detach(), metrics, gradient


@every_loss()
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("parts", [3])
def test_fault_31_parts_add_up_to_the_whole(loss_fn, mode, parts):
    tensors = inputs()
    whole = counted(tensors)
    loss, metrics, gradient = run(loss_fn, tensors, whole, mode)
    pieces = [
        run(loss_fn, {n: t.chunk(parts)[k] for n, t in tensors.items()}, whole, mode)
        for k in range(parts)
    ]
    torch.testing.assert_close(sum(p[0] for p in pieces), loss)
    torch.testing.assert_close(torch.cat([p[2] for p in pieces]), gradient)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(p[1][name] for p in pieces), value)


@every_loss()
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_fault_29_masked_rows_count_neither_above_nor_below(loss_fn, mode):
    """Half of the batch truncated: the loss is that of the other half alone."""
    tensors = inputs()
    half = {name: t[:4] for name, t in tensors.items()}
    tensors["action_mask"][4:] = False
    alone, _, _ = run(loss_fn, half, counted(half), mode)
    both, _, gradient = run(loss_fn, tensors, counted(tensors), mode)
    torch.testing.assert_close(both, alone)
    assert not gradient[4:].any()


@every_loss()
def test_fault_32_a_masked_row_moves_no_other(loss_fn):
    tensors = inputs()
    tensors["action_mask"][4:] = False
    _, _, before = run(loss_fn, tensors, counted(tensors), "token-mean")
    for name in ("logprob", "old_logprob", "advantages", "ref_logprob", "logits"):
        tensors[name][4:] *= 3.0
    _, _, after = run(loss_fn, tensors, counted(tensors), "token-mean")
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@every_loss()
def test_fault_26_padding_to_twice_the_width_changes_nothing(loss_fn, mode):
    tensors = inputs()
    loss, _, gradient = run(loss_fn, tensors, counted(tensors), mode)
    wide = {
        n: t if t.dim() == 1 else torch.cat([t, torch.zeros_like(t)], dim=1)
        for n, t in tensors.items()
    }
    wide_loss, _, wide_gradient = run(loss_fn, wide, counted(wide), mode)
    torch.testing.assert_close(wide_loss, loss)
    torch.testing.assert_close(wide_gradient[:, : gradient.shape[1]], gradient)
    assert not wide_gradient[:, gradient.shape[1] :].any()


@every_loss()
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_fault_30_what_lies_in_the_padding_does_not_leak(loss_fn, poison):
    tensors = inputs()
    mask = tensors["action_mask"]
    clean = run(loss_fn, tensors, counted(tensors), "token-mean")
    for name in ("logprob", "old_logprob", "advantages", "ref_logprob"):
        tensors[name] = torch.where(mask, tensors[name], poison)
    loss, metrics, gradient = run(loss_fn, tensors, counted(tensors), "token-mean")
    torch.testing.assert_close(loss, clean[0])
    torch.testing.assert_close(gradient, clean[2])
    assert all(torch.isfinite(value) for value in metrics.values())


@every_loss()
def test_a_fully_masked_part_gives_zero_attached_to_the_graph(loss_fn):
    tensors = inputs()
    tensors["action_mask"][:] = False
    for mode in AGGREGATION_MODES:
        loss, _, gradient = run(loss_fn, tensors, Denominator(100.0, 10.0), mode)
        assert loss == 0
        assert not gradient.any()


@every_loss([name for name in RATIO_BASED if "mix" not in name])
def test_weights_multiply_the_loss_of_a_token_and_carry_no_gradient(loss_fn):
    tensors = inputs()
    plain, _, gradient = run(loss_fn, tensors, counted(tensors), "token-mean")
    tensors["weights"] = torch.full_like(tensors["logprob"], 0.5)
    weighted, _, half = run(loss_fn, tensors, counted(tensors), "token-mean")
    torch.testing.assert_close(weighted, plain / 2)
    torch.testing.assert_close(half, gradient / 2)


@every_loss(RATIO_BASED)
def test_a_rejected_token_stays_in_the_divisor(loss_fn):
    """Rejecting a row removes its gradient and does not inflate that of the others."""
    tensors = inputs()
    tensors["expert_mask"][:] = False
    _, _, before = run(loss_fn, tensors, counted(tensors), "token-mean")
    tensors["weights"] = torch.ones_like(tensors["logprob"])
    tensors["weights"][:2] = 0.0
    _, _, after = run(loss_fn, tensors, counted(tensors), "token-mean")
    assert not after[:2].any()
    torch.testing.assert_close(after[2:], before[2:])


@every_loss(RATIO_BASED)
def test_extreme_ratios_stay_finite(loss_fn):
    mask = torch.ones(1, 2, dtype=torch.bool)
    tensors = {
        "logprob": torch.tensor([[0.0, -500.0]]),
        "old_logprob": torch.tensor([[-500.0, 0.0]]),
        "advantages": torch.tensor([[-1.0, 1.0]]),
        "action_mask": mask,
        "expert_mask": torch.tensor([False]),
    }
    loss, _, gradient = run(loss_fn, tensors, Denominator.count(mask), "token-mean")
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", KL_FN.names())
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
    bonus, metrics = EntropyLoss(0.1)(
        entropy=torch.tensor([[2.0, 9.0]]), action_mask=mask, denominator=Denominator.count(mask)
    )
    assert bonus == pytest.approx(0.2)
    assert metrics["entropy_loss"] == pytest.approx(0.2)
    assert EntropyLoss(0.0).measured
    assert not EntropyLoss(0.0).active
    assert not NoEntropyLoss(0.5).active


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


@every_loss()
def test_without_a_denominator_a_loss_normalises_over_its_own_rows(loss_fn):
    tensors = inputs()
    given = loss_fn(**tensors, step=2, denominator=counted(tensors))[0]
    torch.testing.assert_close(loss_fn(**tensors, step=2)[0], given)


def test_a_mode_that_divides_by_a_length_needs_it():
    tensors = inputs()
    with pytest.raises(ValueError, match="max_response_tokens"):
        run(PPOLoss(), tensors, Denominator(10.0, 2.0), "dr-grpo")


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_mixed_losses_take_batches_of_one_kind(name):
    """A mini-batch without demonstrations, or without rollouts: no NaN, the other part alone."""
    for only_expert in (True, False):
        tensors = inputs()
        tensors["expert_mask"][:] = only_expert
        loss, metrics, gradient = run(ALL[name], tensors, counted(tensors), "token-mean")
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()
        assert metrics["usual/pg_loss" if only_expert else f"expert/{ALL[name].sft.metric}"] == 0


def test_the_mix_of_a_mini_batch_does_not_depend_on_where_the_demonstrations_lie():
    tensors = inputs()
    whole = counted(tensors)
    loss, _, _ = run(ALL["mix"], tensors, whole, "token-mean")
    order = torch.argsort(tensors["expert_mask"].int())
    parts = [
        run(ALL["mix"], {n: t[rows] for n, t in tensors.items()}, whole, "token-mean")[0]
        for rows in order.split(2)
    ]
    torch.testing.assert_close(sum(parts), loss)


def test_entropy_of_mixed_batches_is_over_the_policys_own_rows():
    mask = torch.tensor([[True, True], [True, False]])
    entropy = torch.tensor([[1.0, 2.0], [7.0, 0.0]])
    bonus, _ = MixEntropyLoss(0.5)(
        entropy=entropy, action_mask=mask, expert_mask=torch.tensor([False, True])
    )
    assert bonus == pytest.approx(0.75)
    assert MixEntropyLoss().needs == {"expert_mask"}
    assert EntropyLoss().needs == frozenset()

"""The algorithms against worked values and an independent numpy reference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch

from trinity_dask.algorithm.advantages import GRPOAdvantage
from trinity_dask.algorithm.aggregate import AGGREGATION_MODES, Denominator, aggregate
from trinity_dask.algorithm.entropy import token_entropy
from trinity_dask.algorithm.kl import KLLoss
from trinity_dask.algorithm.policy_losses import PPOLoss, SFTLoss
from trinity_dask.algorithm.rollout_correction import RolloutCorrection, correction_metrics

HERE = Path(__file__).parent


def load(name: str):
    return json.loads((HERE / name).read_text())


def experiences(rewards, tid="0/0", tokens=3):
    return [
        SimpleNamespace(
            eid=SimpleNamespace(tid=tid, rid=f"{tid}/{run}"),
            reward=float(r),
            action_mask=np.ones(tokens, dtype=bool),
            advantages=None,
            returns=None,
        )
        for run, r in enumerate(rewards)
    ]


@pytest.mark.parametrize("case", load("advantages.json"), ids=lambda c: c["formula"])
def test_advantages(case):
    rows, _ = GRPOAdvantage(epsilon=case["epsilon"])(experiences(case["rewards"]))
    got = [float(row.advantages[0]) for row in rows]
    np.testing.assert_allclose(got, case["expected"], atol=case["tolerance"] + 1e-7)
    np.testing.assert_allclose(
        got, reference.group_scores(case["rewards"], case["epsilon"]), rtol=1e-6, atol=1e-7
    )


def test_aggregation_worked_example():
    case = load("aggregation.json")
    mask = torch.zeros(2, case["padded_length"], dtype=torch.bool)
    values = torch.full(mask.shape, 99.0)
    for row, (length, loss) in enumerate(zip(case["lengths"], case["losses"], strict=True)):
        mask[row, :length] = True
        values[row, :length] = loss
    for mode, expected in case["expected"].items():
        assert float(aggregate(values, mask, mode, Denominator.count(mask))) == pytest.approx(
            expected, abs=1e-5
        )
        assert reference.aggregate(values.numpy(), mask.numpy(), mode) == pytest.approx(
            expected, abs=1e-5
        )


@pytest.mark.parametrize("case", load("ppo.json"), ids=lambda c: c["case"])
def test_ppo_clip_variants(case):
    logprob = torch.tensor([[math.log(case["ratio"])]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss_fn = PPOLoss(
        clip_range_low=case["low"], clip_range_high=case["high"], clip_ratio_c=case["dual"]
    )
    loss, _ = loss_fn(
        logprob=logprob,
        old_logprob=torch.zeros(1, 1),
        action_mask=mask,
        advantages=torch.full((1, 1), float(case["advantage"])),
        denominator=Denominator.count(mask),
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-5)
    assert float(logprob.grad) == pytest.approx(case["gradient"], abs=1e-5)
    assert reference.ppo_token_loss(
        math.log(case["ratio"]), case["advantage"], case["low"], case["high"], case["dual"]
    ) == pytest.approx(case["loss"], abs=1e-5)


@pytest.mark.parametrize("case", load("kl.json"), ids=lambda c: f"{c['name']} at {c['delta']}")
def test_kl_values_and_gradients(case):
    logprob = torch.tensor([[case["delta"]]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, metrics = KLLoss(case["name"], kl_coef=1.0)(
        logprob=logprob,
        ref_logprob=torch.zeros(1, 1),
        old_logprob=logprob.detach(),
        action_mask=mask,
        denominator=Denominator.count(mask),
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["value"], abs=1e-5)
    assert float(logprob.grad) == pytest.approx(case["gradient"], abs=1e-5)
    assert float(metrics["kl_loss"]) == pytest.approx(case["value"], abs=1e-5)
    assert reference.kl(case["name"], case["delta"]) == pytest.approx(case["value"], abs=1e-5)


def test_token_tis_weights():
    case = load("correction.json")
    old = torch.tensor([case["ratios"]]).log()
    correction = RolloutCorrection("token_tis", case["cap"])
    weights = correction.weights(old.requires_grad_(), torch.zeros(1, 3))
    assert not weights.requires_grad
    np.testing.assert_allclose(weights[0], case["weights"], rtol=1e-5)
    np.testing.assert_allclose(
        weights.numpy(), reference.token_tis(old.detach().numpy(), np.zeros((1, 3)), 2.0), rtol=1e-5
    )


def test_fault_42_the_raw_ratio_is_reported_beside_the_clipped_weight():
    case = load("correction.json")
    old = torch.tensor([case["ratios"]]).log()
    metrics = correction_metrics(
        RolloutCorrection("token_tis", case["cap"]),
        old,
        torch.zeros(1, 3),
        torch.ones(1, 3, dtype=torch.bool),
    )
    assert metrics["correction/ratio_max"] == pytest.approx(4.0, rel=1e-5)
    assert metrics["correction/ratio_p50"] == pytest.approx(1.0, rel=1e-5)
    assert metrics["correction/weight_mean"] == pytest.approx(case["weight_mean"], abs=1e-5)
    assert metrics["correction/clipped_share"] == pytest.approx(case["clipped_share"], abs=1e-5)
    assert metrics["correction/ess"] == pytest.approx(case["ess"], abs=1e-4)


def trinity_fixture():
    generator = torch.Generator().manual_seed(42)

    def draw():
        return torch.rand(5, 20, generator=generator)

    logprob, old, ref = (2 * draw() - 1 for _ in range(3))
    mask = draw() > 0.5
    return logprob, old, ref, mask, 2 * draw() - 1


def ppo(mode="token-mean", **args):
    logprob, old, _, mask, advantages = trinity_fixture()
    return PPOLoss(**args)(
        logprob=logprob,
        old_logprob=old,
        action_mask=mask,
        advantages=advantages,
        denominator=Denominator.count(mask),
        loss_agg_mode=mode,
    )


def test_trinity_fixture_is_the_documented_one():
    logprob, _, _, mask, _ = trinity_fixture()
    case = load("trinity_fixture.json")
    assert mask.sum(dim=1).tolist() == case["mask_rows"]
    np.testing.assert_allclose(logprob[0, :3], case["first_logprobs"], atol=1e-6)


def test_ppo_has_trinitys_values():
    case = load("trinity_fixture.json")
    for mode, expected in case["ppo"].items():
        loss, metrics = ppo(mode)
        assert float(loss) == pytest.approx(expected, abs=1e-6)
        for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"):
            assert float(metrics[name]) == pytest.approx(case[name], abs=1e-6)
    assert float(ppo(clip_ratio_c=None)[0]) == pytest.approx(
        case["ppo_without_dual_clip"], abs=1e-6
    )
    assert float(ppo(clip_range_low=0.2, clip_range_high=0.28)[0]) == pytest.approx(
        case["ppo_clip_higher"], abs=1e-6
    )


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_losses_agree_with_the_reference(mode):
    logprob, old, behaviour, mask, advantages = trinity_fixture()
    weights = RolloutCorrection("token_tis", 2.0).weights(old, behaviour)
    loss, _ = PPOLoss(clip_range_low=0.2, clip_range_high=0.28)(
        logprob=logprob,
        old_logprob=old,
        action_mask=mask,
        advantages=advantages,
        weights=weights,
        denominator=Denominator.count(mask),
        loss_agg_mode=mode,
    )
    expected = reference.ppo_losses(
        logprob.numpy(),
        old.numpy(),
        advantages.numpy(),
        high=0.28,
        weights=reference.token_tis(old.numpy(), behaviour.numpy(), 2.0),
    )
    assert float(loss) == pytest.approx(reference.aggregate(expected, mask.numpy(), mode), abs=1e-5)
    likelihood, _ = SFTLoss()(
        logprob=logprob,
        action_mask=mask,
        denominator=Denominator.count(mask),
        loss_agg_mode=mode,
    )
    case = load("trinity_fixture.json")["logprob"]
    assert float(likelihood) == pytest.approx(-case[mode], abs=1e-6)


def test_entropy_is_that_of_the_softmax():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)) * 5
    np.testing.assert_allclose(
        token_entropy(logits), reference.entropy(logits.numpy().astype(np.float64)), atol=1e-5
    )

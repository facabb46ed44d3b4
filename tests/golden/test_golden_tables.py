"""The worked tables: one line of ``tables.json`` each, product and reference alike."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import reference_advantages as adv
import reference_losses as ref
import torch

from trinity_dask.algorithm.advantages import gae
from trinity_dask.algorithm.advantages.in_trainer import returns_to_go, whiten
from trinity_dask.algorithm.aggregate import Denominator, aggregate
from trinity_dask.algorithm.entropy import token_necs
from trinity_dask.algorithm.kl import KLLoss
from trinity_dask.algorithm.policy_losses import POLICY_LOSS_FN, LossInputs
from trinity_dask.algorithm.rollout_correction import RolloutCorrection
from trinity_dask.algorithm.value_loss import value_loss

TABLES = json.loads((Path(__file__).parent / "tables.json").read_text())
CORRECTION_KEYS = ("mode", "cap", "floor", "sequence_filter", "filter_low", "filter_high")


def row(values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)


def check_gae(case):
    mask = row(case["mask"], torch.bool)
    found = gae(row(case["rewards"]), row(case["values"]), mask, **case["args"])[0]
    np.testing.assert_allclose(found, case["expected"], atol=1e-9)
    again = adv.gae(case["rewards"], case["values"], case["mask"], **case["args"])
    np.testing.assert_allclose(again, case["expected"], atol=1e-9)
    for wrong in case["not_this"].values():
        assert not np.allclose(found, wrong, atol=1e-4)


def check_returns(case):
    mask = row(case["mask"], torch.bool)
    found = returns_to_go(row(case["rewards"]), mask, **case["args"])[0]
    np.testing.assert_allclose(found, case["expected"])
    again = adv.returns(case["rewards"], case["mask"], **case["args"])
    np.testing.assert_allclose(again, case["expected"])


def check_whiten(case):
    values = row(case["values"])
    found = whiten(values, torch.ones_like(values, dtype=torch.bool))[0]
    np.testing.assert_allclose(found, case["expected"], atol=1e-6)
    again = adv.whiten([case["values"]], [[True] * 4])[0]
    np.testing.assert_allclose(again, case["expected"], atol=1e-6)


def check_value_loss(case):
    value = row([case["v"]]).requires_grad_()
    loss, _ = value_loss(
        value,
        row([case["old"]]),
        row([case["return"]]),
        row([1], torch.bool),
        clip_range=case["clip_range"],
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["expected"])
    assert value.grad.item() == pytest.approx(case["gradient"])
    eps = math.inf if case["clip_range"] is None else case["clip_range"]
    assert ref.value_token(case["v"], case["old"], case["return"], eps) == pytest.approx(
        case["expected"]
    )


def check_gspo_ratio(case):
    log_ratios = row(case["log_ratios"])
    given = {
        "logprob": log_ratios,
        "old_logprob": torch.zeros_like(log_ratios),
        "action_mask": torch.ones_like(log_ratios, dtype=torch.bool),
    }
    found = LossInputs.of(given, "token-mean").row_log_ratio.exp()
    assert found.item() == pytest.approx(case["expected"], abs=1e-5)
    plain = np.array([case["log_ratios"]])
    again = ref.row_ratio(plain, np.zeros_like(plain), np.ones_like(plain, dtype=bool))
    assert again[0] == pytest.approx(case["expected"], abs=1e-5)


def check_correction(case):
    correction = RolloutCorrection(**{k: case[k] for k in CORRECTION_KEYS if k in case})
    log_w = row(case["w"]).log()
    padded = torch.cat([log_w, torch.full((1, 2), 3.0)], dim=1)
    mask = row([1, 1, 1, 0, 0], torch.bool)
    found = correction.weights(padded, torch.zeros_like(padded), mask)[0, :3]
    np.testing.assert_allclose(found, case["expected"], rtol=1e-5)
    if "sequence_filter" not in case:
        floor = 0.5 if case["mode"] == "token_mask" else case.get("floor")
        again = ref.correction(np.array(case["w"]), case["mode"], case["cap"], floor)
        np.testing.assert_allclose(again, case["expected"], rtol=1e-5)


def check_dppo(case):
    found = RolloutCorrection(dppo_delta=0.2).weights(
        row(case["p"]).log(), row(case["mu"]).log(), None, row(case["advantages"])
    )
    np.testing.assert_allclose(found[0], case["expected"])


def check_kl(case):
    logprob = row([case["delta"]]).requires_grad_()
    zero = torch.zeros_like(logprob)
    loss, metrics = KLLoss(case["name"], kl_coef=1.0)(
        logprob=logprob,
        ref_logprob=zero.detach(),
        old_logprob=logprob.detach(),
        action_mask=zero == 0,
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["expected"], abs=1e-5)
    assert metrics["kl_loss"].item() == pytest.approx(case["expected"], abs=1e-5)
    assert logprob.grad.item() == pytest.approx(case["gradient"], abs=1e-5)
    assert ref.kl_estimate(case["name"], case["delta"]) == pytest.approx(case["expected"], abs=1e-5)


def check_cispo_weight(case):
    logprob = row([-1.0]).requires_grad_()
    loss, _ = POLICY_LOSS_FN.get("cispo")(**case["args"])(
        logprob=logprob,
        old_logprob=logprob.detach() - math.log(case["ratio"]),
        action_mask=row([1], torch.bool),
        advantages=row([1.0]),
    )
    loss.backward()
    assert -logprob.grad.item() == pytest.approx(case["expected"])
    cap = case["args"].get("ratio_cap", 1 + case["args"].get("clip_range_high", 0))
    _, slope = ref.cispo(-1.0, -1.0 - math.log(case["ratio"]), 1.0, high=cap - 1)
    assert -slope == pytest.approx(case["expected"])


def check_necs(case):
    found = token_necs(torch.tensor(case["p"], dtype=torch.float64).log()).item()
    assert found == pytest.approx(case["expected"], abs=1e-6)
    assert ref.necs(np.array(case["p"])) == pytest.approx(case["expected"], abs=1e-6)


def check_adaptive_kl(case):
    term = KLLoss("k2", case["coef"], True, case["target"], case["horizon"])
    term.update(case["kl"], case["n"])
    assert term.coef == pytest.approx(case["expected"])
    fresh = KLLoss("k2", case["coef"], True, case["target"], case["horizon"])
    fresh.load_state_dict(term.state_dict())
    assert fresh.coef == term.coef


def check_aggregate(case):
    """Lengths 2 and 4, losses 1 and −.25, padded to 8."""
    mask = torch.arange(8) < torch.tensor([[2], [4]])
    values = torch.tensor([[1.0], [-0.25]]).expand(2, 8)
    found = aggregate(values, mask, case["mode"], Denominator.count(mask))
    assert found.item() == pytest.approx(case["expected"])
    weights = ref.weights(mask.numpy(), case["mode"])
    assert (weights * values.numpy()).sum() == pytest.approx(case["expected"])


CHECKS = {name.removeprefix("check_"): f for name, f in globals().items() if "check_" in name}


@pytest.mark.parametrize(
    "case", TABLES, ids=[f"{k}-{c['what']}-{c['source']}" for k, c in enumerate(TABLES)]
)
def test_table(case):
    CHECKS[case["what"]](case)


def test_length_mutes_a_product_but_not_a_geometric_mean():
    """Token log-ratios N(−σ²/2, σ²), σ = .02: the product's median at 8192 tokens is .19."""
    generator = torch.Generator().manual_seed(0)
    log_w = torch.randn(200, 8192, generator=generator) * 0.02 - 0.02**2 / 2
    zero, mask = torch.zeros_like(log_w), torch.ones_like(log_w, dtype=torch.bool)
    product = RolloutCorrection("sequence_tis", cap=1e6).weights(log_w, zero, mask)[:, 0]
    assert product.median() == pytest.approx(0.19, abs=0.06)
    token = RolloutCorrection("token_tis", sequence_filter="geometric").weights(log_w, zero, mask)
    assert token.mean() == pytest.approx(1.0, abs=0.01)

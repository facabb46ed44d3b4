"""Signal and noise of the policy gradient, estimated from forward passes."""

from __future__ import annotations

import pytest
import torch
from roles_support import role_engine, rows_for, train_on_ranks
from trainer_support import batch_of

from trinity_dask.trainer.ranks.gradients import GradientGroup
from trinity_dask.trainer.step.variance import probability_energy, variance_proxies

PREFIX = "variance_proxy/"


def test_the_energy_of_a_score_is_that_of_the_logits():
    """W = Σ_t ‖∂ log π(y_t) / ∂z_t‖², by autograd."""
    torch.manual_seed(0)
    logits = torch.randn(1, 3, 5, requires_grad=True)
    chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor([[[1], [0], [4]]]))[..., 0]
    (slope,) = torch.autograd.grad(chosen.sum(), logits)
    mask = torch.tensor([[True, True, False]])
    found = variance_proxies(
        chosen.detach(),
        probability_energy(logits.detach()),
        torch.tensor([[2.0, 2.0, 9.0]]),
        mask,
        None,
        0.5,
        GradientGroup(),
    )
    energy = float(slope[0, :2].square().sum())
    assert found[f"{PREFIX}expected_w"] == pytest.approx(energy, rel=1e-5)
    assert found[f"{PREFIX}proxy2_total_power"] == pytest.approx(4.0 * energy, rel=1e-5)
    assert found[f"{PREFIX}proxy1_signal_strength"] == 0.25
    assert f"{PREFIX}proxy3_pure_noise" not in found  # one row has no spread


def test_two_rows_by_hand():
    logprob = torch.log(torch.tensor([[0.5], [0.25]]))
    found = variance_proxies(
        logprob,
        torch.tensor([[0.5], [0.5]]),
        torch.tensor([[1.0], [-2.0]]),
        torch.ones(2, 1, dtype=torch.bool),
        torch.tensor([[1.0], [0.5]]),
        0.1,
        GradientGroup(),
    )
    # W: 1 - 1 + .5 = .5, and .25 * (1 - .5 + .5) = .25; A²: 1, 4
    assert found[f"{PREFIX}expected_w"] == pytest.approx(0.375)
    assert found[f"{PREFIX}expected_a_squared"] == pytest.approx(2.5)
    assert found[f"{PREFIX}proxy2_total_power"] == pytest.approx(0.75)
    assert found[f"{PREFIX}proxy3_pure_noise"] == pytest.approx(0.74)


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_ranks_report_the_proxies_of_the_whole_step(kind: str):
    rows = rows_for(kind, n=9)
    alone = role_engine({"algorithm_type": kind}, variance_proxies=True)
    expected = alone.train_step(batch_of(rows), 1)
    names = [name for name in expected if name.startswith(PREFIX)]
    assert len(names) == 5
    for _, metrics in train_on_ranks({"algorithm_type": kind}, rows, variance_proxies=True):
        for name in names:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name
    plain = role_engine({"algorithm_type": kind}).train_step(batch_of(rows), 1)
    assert not any(name.startswith(PREFIX) for name in plain)
    assert plain["actor/final_loss"] == pytest.approx(expected["actor/final_loss"], abs=1e-6)

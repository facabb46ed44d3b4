"""One train step of every algorithm type: the same for any cut into passes and ranks."""

from __future__ import annotations

import pytest
import torch
from roles_support import SGD, TYPES, gradients_of, rows_for, train_alone, train_on_ranks
from trainer_support import batch_of, rows, step_config, tiny_model

from trinity_dask.algorithm import resolve_algorithm
from trinity_dask.trainer.model.frozen import FrozenModel
from trinity_dask.trainer.step.engine import StepEngine

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


@pytest.mark.parametrize("entropy", ["none", "default"])
def test_fault_31_the_jsd_loss_asks_the_teacher_model(entropy):
    algorithm = {
        "algorithm_type": "grpo",
        "policy_loss_fn": "jsd",
        "kl_loss_fn": "none",
        "entropy_loss_fn": entropy,
    }
    settings = {"grad_clip": 0.0, "optimizer": SGD, "temperature": 0.7}
    found = []
    for tokens, teacher in ((65_536, 1), (4 * ROW_TOKENS, 1), (65_536, 0)):
        trained = StepEngine(
            step_config(micro_batch_tokens=tokens, **settings),
            resolve_algorithm(algorithm),
            tiny_model(),
            teacher=FrozenModel(tiny_model(seed=teacher)),
        )
        metrics = trained.train_step(batch_of(rows(8)), 1)
        found.append((gradients_of(trained), metrics["actor/jsd_loss"]))
        assert "time/teacher_log_prob" not in metrics  # its log-probs are not needed
    (whole, loss), (cut, same), (_, of_itself) = found
    assert_same(cut, whole)
    assert same == pytest.approx(loss, rel=1e-4)
    assert loss > 1e-3
    assert of_itself == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match="teacher_model_path"):
        train_alone(algorithm, rows(4))


@pytest.mark.parametrize("kind", ["sft", "cpt", "dpo"])
def test_likelihood_of_rows_without_a_sampler_is_at_temperature_one(kind):
    algorithm, experiences = {"algorithm_type": kind}, rows_for(kind, n=8)
    cold, metrics = train_alone(algorithm, experiences, temperature=0.5)
    plain, same = train_alone(algorithm, experiences, temperature=1.0)
    assert_same(gradients_of(cold), gradients_of(plain))
    assert metrics["actor/final_loss"] == same["actor/final_loss"]


def assert_close_metrics(got, expected):
    names = [n for n in expected if n.startswith(("actor/", "critic/", "advantage/"))]
    assert names
    for name in names:
        assert got[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-3, nan_ok=True), name


@pytest.mark.parametrize("kind", ["ppo", "remax", "jsd", "mix"])
def test_a_rank_without_a_row_computes_what_its_peer_does(kind):
    algorithm, experiences = {"algorithm_type": kind}, rows_for(kind, n=1, seed=2)
    _, metrics = train_alone(algorithm, experiences)
    for _, same in train_on_ranks(algorithm, experiences):
        assert_close_metrics(same, metrics)


@pytest.mark.parametrize("kind", TYPES)
def test_several_mini_batches_and_epochs_are_the_same_on_two_ranks(kind):
    settings = {"mini_batches": 2, "ppo_epochs": 2, "micro_batch_tokens": 4 * ROW_TOKENS}
    algorithm, experiences = {"algorithm_type": kind}, rows_for(kind, n=10)
    _, metrics = train_alone(algorithm, experiences, **settings)
    assert metrics["actor/updates"] == 4
    for _, same in train_on_ranks(algorithm, experiences, **settings):
        assert_close_metrics(same, metrics)

"""Rows without a finite reward, demonstrations and constant rewards, and what is said of them."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from roles_support import gradients_of, role_engine, train_alone, train_on_ranks
from trainer_support import batch_of, rows, tiny_model

from trinity_dask.experience.schema import to_table
from trinity_dask.trainer.metrics import SILENT_STEPS, Alarms
from trinity_dask.trainer.model.frozen import FrozenModel
from trinity_dask.trainer.step.row_metrics import describe_rows

UNSCORED = "advantage/unscored_rows"
KINDS = ["ppo", "rloo", "reinforceplusplus", "grpo"]


def algorithm(kind: str) -> dict:
    """With a KL loss, which also acts on tokens of advantage 0."""
    return {"algorithm_type": kind, "kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.1}}


def unscored(kind: str, reward):
    """Twelve rows, the fourth without a reward and, from the pipeline, advantage 0."""
    made = rows(12)
    made[3].reward = reward
    made[3].advantages[:] = 0.0
    return made


def same_gradients(first, second) -> None:
    assert gradients_of(first).keys() == gradients_of(second).keys()
    for name, gradient in gradients_of(first).items():
        torch.testing.assert_close(gradients_of(second)[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("reward", [None, math.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_fault_32_a_step_with_an_unscored_row_is_the_step_without_it(kind, reward):
    """Policy, critic and all that they are divided by."""
    made = unscored(kind, reward)
    with_it, metrics = train_alone(algorithm(kind), made)
    without, expected = train_alone(algorithm(kind), made[:3] + made[4:])
    same_gradients(with_it, without)
    assert (metrics[UNSCORED], expected[UNSCORED]) == (1, 0)
    for name in expected.keys() & {"critic/vf_loss", "actor/kl_loss", "actor/final_loss"}:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4)


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_an_unscored_row_is_counted_once_on_several_ranks(kind):
    made = unscored(kind, None)
    alone, _ = train_alone(algorithm(kind), made)
    for engine, metrics in train_on_ranks(algorithm(kind), made):
        assert metrics[UNSCORED] == 1
        same_gradients(alone, engine)


def test_a_token_reward_that_is_not_finite_leaves_its_row_out():
    made = rows(12)
    for row in made:
        row.token_level_reward = np.full(row.response_length, 0.1, np.float32)
        row.token_level_reward[~row.action_mask] = np.nan  # no choice of the policy's
    made[3].action_mask[0] = True
    made[3].token_level_reward[0] = np.nan
    with_it, metrics = train_alone(algorithm("ppo"), made)
    without, _ = train_alone(algorithm("ppo"), made[:3] + made[4:])
    same_gradients(with_it, without)
    assert metrics[UNSCORED] == 1


def test_a_teacher_needs_no_reward():
    made = rows(8)
    made[0].reward = None
    engine = role_engine({"algorithm_type": "on_policy_distill"})
    engine.teacher = FrozenModel(tiny_model(seed=9))
    assert engine.train_step(batch_of(made), 1)[UNSCORED] == 0


def test_a_step_without_any_reward_changes_nothing():
    made = rows(4)
    for row in made:
        row.reward, row.advantages[:] = None, 0.0
    _, metrics = train_alone(algorithm("grpo"), made)
    assert (metrics["actor/updates"], metrics[UNSCORED]) == (0, 4)


def test_advantages_that_come_from_something_else_are_trained_on():
    made = rows(8)
    for row in made:
        row.reward = None
    _, metrics = train_alone({"algorithm_type": "grpo", "kl_loss_fn": "none"}, made)
    assert metrics[UNSCORED] == 0
    assert metrics["actor/grad_norm"] > 0


# what is reported ------------------------------------------------------------------------
def test_equal_rewards_have_no_spread():
    made = rows(60)
    for row in made:
        row.reward = 0.1
    assert np.full(60, 0.1).std() > 0  # why it has to be asked for
    found = describe_rows(to_table(made), 1)
    assert found["sample/reward/std"] == 0.0
    assert found["sample/zero_variance_share"] == 1.0


def test_one_reward_that_is_not_finite_spoils_no_mean():
    made = rows(8)
    for k, row in enumerate(made):
        row.reward = [math.nan, math.inf, None, 1.0][k] if k < 4 else 0.5
    found = describe_rows(to_table(made), 1)
    assert found["sample/reward/mean"] == pytest.approx(0.6)
    assert (found["critic/score/min"], found["critic/score/max"]) == (0.5, 1.0)
    assert found["sample/zero_variance_share"] == 1.0  # of the only task with two rewards
    assert (found["sample/reward/count"], found["sample/rows"]) == (5, 8)


def test_demonstrations_are_not_rewards_of_zero():
    made = rows(8)
    for row in made[:4]:
        row.reward = 1.0
    for row in made[4:]:
        row.reward = 0.0
        row.info = {"is_expert": True, "step": 1}
    made[3].info, made[3].reward = {"is_expert": True}, 0.0
    found = describe_rows(to_table(made), 1)
    assert (found["sample/reward/mean"], found["sample/reward/std"]) == (1.0, 0.0)
    assert found["critic/score/min"] == 1.0
    assert found["sample/zero_variance_share"] == 1.0
    assert (found["sample/reward/count"], found["sample/rows"]) == (3, 8)
    for row in made:
        row.info = {"is_expert": True}
    assert "sample/reward/mean" not in describe_rows(to_table(made), 1)


@pytest.mark.parametrize(
    ("advantage", "rings"), [(0.0, True), (1e-9, True), (0.3, False), (None, False)]
)
def test_fault_41_equal_rewards_are_an_alarm_only_without_advantages(advantage, rings, caplog):
    """A teacher or step rewards can teach rows of equal reward; sft has no advantages."""
    metrics = {"sample/reward/std": 0.0, "sample/reward/count": 8.0, "actor/grad_norm": 1.3}
    if advantage is not None:
        metrics |= {"critic/advantages/min": -advantage, "critic/advantages/max": 0.0}
    alarms = Alarms()
    with caplog.at_level(logging.WARNING):
        for step in range(2 * SILENT_STEPS):
            alarms.look(step, metrics)
    assert ("had the same reward" in caplog.text) == rings


# models that only score, coefficients -----------------------------------------------------
def test_frozen_models_compute_as_few_logits_at_a_time_as_the_policy():
    engine = role_engine(algorithm("grpo"), logits_mb=1)
    asked = []
    original = engine.reference.scorer

    def scorer(*args, **kwargs):
        asked.append(original(*args, **kwargs))
        return asked[-1]

    engine.reference.scorer = scorer
    engine.train_step(batch_of(rows(4)), 1)
    assert [scorer.logits_bytes for scorer in asked] == [1 << 20]


def test_an_adaptive_coefficient_moves_by_the_rows_of_the_step_for_any_epochs():
    adaptive = {"kl_coef": 0.1, "adaptive": True, "target_kl": 1e-6, "horizon": 100}
    spec = {"algorithm_type": "grpo", "kl_loss_fn": "k2", "kl_loss_fn_args": adaptive}
    for epochs, mini_batches in ((1, 1), (2, 1), (2, 3)):
        engine, metrics = train_alone(spec, rows(12), ppo_epochs=epochs, mini_batches=mini_batches)
        assert metrics["actor/updates"] == epochs * mini_batches
        # far above the target: the error is at its bound of 0.2
        assert engine.spec.kl_loss.coef == pytest.approx(0.1 * (1 + 0.2 * 12 / 100))


@pytest.mark.parametrize(
    ("version", "gap", "rings"), [(3, 0.3, True), (2, 0.3, False), (3, 1e-3, False)]
)
def test_fault_21_a_gap_at_equal_weights_is_said_with_its_size(version, gap, rings, caplog):
    metrics = {
        "sample/model_version/min": float(version),
        "correction/gap": gap,
        "correction/ratio_p01": 0.5,
        "correction/ratio_p99": 1.0,
    }
    alarms = Alarms()
    with caplog.at_level(logging.WARNING):
        alarms.look(4, metrics)
        alarms.look(5, metrics)
    assert ("differ by 0.3 nats per token (ratio 0.5 to 1" in caplog.text) == rings
    assert len(caplog.records) == rings

"""The engine's gradient, its ratios, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from roles_support import role_engine, rows_for
from trainer_support import (
    GRPO,
    VOCAB,
    batch_of,
    engine,
    gradients,
    rows,
    save_tiny_model,
    step_config,
    tiny_model,
    weights,
)

from trinity_dask.algorithm import resolve_algorithm
from trinity_dask.algorithm.aggregate import AGGREGATION_MODES
from trinity_dask.config.schema import CriticConfig, OptimizerConfig
from trinity_dask.trainer.model.logprobs import Scorer
from trinity_dask.trainer.model.policy_model import load_policy
from trinity_dask.trainer.step.batching import Widths, micro_batches, take
from trinity_dask.trainer.step.engine import StepEngine

SGD = OptimizerConfig(optimizer_type="sgd", lr=0.0)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_fault_31_the_gradient_does_not_depend_on_micro_batches(algorithm, mode):
    cfg = {**(GRPO if algorithm == "grpo" else {"algorithm_type": "sft"}), "loss_agg_mode": mode}
    experiences = rows(16)

    def run(budget):
        trained = engine(cfg, grad_clip=0.0, micro_batch_tokens=budget, optimizer=SGD)
        metrics = trained.train_step(batch_of(experiences), 1)
        return gradients(trained), metrics

    whole, metrics = run(1 << 30)
    for budget in (16 * 8, 16 * 4, 1):
        parts, same = run(budget)
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, atol=1e-6, rtol=1e-4)
        assert same["actor/final_loss"] == pytest.approx(metrics["actor/final_loss"], abs=1e-5)


def test_fault_30_padding_does_not_leak_into_the_gradient():
    experiences = rows(6)

    def run(widen):
        batch = batch_of(experiences)
        if widen:
            extra = torch.zeros(6, 5, dtype=torch.int64)
            batch["input_ids"] = torch.cat([extra + 7, batch["input_ids"], extra + 9], dim=1)
            for name in ("attention_mask", "position_ids"):
                batch[name] = torch.cat([extra, batch[name], extra], dim=1)
            width = batch["response_mask"].shape[1]
            for name, tensor in batch.items():
                if torch.is_tensor(tensor) and tensor.shape[1:] == (width,):
                    batch[name] = torch.cat([tensor, torch.zeros(6, 5).to(tensor)], dim=1)
            batch["prompt_width"] += 5
        trained = engine(optimizer=SGD)
        trained.train_step(batch, 1)
        return gradients(trained)

    plain = run(False)
    for name, gradient in run(True).items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_fault_20_the_ratio_to_the_sampler_is_one_at_lag_zero(temperature):
    model = tiny_model()
    experiences = rows(12, model=model, temperature=temperature)
    trained = engine(model=model, temperature=temperature, mini_batches=3)
    metrics = trained.train_step(batch_of(experiences), 1)
    assert metrics["correction/gap"] < 1e-5
    for name in ("ratio_p01", "ratio_p50", "ratio_p99", "ratio_mean", "weight_mean", "ess"):
        assert metrics[f"correction/{name}"] == pytest.approx(1.0, abs=1e-3)
    off = engine(model=tiny_model(), temperature=1.0 if temperature == 0.6 else 0.6)
    assert off.train_step(batch_of(experiences), 1)["correction/gap"] > 0.1


def test_fault_21_a_truncated_sampler_shows_in_the_gap():
    model = tiny_model()
    experiences = rows(12, model=model)
    for experience in experiences:  # a sampler that renormalised over 80% of the mass
        experience.logprobs = experience.logprobs - np.float32(np.log(0.8))
    metrics = engine(model=model).train_step(batch_of(experiences), 1)
    assert metrics["correction/ratio_p50"] == pytest.approx(0.8, abs=1e-3)
    assert metrics["correction/gap"] == pytest.approx(-np.log(0.8), abs=1e-3)


def test_old_logprobs_are_those_of_the_start_in_every_mini_batch():
    """With a first mini-batch that moved the weights, the second one's ratio is not 1."""
    experiences = rows(24)
    start = tiny_model()
    trained = engine(mini_batches=3, optimizer=OptimizerConfig(lr=5e-2))
    batch = batch_of(experiences)
    plan = trained.planner.plan(batch["lengths"].numpy(), 1)
    seen = []
    original = trained.spec.policy_loss

    class Spy(type(original)):
        def __init__(self):
            self.__dict__.update(original.__dict__)

        def __call__(self, **inputs):
            seen.append({n: v.detach().clone() for n, v in inputs.items() if torch.is_tensor(v)})
            return super().__call__(**inputs)

    object.__setattr__(trained.spec, "policy_loss", Spy())
    trained.train_step(batch, 1, plan)
    assert len(seen) == 3
    scorer = Scorer(start)
    for call, update in zip(seen, plan.updates, strict=True):
        widths = Widths.of(batch)
        (in_order,) = micro_batches(update, widths, 1 << 30)
        micro = take(batch, in_order, widths)
        expected = scorer(micro).logprob.detach()
        mask = call["action_mask"]
        torch.testing.assert_close(call["old_logprob"][mask], expected[mask])
    first, second = (c["logprob"] - c["old_logprob"] for c in seen[:2])
    assert first[seen[0]["action_mask"]].abs().max() == 0
    assert second[seen[1]["action_mask"]].abs().max() > 1e-3


def test_epochs_keep_the_old_logprobs_of_the_start():
    experiences = rows(12)
    trained = engine(ppo_epochs=3, optimizer=OptimizerConfig(lr=2e-2))
    metrics = trained.train_step(batch_of(experiences), 1)
    assert metrics["actor/updates"] == 3
    assert abs(metrics["actor/ppo_kl"]) > 1e-4


def test_bypass_takes_the_samplers_logprobs_as_old():
    cfg = {**GRPO, "bypass_old_logprobs": True, "rollout_correction": {}}
    experiences = rows(12)
    metrics = engine(cfg, optimizer=SGD).train_step(batch_of(experiences), 1)
    assert abs(metrics["actor/ppo_kl"]) > 0.01  # the noise in rows() against the model
    assert metrics["correction/gap"] > 0.1


def test_fault_29_half_of_the_rows_masked_equals_the_other_half_alone():
    experiences = rows(16)
    for experience in experiences[8:]:
        experience.action_mask[:] = False
    both, alone = engine(optimizer=SGD), engine(optimizer=SGD)
    both.train_step(batch_of(experiences), 1)
    alone.train_step(batch_of(experiences[:8]), 1)
    for name, gradient in gradients(alone).items():
        torch.testing.assert_close(gradients(both)[name], gradient, atol=1e-6, rtol=1e-5)


def test_rows_without_any_action_token_move_no_weight():
    experiences = rows(4)
    for experience in experiences:
        experience.action_mask[:] = False
    trained = engine()
    trained.train_step(batch_of(rows(4, seed=9)), 1)  # so that there is momentum
    before = weights(trained)
    metrics = trained.train_step(batch_of(experiences), 2)
    assert metrics["actor/updates"] == 0
    for name, value in weights(trained).items():
        torch.testing.assert_close(value, before[name], atol=0, rtol=0)


def test_a_policy_learns_what_it_is_rewarded_for():
    trained = engine(optimizer=OptimizerConfig(lr=1e-2))
    liked = rows(8, seed=1)
    for experience in liked:
        experience.advantages[:] = 1.0
    before = [trained.sequence_logprobs([e.tokens.tolist()])[0].sum() for e in liked]
    for step in range(1, 11):
        trained.train_step(batch_of(liked), step)
    after = [trained.sequence_logprobs([e.tokens.tolist()])[0].sum() for e in liked]
    assert np.mean(after) > np.mean(before)


def test_sft_reaches_the_demonstrations():
    trained = engine({"algorithm_type": "sft"}, optimizer=OptimizerConfig(lr=2e-2))
    shown = rows(4, seed=2)
    losses = [trained.train_step(batch_of(shown), s)["actor/sft_loss"] for s in range(1, 61)]
    assert losses[0] > 2.0
    assert losses[-1] < 0.5
    assert losses[0] < 3 * np.log(VOCAB)


def test_kl_and_entropy_take_part():
    cfg = {
        **GRPO,
        "kl_loss_fn": "k2",
        "kl_loss_fn_args": {"kl_coef": 0.5},
        "entropy_loss_fn": "default",
        "entropy_loss_fn_args": {"entropy_coef": 0.01},
    }
    trained = engine(cfg, reference=tiny_model(seed=1), optimizer=SGD)
    metrics = trained.train_step(batch_of(rows(8)), 1)
    expected = (
        metrics["actor/pg_loss"] - 0.01 * metrics["actor/entropy"] + 0.5 * metrics["actor/kl_loss"]
    )
    assert metrics["actor/kl_loss"] > 0
    assert metrics["actor/final_loss"] == pytest.approx(expected, abs=1e-5)
    same = engine(cfg, reference=tiny_model(), optimizer=SGD).train_step(batch_of(rows(8)), 1)
    assert same["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("algorithm", ["grpo", "bypass", "sft"])
def test_the_corrected_kl_takes_the_ratio_that_the_policy_loss_takes(algorithm):
    """With two mini-batches the second one's weights have moved; no stale zeros come in."""
    cfg = {
        "grpo": {**GRPO, "rollout_correction": {}},
        "bypass": {**GRPO, "rollout_correction": {}, "bypass_old_logprobs": True},
        "sft": {"algorithm_type": "sft"},
    }[algorithm]
    cfg = {**cfg, "kl_loss_fn": "corrected_k3", "kl_loss_fn_args": {"kl_coef": 1.0}}
    model = tiny_model()
    experiences = rows(12, model=model)  # the sampler is the start policy: all olds agree
    trained = engine(cfg, model, reference=tiny_model(seed=1), mini_batches=2, optimizer=SGD)
    metrics = trained.train_step(batch_of(experiences), 1)
    plain = engine(
        {**cfg, "kl_loss_fn": "k3"},
        tiny_model(),
        reference=tiny_model(seed=1),
        mini_batches=2,
        optimizer=SGD,
    ).train_step(batch_of(experiences), 1)
    assert metrics["actor/kl_loss"] == pytest.approx(plain["actor/kl_loss"], rel=1e-4)


def test_gradient_checkpointing_gives_the_same_gradient(tmp_path):
    path = save_tiny_model(tmp_path)
    found = []
    for checkpointing in (False, True):
        model = load_policy(path, gradient_checkpointing=checkpointing)
        assert not any(module.training for module in model.modules())
        trained = engine(model=model, optimizer=SGD)
        trained.train_step(batch_of(rows(6)), 1)
        found.append(gradients(trained))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights():
    trained = engine(dtype="bfloat16")
    assert (
        trained.scorer.response_logits(
            take(batch_of(rows(2)), np.arange(2), Widths.of(batch_of(rows(2))))
        ).dtype
        == torch.float32
    )
    metrics = trained.train_step(batch_of(rows(8)), 1)
    exact = engine().train_step(batch_of(rows(8)), 1)
    assert metrics["actor/grad_norm"] == pytest.approx(exact["actor/grad_norm"], rel=0.1)
    assert metrics["actor/grad_norm"] != exact["actor/grad_norm"]
    assert {p.dtype for p in trained.policy.module.parameters()} == {torch.float32}


def test_all_updates_of_a_step_share_the_learning_rate():
    schedule = OptimizerConfig(lr=1e-2, lr_scheduler_type="linear", lr_warmup_steps=4)
    trained = engine(mini_batches=4, optimizer=schedule, total_steps=8)
    metrics = trained.train_step(batch_of(rows(16)), 2)
    assert metrics["actor/lr"] == pytest.approx(0.5e-2)
    assert metrics["actor/updates"] == 4


@pytest.mark.parametrize("missing", ["advantages", "logprobs"])
def test_missing_tensors_are_named(missing):
    experiences = rows(3)
    setattr(experiences[1], missing, None)
    with pytest.raises(ValueError, match="row has no"):
        engine().train_step(batch_of(experiences), 1)


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change():
    trained = engine()
    experiences = rows(4)
    experiences[0].advantages[:] = np.inf
    before = weights(trained)
    with pytest.raises(FloatingPointError, match="train step 7"):
        trained.train_step(batch_of(experiences), 7)
    for name, value in weights(trained).items():
        torch.testing.assert_close(value, before[name], atol=0, rtol=0)


def test_state_round_trip_continues_bit_for_bit():
    first = engine(mini_batches=2)
    for step in (1, 2):
        first.train_step(batch_of(rows(8, seed=step)), step)
    second = engine(model=tiny_model(seed=5), mini_batches=2)
    second.policy.load_weights(weights(first))
    second.policy.load_state_tensors({n: t.clone() for n, t in first.policy.state_tensors()})
    for trained in (first, second):
        trained.train_step(batch_of(rows(8, seed=3)), 3)
    for name, value in weights(first).items():
        torch.testing.assert_close(weights(second)[name], value, atol=0, rtol=0)


def test_weights_of_another_model_are_refused():
    trained = engine()
    with pytest.raises(ValueError, match=r"first difference: 'lm_head\.weight'"):
        trained.policy.load_weights({**weights(trained), "lm_head.weight": torch.zeros(1)})


def test_settings_come_from_the_config():
    cfg = step_config()
    cfg.buffer.total_steps = 60
    cfg.trainer.mini_batches = 4
    cfg.model.temperature = 0.7
    trained = StepEngine(cfg, resolve_algorithm(GRPO), tiny_model())
    assert trained.policy.schedule.total_steps == 60
    assert trained.planner.policy.mini_batches == 4
    assert trained.scorer.temperature == 0.7


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_a_grad_clip_of_0_does_not_clip(clip):
    sgd = OptimizerConfig(optimizer_type="sgd", lr=1.0, weight_decay=0.0)
    critic = CriticConfig(optimizer=sgd, grad_clip=clip)
    algorithm = {"algorithm_type": "ppo", "kl_penalty_fn": "none"}
    trained = role_engine(algorithm, optimizer=sgd, critic=critic, grad_clip=clip)
    start = {name: weights_of(model) for name, model in trained.trainables.items()}
    metrics = trained.train_step(batch_of(rows_for("ppo")), 1)
    for name, model in trained.trainables.items():
        moved = [(w - start[name][key]).square().sum() for key, w in weights_of(model).items()]
        norm = metrics[f"{name}/grad_norm"]
        assert norm > 2e-3
        assert float(sum(moved).sqrt()) == pytest.approx(clip or norm, rel=1e-2)


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.full_weights()}

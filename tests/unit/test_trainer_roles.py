"""Critic, reference, teacher: what they compute, when they are used, and what is refused."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
import torch
from roles_support import (
    RESPONSE_TOKENS,
    SGD,
    gradients_of,
    pairs,
    role_engine,
    rows_for,
    tiny_critic,
    train_alone,
)
from trainer_support import (
    batch_of,
    grpo_config,
    plan_updates,
    rows,
    save_tiny_model,
    tiny_model,
    weights,
)

from trinity_dask.algorithm import resolve_algorithm
from trinity_dask.algorithm.aggregate import Denominator
from trinity_dask.algorithm.value_loss import value_loss
from trinity_dask.config.schema import Config, CriticConfig, OptimizerConfig
from trinity_dask.demo.tokenizer import ascii_tokenizer, bpe_tokenizer
from trinity_dask.experience.schema import encode, to_table
from trinity_dask.trainer.metrics import SILENT_STEPS, Alarms
from trinity_dask.trainer.model.frozen import FrozenModel, load_reference, load_teacher
from trinity_dask.trainer.model.policy_model import load_policy
from trinity_dask.trainer.model.value_model import ValueScorer, load_critic, load_value_model
from trinity_dask.trainer.ranks.rank import TrainerRank
from trinity_dask.trainer.sources import TrainInput
from trinity_dask.trainer.step.batching import Widths, micro_batches, take
from trinity_dask.trainer.step.engine import StepEngine
from trinity_dask.trainer.step.row_metrics import describe_rows
from trinity_dask.trainer.step.step_advantages import token_rewards

PPO = {"algorithm_type": "ppo", "kl_loss_fn": "none"}
FLAT = {
    "sample/reward/std": 0.0,
    "sample/reward/count": 8.0,
    "critic/advantages/min": 0.0,
    "critic/advantages/max": 0.0,
}
LEARN = CriticConfig(optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0))


# the critic ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("target", "loss", "moves"), [(1.5, 0.125, True), (3.0, 1.62, False)], ids=["inside", "beyond"]
)
def test_value_clipping_has_the_reference_values(target, loss, moves):
    """V_old = 1, V = 2, clip 0.2: see the table of value losses."""
    values = torch.tensor([[2.0]], requires_grad=True)
    old, returns = torch.tensor([[1.0]]), torch.tensor([[target]])
    found, metrics = value_loss(
        values, old, returns, torch.tensor([[True]]), Denominator(1, 1), clip_range=0.2
    )
    found.backward()
    assert float(found) == pytest.approx(loss)
    assert (values.grad.abs().item() > 0) == moves
    assert float(metrics["vf_clipfrac"]) == float(not moves)


def test_a_value_is_that_of_the_state_before_its_token():
    """Changing token r changes no value up to r, and the ones after it."""
    experiences = rows(1, equal_prompts=True, seed=4)
    batch = batch_of(experiences)
    widths = Widths.of(batch)
    scorer = ValueScorer(tiny_critic())
    before = scorer(take(batch, np.arange(1), widths))[0]
    place = 1
    batch["input_ids"][0, int(batch["prompt_width"]) + place] += 1
    after = scorer(take(batch, np.arange(1), widths))[0]
    torch.testing.assert_close(after[: place + 1], before[: place + 1])
    assert (after[place + 1 :] - before[place + 1 :]).abs().min() > 1e-4


def test_padding_does_not_move_a_value():
    experiences = rows(5, seed=2)
    batch, scorer = batch_of(experiences), ValueScorer(tiny_critic())
    together = scorer(take(batch, np.arange(5), Widths.of(batch)))
    for k, experience in enumerate(experiences):
        alone = batch_of([experience])
        expected = scorer(take(alone, np.arange(1), Widths.of(alone)))[0]
        torch.testing.assert_close(together[k, : len(expected)], expected, atol=1e-5, rtol=1e-4)


def test_a_new_head_starts_at_zero_and_a_trained_one_is_kept(tmp_path):
    critic = load_value_model(save_tiny_model(tmp_path / "policy"))
    batch = batch_of(rows(3))
    micro = take(batch, np.arange(3), Widths.of(batch))
    assert ValueScorer(critic)(micro).abs().max() == 0
    with torch.no_grad():
        critic.score.weight += 0.5
    critic.save_pretrained(tmp_path / "critic")
    again = load_value_model(tmp_path / "critic")
    torch.testing.assert_close(ValueScorer(again)(micro), ValueScorer(critic)(micro))


def test_the_critic_learns_returns_and_warms_up_alone():
    critic = CriticConfig(optimizer=LEARN.optimizer, warmup_steps=3, mini_batches=2)
    engine = role_engine(PPO, critic=critic, optimizer=LEARN.optimizer)
    start = weights(engine)
    batch = batch_of(rows(16))
    losses = []
    for step in range(1, 4):
        metrics = engine.train_step(batch, step)
        losses.append(metrics["critic/vf_loss"])
        assert "actor/final_loss" not in metrics
    assert losses[-1] < losses[0]
    assert all(torch.equal(start[name], value) for name, value in weights(engine).items())
    metrics = engine.train_step(batch, 4)
    assert metrics["actor/updates"] == 1
    assert any(not torch.equal(start[name], value) for name, value in weights(engine).items())
    for name in ("values/mean", "returns/mean", "advantages/mean", "rewards/mean", "lr"):
        assert f"critic/{name}" in metrics


def test_old_values_are_those_of_the_start_in_every_update_of_the_critic():
    """Without clipping active at the start, the first update alone has clip fraction 0."""
    settings = {"critic": CriticConfig(optimizer=LEARN.optimizer, epochs=4, value_clip=0.01)}
    _, metrics = train_alone(PPO, rows(8), **settings)
    assert 0 < metrics["critic/vf_clipfrac"] < 1


# rewards per token -----------------------------------------------------------------------
def test_the_reward_is_at_the_last_token_that_the_policy_chose():
    row = next(row for row in rows(8, seed=3) if row.response_length > 2)
    row.action_mask = np.ones(row.response_length, bool)
    row.action_mask[-1] = False  # a tool has the last word
    row.reward = 2.0
    expected = np.zeros(row.response_length, np.float32)
    expected[-2] = 2.0
    assert token_rewards(batch_of([row]))[0].tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["ppo", "rloo", "reinforceplusplus"])
def test_fault_32_a_row_without_reward_moves_no_other(kind):
    """The same gradient whether the unscored row is masked or merely has no reward."""
    algorithm = {"algorithm_type": kind, "kl_loss_fn": "none"}
    experiences = rows(12)
    experiences[3].reward = None
    _, without = train_alone(algorithm, experiences)
    experiences[3].tokens = experiences[3].tokens[::-1].copy()
    _, other = train_alone(algorithm, experiences)
    for name in ("advantages/mean", "advantages/max", "rewards/mean"):
        assert other[f"critic/{name}"] == pytest.approx(without[f"critic/{name}"], abs=1e-5)


# preference pairs ------------------------------------------------------------------------
def test_pairs_stay_together_in_shuffles_ranks_and_passes():
    lengths = np.random.default_rng(0).integers(4, 14, 20)
    widths = Widths(lengths // 2, lengths - lengths // 2)
    for world in (1, 2, 3):
        for rank in range(world):
            plan = plan_updates(
                lengths,
                seed=1,
                step=2,
                mini_batches=3,
                epochs=2,
                rank=rank,
                world_size=world,
                unit=2,
            )
            for update in plan.updates:
                units = plan.rows[update].reshape(-1, 2)
                assert (units[:, 0] % 2 == 0).all()
                assert (units[:, 1] == units[:, 0] + 1).all()
            own = Widths(widths.prompt[plan.rows], widths.response[plan.rows])
            for budget in (1, 30, 100):
                for part in micro_batches(plan.updates[0], own, budget, unit=2):
                    assert (plan.rows[part].reshape(-1, 2) % 2 == [0, 1]).all()


@pytest.mark.parametrize("damage", ["swapped", "torn"])
def test_rows_that_are_no_pairs_are_refused(damage):
    experiences = pairs(3)
    if damage == "swapped":
        experiences[2:4] = experiences[3:1:-1]
    else:
        experiences = experiences[1:-1]
    with pytest.raises(ValueError, match="must be followed by the rejected one"):
        train_alone({"algorithm_type": "dpo"}, experiences)


def test_dpo_prefers_the_chosen_answers_more_with_every_step():
    engine = role_engine({"algorithm_type": "dpo"}, optimizer=OptimizerConfig(lr=3e-3))
    engine.reference = FrozenModel(tiny_model())  # the start itself: z = 0
    batch = batch_of(pairs(8))
    found = [engine.train_step(batch, step) for step in range(1, 9)]
    assert found[0]["actor/dpo_loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert found[-1]["actor/dpo_loss"] < 0.6
    assert found[-1]["actor/chosen_reward"] > found[-1]["actor/rejected_reward"]


# reference and teacher -------------------------------------------------------------------
def test_a_model_that_no_term_uses_is_not_loaded(tmp_path):
    cfg, path = Config(), str(tmp_path / "there is nothing")
    off = {"algorithm_type": "grpo", "kl_loss_fn": "none"}
    zero = {"algorithm_type": "grpo", "kl_loss_fn_args": {"kl_coef": 0.0}}
    for algorithm in (off, zero):
        spec = resolve_algorithm(algorithm)
        assert load_reference(cfg, spec, path, "cpu") is None
        assert load_critic(cfg, spec, path, "cpu") is None
        assert load_teacher(cfg, spec, None, "cpu") is None
    with pytest.raises(OSError, match="nothing"):
        load_reference(cfg, resolve_algorithm({"algorithm_type": "grpo"}), path, "cpu")


def test_the_teacher_scores_unless_the_rows_bring_its_logprobs():
    algorithm = {"algorithm_type": "on_policy_distill"}
    experiences = rows(6)
    engine = role_engine(algorithm)
    with pytest.raises(ValueError, match=r"model\.teacher_model_path"):
        engine.train_step(batch_of(experiences), 1)
    engine.teacher = FrozenModel(tiny_model(seed=9))
    scored = engine.train_step(batch_of(experiences), 1)
    assert "time/teacher_log_prob" in scored
    given = rows_for("on_policy_distill", 6)
    assert "time/teacher_log_prob" not in engine.train_step(batch_of(given), 1)


def test_a_student_comes_nearer_to_its_teacher():
    algorithm = {"algorithm_type": "on_policy_distill"}
    engine = role_engine(algorithm, optimizer=OptimizerConfig(lr=3e-3))
    engine.teacher = FrozenModel(tiny_model(seed=9))
    batch = batch_of(rows(16, seed=5))
    teacher = engine.teacher.scorer()

    def liked():  # tokens that the teacher finds likelier than the student does
        micro = take(batch, np.arange(16), Widths.of(batch))
        with torch.no_grad():
            gap = teacher(micro).logprob - engine.scorer(micro).logprob
        return gap[micro.fields["action_mask"]]

    first = liked()
    for step in range(1, 6):
        engine.train_step(batch, step)
    moved = first - liked()  # how far the student's own log-probs rose
    assert moved[first > 1].mean() > 0 > moved[first < -1].mean()


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    cfg = Config()
    cfg.model.teacher_model_path = str(tmp_path)
    spec = resolve_algorithm({"algorithm_type": "jsd"})
    with pytest.raises(ValueError, match="50 tokens in its vocabulary and the policy 40"):
        load_teacher(cfg, spec, tiny_model(), "cpu")


def padded_llama(directory, n_words, tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=n_words, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize(("own", "of_teacher"), [(99, 128), (128, 99)])
def test_a_teacher_may_pad_its_vocabulary_otherwise(tmp_path, own, of_teacher):
    tokenizer = ascii_tokenizer()
    cfg = Config()
    cfg.model.model_path = padded_llama(tmp_path / "own", own, tokenizer)
    cfg.model.teacher_model_path = padded_llama(tmp_path / "teacher", of_teacher, tokenizer)
    spec, policy = resolve_algorithm({"algorithm_type": "jsd"}), load_policy(tmp_path / "own")
    teacher = load_teacher(cfg, spec, policy, "cpu")
    made = StepEngine(cfg, spec, policy, teacher=teacher)
    metrics = made.train_step(batch_of(rows(6)), 1)
    assert np.isfinite(metrics["actor/final_loss"])
    assert metrics["actor/grad_norm"] > 0


def test_a_teacher_with_other_tokens_of_the_same_number_is_refused(tmp_path):
    mine, theirs = ascii_tokenizer(), bpe_tokenizer()
    cfg = Config()
    cfg.model.model_path = padded_llama(tmp_path / "own", 192, mine)
    cfg.model.teacher_model_path = padded_llama(tmp_path / "teacher", 192, theirs)
    with pytest.raises(ValueError, match="other numbers for 3 of the policy's 99 tokens"):
        load_teacher(
            cfg, resolve_algorithm({"algorithm_type": "jsd"}), load_policy(tmp_path / "own"), "cpu"
        )


def test_the_penalty_lowers_rewards_and_an_adaptive_coefficient_is_remembered():
    algorithm = {
        "algorithm_type": "rloo",
        "kl_penalty_fn": "k1",
        "kl_penalty_fn_args": {"kl_coef": 0.1, "adaptive": True, "target_kl": 0.1, "horizon": 50},
        "kl_loss_fn": "none",
    }
    engine, metrics = train_alone(algorithm, rows(12))
    assert metrics["advantage/kl_coef"] == 0.1
    assert metrics["critic/rewards/mean"] != metrics["advantage/kl"]
    state = engine.state_dict()
    assert state["kl_penalty"]["coef"] != 0.1
    resumed = role_engine(algorithm)
    resumed.load_state_dict(state)
    assert resumed.train_step(batch_of(rows(12)), 2)["advantage/kl_coef"] == pytest.approx(
        state["kl_penalty"]["coef"]
    )
    assert role_engine({"algorithm_type": "rloo"}).state_dict() == {}


def test_dr_grpo_divides_by_the_response_budget():
    algorithm = {"algorithm_type": "dr_grpo", "entropy_loss_fn": "none"}
    experiences = rows(8)
    one, _ = train_alone(algorithm, experiences, max_response_tokens=RESPONSE_TOKENS)
    two, _ = train_alone(algorithm, experiences, max_response_tokens=2 * RESPONSE_TOKENS)
    for name, gradient in gradients_of(one).items():
        torch.testing.assert_close(gradients_of(two)[name], gradient / 2)


# what is reported ------------------------------------------------------------------------
def test_fault_42_ratios_are_reported_as_they_were_before_clipping():
    algorithm = {"algorithm_type": "grpo", "kl_loss_fn": "none"}
    learn = OptimizerConfig(lr=5e-2)
    _, metrics = train_alone(algorithm, rows(24), mini_batches=3, optimizer=learn)
    assert metrics["update/ratio_max"] > 1.2 + 0.3  # beyond what the loss lets through
    assert 0 < metrics["update/ess"] < 1
    rules = {"mode": "token_mask", "cap": 1.05, "sequence_filter": "geometric"}
    _, metrics = train_alone({**algorithm, "rollout_correction": rules}, rows(24))
    assert metrics["correction/ratio_max"] > 1.05
    for rule in ("token_mask", "geometric_filter"):
        assert 0 < metrics[f"correction/masked_share/{rule}"] <= 1


def test_rows_are_described_by_task_and_by_token():
    experiences = rows(8)
    for k, row in enumerate(experiences):
        row.reward = 1.0 if k < 4 else float(k % 2)
    experiences[0].truncate_status = "response_truncated"
    found = describe_rows(to_table(experiences), 1)
    assert found["sample/zero_variance_share"] == 0.5
    assert found["sample/truncated_share"] == found["response_length/clip_ratio"] == 1 / 8
    assert (found["critic/score/min"], found["critic/score/max"]) == (0.0, 1.0)
    chosen = np.concatenate([row.advantages[row.action_mask] for row in experiences])
    assert found["critic/advantages/mean"] == pytest.approx(chosen.mean(), abs=1e-6)
    assert found["prompt_length/max"] == max(row.prompt_length for row in experiences)


@pytest.mark.parametrize(
    ("metrics", "steps", "said"),
    [
        ({"sample/truncated_share": 0.6}, 1, "60% of the answers"),
        (FLAT, SILENT_STEPS, "had the same reward"),
        ({"actor/grad_norm": 0.0}, SILENT_STEPS, "gradient was exactly 0"),
        ({"actor/updates": 0.0}, SILENT_STEPS, "gradient was exactly 0"),
    ],
)
def test_fault_41_a_run_that_learns_nothing_says_so_once(metrics, steps, said, caplog):
    alarms = Alarms()
    with caplog.at_level(logging.WARNING):
        for step in range(1, steps):
            alarms.look(step, metrics)
        assert said not in caplog.text
        for step in range(steps, steps + 3):
            alarms.look(step, metrics)
    assert caplog.text.count(said) == 1


def test_a_step_that_is_fine_ends_the_count(caplog):
    alarms = Alarms()
    for step in range(3 * SILENT_STEPS):
        good = step % SILENT_STEPS == SILENT_STEPS - 1
        alarms.look(step, {"actor/grad_norm": float(good)})
    assert not caplog.records


def test_every_setting_of_the_critic_is_taken(tmp_path):
    engine = role_engine(PPO, critic=CriticConfig(optimizer=SGD, epochs=3, mini_batches=2))
    plan = engine.planner.plan(np.full(8, 5), 1)
    assert len(plan.critic_updates) == 6
    assert len(plan.updates) == 1


def test_a_resumed_critic_is_bit_equal(tmp_path):
    """Weights and optimizer of both models come back; the next step is the same."""
    path = save_tiny_model(tmp_path / "model")
    cfg = grpo_config(tmp_path / "job", path, mini_batches=2)
    cfg.algorithm.algorithm_type = "ppo"
    cfg.critic = CriticConfig(optimizer=LEARN.optimizer, mini_batches=2)

    async def prepared(checkpoint=None):
        rank = TrainerRank(cfg, 0, 1)
        await rank.prepare("127.0.0.1:1", 1, path, checkpoint)
        return rank

    def given(seed):
        return TrainInput(payload=encode(rows(8, seed=seed), {}))

    async def main():
        first = await prepared()
        await first.train_step(given(1), 1)
        saved = await first.save_checkpoint(cfg.job_dir, 1, {"step": 1}, False)
        second = await prepared(saved)
        found = [await rank.train_step(given(2), 2) for rank in (first, second)]
        for rank in (first, second):
            await rank.close()
        return found

    first, second = asyncio.run(main())
    assert (tmp_path / "job" / "global_step_1" / "critic" / "model.safetensors").exists()
    names = [name for name in first if not name.startswith(("time/", "perf/"))]
    assert {n: first[n] for n in names} == {n: second[n] for n in names}
    assert first["critic/grad_norm"] > 0


@pytest.mark.parametrize("algorithm", [{"algorithm_type": "sft"}, {"algorithm_type": "raft"}])
def test_an_empty_first_mini_batch_is_skipped(algorithm):
    experiences = rows(8)
    engine = role_engine(algorithm, mini_batches=2)
    for k in engine.planner.plan(batch_of(experiences)["lengths"].numpy(), 1).updates[0]:
        experiences[k].action_mask[:] = False
    assert engine.train_step(batch_of(experiences), 1)["actor/updates"] == 1

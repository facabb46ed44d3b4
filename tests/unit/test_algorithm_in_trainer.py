"""In-trainer advantages: padding, masks and peers that must not matter; exact expectations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.algorithm import ADVANTAGE_FN
from trinity_dask.algorithm.advantages import runs_in_trainer
from trinity_dask.algorithm.advantages.distill import JSDAdvantage
from trinity_dask.algorithm.advantages.in_trainer import whiten
from trinity_dask.algorithm.entropy import token_entropy, token_necs
from trinity_dask.algorithm.kl import KLPenalty
from trinity_dask.algorithm.policy_losses import generalised_jsd

NAMES = [name for name in ADVANTAGE_FN.names() if runs_in_trainer(ADVANTAGE_FN.get(name)())]
TOKENS = ("values", "old_logprobs", "ref_logprobs", "teacher_logprobs", "entropys", "necs")


def batch(rows=6, width=7, seed=0, mask=None):
    generator = torch.Generator().manual_seed(seed)
    if mask is None:
        mask = torch.rand(rows, width, generator=generator) > 0.3
        mask[:, 0] = True
    made = {name: -torch.rand(rows, width, generator=generator) for name in TOKENS}
    rewards = torch.zeros(rows, width)
    rewards[:, -1] = torch.rand(rows, generator=generator)
    return made | {
        "token_level_rewards": rewards,
        "action_mask": mask,
        "uid": [str(k // 2) for k in range(rows)],
        "run": [k % 2 for k in range(rows)],
        "reward_baselines": torch.rand(rows, generator=generator),
    }


def run(name, made):
    result, metrics = ADVANTAGE_FN.get(name)()(dict(made))
    return result["advantages"], result["returns"], metrics


@pytest.mark.parametrize("name", NAMES)
def test_fault_26_and_30_padding_changes_nothing(name):
    made = batch()
    advantages, returns, metrics = run(name, made)
    wide = {
        n: torch.cat([t, torch.full_like(t, float("nan") if t.is_floating_point() else 0)], 1)
        if torch.is_tensor(t) and t.dim() == 2
        else t
        for n, t in made.items()
    }
    wider, wider_returns, same = run(name, wide)
    torch.testing.assert_close(wider[:, :7], advantages)
    torch.testing.assert_close(wider_returns[:, :7], returns)
    assert not wider[:, 7:].any()
    assert not wider_returns[:, 7:].any()
    assert same == pytest.approx(metrics)
    assert not advantages[~made["action_mask"]].any()


@pytest.mark.parametrize("name", NAMES)
def test_fault_32_a_masked_row_moves_no_other(name):
    made = batch()
    made["action_mask"][5] = False
    before, _, _ = run(name, made)
    made["token_level_rewards"][5] = 50.0
    for tensor in TOKENS:
        made[tensor][5] *= 7.0
    after, _, _ = run(name, made)
    torch.testing.assert_close(after, before)
    assert not after[5].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_a_valid_token_gives_zeros(name):
    made = batch(mask=torch.zeros(6, 7, dtype=torch.bool))
    advantages, returns, metrics = run(name, made)
    assert not advantages.any()
    assert not returns.any()
    assert all(value == value for value in metrics.values())


@pytest.mark.parametrize("name", [n for n in NAMES if ADVANTAGE_FN.get(n)().__class__.__dict__])
def test_a_missing_tensor_is_named(name):
    fn = ADVANTAGE_FN.get(name)()
    for tensor in getattr(fn, "needs", ()):
        made = batch()
        del made[tensor]
        with pytest.raises(ValueError, match=tensor):
            fn(made)


def test_fault_25_a_reward_passes_tool_tokens():
    """Mask [1,1,0,0,1,1], reward 1 at the end; also when the tool's own token has it."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    for place, expected in ((5, [1, 1, 0, 0, 1, 1]), (3, [1, 1, 0, 0, 0, 0])):
        made = batch(1, 6, mask=mask) | {"token_level_rewards": torch.zeros(1, 6)}
        made["token_level_rewards"][0, place] = 1.0
        _, returns, _ = run("reinforceplusplus", made)
        assert returns[0].tolist() == expected


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=8),
    st.sampled_from(["rloo", "grpo_verl", "opmd_verl", "reinforceplusplus_baseline"]),
)
def test_fault_28_groups_sum_to_zero(rewards, name):
    n = len(rewards)
    made = batch(n, 1, mask=torch.ones(n, 1, dtype=torch.bool)) | {
        "uid": ["a"] * n,
        "run": list(range(n)),
    }
    made["token_level_rewards"] = torch.tensor(rewards)[:, None]
    advantages, _, _ = run(name, made)
    assert abs(float(advantages.sum())) < 1e-3


def test_fault_27_leave_one_out_is_bounded():
    made = batch(8, 1, mask=torch.ones(8, 1, dtype=torch.bool)) | {"uid": ["a"] * 8}
    made["token_level_rewards"] = torch.tensor([0.0] + [0.95] * 7)[:, None]
    for name in ("rloo", "grpo_verl", "reinforceplusplus_baseline"):
        advantages, _, _ = run(name, made)
        assert advantages.abs().max() < 3


def test_whitening_is_over_valid_tokens_alone():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    values = torch.tensor([[1.0, 2.0, 1e6], [4.0, float("nan"), 0.0]])
    found = whiten(values, mask)
    assert abs(float(found.sum())) < 1e-9
    assert float(found[mask].var()) == pytest.approx(1.0, abs=1e-6)
    assert not whiten(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool)).any()
    assert not whiten(values, mask & (values == 4.0)).any()


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_jsd_advantage_is_the_gradient_of_the_divergence(beta):
    """Σ_y q(y) A(y) ∇log q(y) = −∇ divergence, over the whole vocabulary."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, generator=generator).double().requires_grad_()
    logq = logits.log_softmax(-1)
    logp = torch.randn(6, generator=generator).double().log_softmax(-1)
    fn = JSDAdvantage(lambda_coef=beta, ratio_cap=1e9)
    divergence = generalised_jsd(logq, logp, beta)
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    with torch.no_grad():
        advantage, q = -fn.derivative(logq, logp), logq.exp()
    (sampled,) = torch.autograd.grad((q * advantage * logq).sum(), logits)
    torch.testing.assert_close(sampled, -exact)
    estimate = fn.estimate(logq.detach(), logp)
    assert float((q * estimate).sum()) == pytest.approx(divergence.item())
    assert (estimate >= -1e-12).all()


def test_the_jsd_advantage_pulls_toward_the_teacher_from_both_sides():
    made = batch(2, 2, mask=torch.ones(2, 2, dtype=torch.bool))
    made["teacher_logprobs"] = made["old_logprobs"] + torch.tensor([[1.0, -1.0], [0.3, -0.3]])
    for beta in (0.0, 0.25, 0.5, 0.75, 1.0):
        result, _ = JSDAdvantage(lambda_coef=beta)(dict(made))
        assert (result["advantages"][:, 0] > 0).all()
        assert (result["advantages"][:, 1] < 0).all()


def test_equal_teacher_and_student_teach_nothing():
    made = batch()
    made["teacher_logprobs"] = made["old_logprobs"].clone()
    for name in ("jsd", "on_policy_distill"):
        advantages, _, metrics = run(name, made)
        assert advantages.abs().max() < 1e-6
        assert metrics["advantages/mean"] == pytest.approx(0.0, abs=1e-7)


def test_a_temperature_is_refused():
    with pytest.raises(ValueError, match="temperature"):
        JSDAdvantage(temperature=0.7)


def test_the_entropy_change_is_that_of_the_scores():
    """ΔH of a small step along (e_k − p) is −ε(S_k − necs): theorem 3.3 of arXiv 2602.03392."""
    logits = torch.randn(5, generator=torch.Generator().manual_seed(5)).double()
    logp = logits.log_softmax(-1)
    p, entropy, necs = logp.exp(), token_entropy(logits), token_necs(logits)
    for k in range(5):
        step = 1e-6 * (torch.eye(5, dtype=torch.float64)[k] - p)
        change = (token_entropy(logits + step) - entropy) / 1e-6
        score = p[k] * (entropy + logp[k])
        assert float(change) == pytest.approx(-float(score - necs), abs=1e-4)


def guard_batch():
    """Two rows of one group, rewards 1 and 0; token 3 of the second is very unlikely."""
    made = batch(2, 4, mask=torch.ones(2, 4, dtype=torch.bool)) | {"uid": ["a", "a"]}
    made["token_level_rewards"] = torch.tensor([[0, 0, 0, 1.0], [0, 0, 0, 0]])
    made["old_logprobs"] = torch.tensor([[-0.7] * 4, [-0.7, -0.7, -0.7, -1.2]])
    made["entropys"] = torch.full((2, 4), 0.69)
    made["necs"] = torch.full((2, 4), 0.0)
    return made


@pytest.mark.parametrize(("name", "args"), [("clipb", {}), ("clipv", {"mu": 2.0})])
def test_entropy_guards_spare_the_token_and_keep_the_mask(name, args):
    made = guard_batch()
    result, metrics = ADVANTAGE_FN.get(name)(**args)(dict(made))
    spared = (result["advantages"] == 0).nonzero().tolist()
    assert spared == [[1, 3]]
    assert result["action_mask"].all()
    assert metrics["frac_clipped"] == pytest.approx(1 / 8)
    assert metrics["frac_clipped_neg"] == pytest.approx(1 / 4)
    assert metrics["frac_clipped_pos"] == 0.0


@pytest.mark.parametrize(("name", "args"), [("clipb", {}), ("clipv", {"max_frac": 1.0})])
def test_entropy_guards_leave_tokens_of_good_answers(name, args):
    made = guard_batch()
    made["old_logprobs"][0, 0] = -1.2  # as unlikely as the other one, but A > 0
    result, metrics = ADVANTAGE_FN.get(name)(mu=1.0, **args)(made)
    assert (result["advantages"] == 0).nonzero().tolist() == [[1, 3]]
    assert metrics["frac_clipped_pos"] == 0.0


def test_clipv_spares_at_most_a_share():
    made = guard_batch()
    made["necs"] = torch.tensor([[0, 0, 0, 0], [0, 0, 0.5, 0.6]]).float()
    result, _ = ADVANTAGE_FN.get("clipv")(mu=0.5, max_frac=1e-4)(made)
    assert (result["advantages"][1] == 0).tolist() == [False, False, False, True]


def test_the_penalty_is_taken_from_valid_tokens_and_adapts_once():
    made = batch()
    mask = made["action_mask"]
    before = made["token_level_rewards"].clone()
    penalty = KLPenalty("k1", 0.1, adaptive=True, target_kl=1e-3, horizon=60)
    result, metrics = penalty(dict(made))
    delta = (made["old_logprobs"] - made["ref_logprobs"]) * mask
    torch.testing.assert_close(result["token_level_rewards"], before - 0.1 * delta)
    means = delta.sum(1) / mask.sum(1)
    assert metrics == pytest.approx({"kl": float(means.mean()), "kl_coef": 0.1})
    error = max(min(metrics["kl"] / 1e-3 - 1, 0.2), -0.2)
    assert penalty.coef == pytest.approx(0.1 * (1 + error * 6 / 60))
    made.pop("ref_logprobs")
    with pytest.raises(ValueError, match="reference model"):
        penalty(made)
    with pytest.raises(ValueError, match="horizon"):
        KLPenalty("k1", adaptive=True, target_kl=1.0)


# one row, or two, of a run: a workflow may return as many as it likes
RUN_REWARDS, ROWS_OF_RUN = [1.0, 0.5, 0.0, 0.5], [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [2 / 3, 0.0, -2 / 3, 0.0]),
        ("grpo_verl", [0.5 / 0.408249, 0.0, -0.5 / 0.408249, 0.0]),
        ("opmd_verl", [0.5, 0.0, -0.5, 0.0]),
        ("asymre_verl", [0.6, 0.1, -0.4, 0.1]),
    ],
)
def test_group_statistics_count_runs_not_rows(name, expected):
    runs = [run for run, rows in enumerate(ROWS_OF_RUN) for _ in range(rows)]
    made = batch(len(runs), 2, mask=torch.ones(len(runs), 2, dtype=torch.bool))
    made |= {"uid": ["a"] * len(runs), "run": runs}
    made["token_level_rewards"] = torch.tensor([[0.0, RUN_REWARDS[run]] for run in runs])
    advantages, _, metrics = run(name, made)
    found = advantages[:, 0].tolist()
    assert found == pytest.approx([expected[run] for run in runs], abs=1e-5)
    assert metrics["group_advantages/reward_mean/mean"] == pytest.approx(0.5)
    alone = {**made, "run": [0] * len(runs)}
    assert not run(name, alone)[0].any()  # one run has nothing to be compared with

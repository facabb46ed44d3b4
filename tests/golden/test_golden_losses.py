"""Policy losses: value, metrics and the gradient of every token against the reference."""

from __future__ import annotations

import json
import math
from pathlib import Path

import make_golden
import numpy as np
import pytest
import reference_losses as ref
import torch

from trinity_dask.algorithm import POLICY_LOSS_FN
from trinity_dask.algorithm.aggregate import Denominator
from trinity_dask.algorithm.policy_losses import generalised_jsd, mu_schedule

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "losses.json").read_text())


def inputs(logprob: torch.Tensor) -> dict[str, torch.Tensor]:
    given = GOLDEN["inputs"]
    start = logprob.detach()
    return {
        "logprob": logprob,
        "old_logprob": start - torch.tensor(given["log_ratio_to_old"], dtype=torch.float64),
        "ref_logprob": start - torch.tensor(given["log_ratio_to_ref"], dtype=torch.float64),
        "advantages": torch.tensor(given["advantages"], dtype=torch.float64),
        "action_mask": torch.tensor(given["action_mask"], dtype=torch.bool),
        "expert_mask": torch.tensor(given["expert_rows"], dtype=torch.bool),
    }


def identity(case) -> str:
    return "-".join([case["loss"], case["mode"], *(f"{k}={v}" for k, v in case["args"].items())])


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=identity)
def test_loss_metrics_and_gradient(case):
    args = dict(case["args"])
    step = args.pop("step", 1)
    logprob = torch.tensor(GOLDEN["inputs"]["logprob"], dtype=torch.float64, requires_grad=True)
    loss_fn = POLICY_LOSS_FN.get(case["loss"])(**args)
    loss, metrics = loss_fn(**inputs(logprob), step=step, loss_agg_mode=case["mode"])
    loss.backward()
    assert loss.item() == pytest.approx(case["value"], abs=1e-7)
    np.testing.assert_allclose(logprob.grad, case["gradient"], atol=1e-7)
    for name, value in case["metrics"].items():
        assert float(metrics[name]) == pytest.approx(value, abs=1e-7), name


def test_the_files_hold_what_the_reference_gives():
    for name, content in make_golden.build().items():
        found = json.loads((HERE / name).read_text())
        assert found == json.loads(json.dumps(content)), f"run {make_golden.__file__}"


def test_there_are_enough_of_them():
    names = {case["loss"] for case in GOLDEN["cases"]}
    assert names | {"jsd"} == set(POLICY_LOSS_FN.names())
    in_trainer = json.loads((HERE / "in_trainer.json").read_text())["cases"]
    tables = [json.loads((HERE / f).read_text()) for f in ("tables.json", "group_advantages.json")]
    values = sum(1 + len(case["metrics"]) for case in GOLDEN["cases"])
    values += sum(2 for _ in in_trainer) + sum(map(len, tables))
    assert values >= 120


# the fixture of the original: its values where they are right, and where they are not -----------
def fixture():
    generator = torch.Generator().manual_seed(42)

    def draw():
        return torch.rand(5, 20, generator=generator)

    logprob, old, ref_logprob = (2 * draw() - 1 for _ in range(3))
    mask = draw() > 0.5
    advantages = 2 * draw() - 1
    expert = torch.rand(5, generator=generator) > 0.5
    return logprob, old, ref_logprob, mask, advantages, expert


def call(name, mode=None, **args):
    logprob, old, ref_logprob, mask, advantages, expert = fixture()
    return POLICY_LOSS_FN.get(name)(**args)(
        logprob=logprob,
        old_logprob=old,
        ref_logprob=ref_logprob,
        action_mask=mask,
        advantages=advantages,
        expert_mask=expert,
        step=1,
        loss_agg_mode=mode,
    )


def test_the_fixture_is_the_documented_one():
    *_, mask, _, expert = fixture()
    assert int(mask.sum()) == 48
    assert expert.nonzero()[:, 0].tolist() == [2, 3, 4]


def test_ppo_and_opmd_have_the_originals_values():
    # the original divides by the width alone; verl's mode of that name has since become a mean
    # over the rows, of which there are five
    norm, _ = call("ppo", "seq-mean-token-sum-norm")
    assert float(norm) == pytest.approx(0.64534938 / 5, abs=1e-6)
    assert float(call("opmd")[0]) == pytest.approx(-0.00958995, abs=1e-7)
    norm = call("sft", "seq-mean-token-sum-norm")[0]
    assert float(norm) == pytest.approx(-0.18144448 / 5, abs=1e-6)
    dr = call("ppo", "dr-grpo")[0]
    assert float(dr) == pytest.approx(0.64534938 / 5, abs=1e-6)


@pytest.mark.parametrize(("smoothing", "expected"), [(0.0, 0.54067522), (0.1, 0.57392001)])
def test_dpo_of_one_pair_has_the_originals_value(smoothing, expected):
    """The original sums over its whole micro-batch: here that sum is one pair of long rows."""
    logprob, _, ref_logprob, mask, *_ = fixture()

    def pair(x):
        rejected = torch.cat([x[1::2].reshape(1, -1), torch.zeros(1, 20, dtype=x.dtype)], dim=1)
        return torch.cat([x[0::2].reshape(1, -1), rejected])

    loss, metrics = POLICY_LOSS_FN.get("dpo")(label_smoothing=smoothing)(
        logprob=pair(logprob), ref_logprob=pair(ref_logprob), action_mask=pair(mask)
    )
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    assert float(metrics["chosen_reward"]) == pytest.approx(0.70824313, abs=1e-6)
    assert float(metrics["rejected_reward"]) == pytest.approx(0.37579508, abs=1e-6)
    assert metrics["accuracy_mean"] == 1


def test_dpo_is_a_mean_over_pairs_and_refuses_half_a_pair():
    logprob, _, ref_logprob, mask, *_ = fixture()

    def loss(rows):
        return POLICY_LOSS_FN.get("dpo")()(
            logprob=logprob[rows], ref_logprob=ref_logprob[rows], action_mask=mask[rows]
        )[0]

    assert float(loss([0, 1, 2, 3])) == pytest.approx(float(loss([0, 1]) + loss([2, 3])) / 2)
    with pytest.raises(ValueError, match="even"):
        loss([0, 1, 2])


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (5, 0.25),
        (10, 0.5),
        (15, 0.441421),
        (20, 0.3),
        (25, 0.158579),
        (29, 0.102462),
        (30, 0.1),
        (40, 0.1),
    ],
)
def test_chords_schedule(step, expected):
    assert mu_schedule(step, 10, 20, 0.5, 0.1) == pytest.approx(expected, abs=1e-6)
    assert ref.mu(step, 10, 20, 0.5, 0.1) == pytest.approx(expected, abs=1e-6)


def test_sapo_has_the_gradient_of_its_objective():
    """Not of the gate's value: at ratio 1 a token weighs 1, not 2/tau."""
    logprob = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, metrics = POLICY_LOSS_FN.get("sapo")()(
        logprob=logprob,
        old_logprob=torch.zeros(1, 1, dtype=torch.float64),
        action_mask=mask,
        advantages=torch.ones(1, 1, dtype=torch.float64),
        denominator=Denominator.count(mask),
    )
    loss.backward()
    assert float(logprob.grad) == pytest.approx(-1.0, abs=1e-9)
    assert float(metrics["avg_soft_gate"]) == pytest.approx(2.0, abs=1e-9)


def test_exact_divergence_loss():
    generator = torch.Generator().manual_seed(1)
    mine, theirs = (torch.randn(2, 3, 6, generator=generator).double() for _ in range(2))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    for beta in (0.0, 0.3, 0.5, 1.0):
        logits = mine.clone().requires_grad_()
        loss, _ = POLICY_LOSS_FN.get("jsd")(lambda_coef=beta, chunk_size=2)(
            logprob=torch.zeros(2, 3, dtype=torch.float64),
            action_mask=mask,
            logits=logits,
            teacher_logits=theirs,
        )
        loss.backward()
        q, p = mine.softmax(-1).numpy(), theirs.softmax(-1).numpy()
        places = np.argwhere(mask.numpy())
        expected = np.mean([ref.jsd(p[i, t], q[i, t], beta) for i, t in places])
        assert loss.item() == pytest.approx(expected, abs=1e-9)
        assert not logits.grad[~mask].any()
        assert loss.item() <= math.log(2) or beta in (0.0, 1.0)


def test_the_ends_of_the_divergence_are_the_papers():
    """Forward KL at 0 and reverse KL at 1, to which what is between tends (GKD, section 2)."""
    student = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    teacher = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
    forward = 0.6 * math.log(3) + 0.1 * math.log(0.2)  # KL(teacher|student)
    reverse = 0.2 * math.log(1 / 3) + 0.5 * math.log(5)
    for end, near, expected in ((0.0, 1e-6, forward), (1.0, 1 - 1e-6, reverse)):
        assert float(generalised_jsd(student, teacher, end)) == pytest.approx(expected)
        value = float(generalised_jsd(student, teacher, near))
        assert value / 1e-6 == pytest.approx(expected, abs=1e-4)


def test_topr_truncates_the_ratio_of_the_whole_answer():
    """Ratios 2, 1/2 and 1/4 of an answer with A < 0: their product 1/4 weighs every token."""
    given = {
        "logprob": torch.full((1, 3), -1.0, dtype=torch.float64, requires_grad=True),
        "old_logprob": -1.0 - torch.tensor([[2.0, 0.5, 0.25]], dtype=torch.float64).log(),
        "advantages": torch.full((1, 3), -1.0, dtype=torch.float64),
        "action_mask": torch.ones(1, 3, dtype=torch.bool),
    }
    for level, expected in (("sequence", [0.25] * 3), ("token", [1.0, 0.5, 0.25])):
        loss, _ = POLICY_LOSS_FN.get("topr")(ratio_level=level)(**given)
        (gradient,) = torch.autograd.grad(3 * loss, given["logprob"])
        np.testing.assert_allclose(gradient, [expected], rtol=1e-12)
    with pytest.raises(ValueError, match="did you mean 'token'"):
        POLICY_LOSS_FN.get("topr")(ratio_level="tokens")

"""Advantages: group values of the tables, in-trainer values of the reference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import reference_advantages as ref
import torch

from trinity_dask.algorithm import ADVANTAGE_FN
from trinity_dask.experience import EID, Experience

HERE = Path(__file__).parent
GROUPS = json.loads((HERE / "group_advantages.json").read_text())
IN_TRAINER = json.loads((HERE / "in_trainer.json").read_text())


def rows_of(groups, steps=1):
    """Experiences whose log-probs fall from run to run."""
    return [
        Experience(
            tokens=np.arange(5),
            prompt_length=2,
            eid=EID(batch=0, task=task, run=run, step=step),
            reward=float(reward),
            logprobs=np.full(3, -0.1 * (run + 1)),
            action_mask=np.array([True, False, True]),
        )
        for task, rewards in enumerate(groups)
        for run, reward in enumerate(rewards)
        for step in range(steps)
    ]


@pytest.mark.parametrize("case", GROUPS, ids=lambda c: f"{c['fn']}-{c['args']}-{c['source']}")
def test_group_advantages(case):
    fn = ADVANTAGE_FN.get(case["fn"])(**case["args"])
    kept, _ = fn(rows_of(case["groups"], case.get("steps", 1)))
    found = {(row.eid.task, row.eid.run): row.advantages for row in kept}
    for task, of_group in enumerate(case["expected"]):
        for run in range(len(case["groups"][task])):
            value = None if of_group is None else of_group[run]
            assert ((task, run) in found) == (value is not None)
            if value is not None:
                expected = [value, 0, value]
                np.testing.assert_allclose(
                    found[task, run], expected, atol=case["tolerance"] + 1e-7
                )


REFERENCES = {
    "grpo": lambda g, **args: ref.grpo(g, **args),
    "opmd": lambda g, **args: ref.opmd(g, **args),
    "asymre": lambda g: ref.asymre(g),
    "rec": lambda g, std_normalize=False, epsilon=1e-6: ref.rec(g, epsilon, std_normalize),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_group_advantages_agree_with_the_reference(name):
    generator = np.random.default_rng(3)
    groups = [generator.normal(size=n).tolist() for n in (2, 5, 1, 8)]
    kept, _ = ADVANTAGE_FN.get(name)()(rows_of(groups))
    expected = [a for group in groups for a in REFERENCES[name](group)]
    np.testing.assert_allclose([row.advantages[0] for row in kept], expected, atol=1e-6)


def test_the_rank_penalty_is_in_the_numerator_too():
    """The original compares penalised means with plain rewards: all of them come out positive."""
    rewards = [1.0, 1.0, 0.5, 1.0]
    kept, _ = ADVANTAGE_FN.get("grpo")(rank_penalty=0.2)(rows_of([rewards]))
    found = [float(row.advantages[0]) for row in kept]
    penalised = ref.rank_penalty(rewards, [-0.1, -0.2, -0.3, -0.4], 0.2)
    np.testing.assert_allclose(found, ref.grpo(penalised), rtol=1e-5)
    assert sum(found) == pytest.approx(0.0, abs=1e-5)


def batch():
    given = IN_TRAINER["inputs"]
    logprob = torch.tensor(given["logprob"], dtype=torch.float64)
    return {
        "token_level_rewards": torch.tensor(given["token_level_rewards"]).double(),
        "action_mask": torch.tensor(given["action_mask"], dtype=torch.bool),
        "uid": given["uid"],
        "run": [0, 1, 0, 1],
        "values": torch.tensor(given["values"]).double(),
        "old_logprobs": logprob,
        "teacher_logprobs": logprob - torch.tensor(given["log_ratio_to_ref"]).double(),
        "reward_baselines": torch.full((4,), given["reward_baseline"]),
    }


@pytest.mark.parametrize(
    "case", IN_TRAINER["cases"], ids=lambda c: f"{c['advantage_fn']}-{c['args']}"
)
def test_in_trainer_advantages(case):
    result, metrics = ADVANTAGE_FN.get(case["advantage_fn"])(**case["args"])(batch())
    np.testing.assert_allclose(result["advantages"], case["advantages"], atol=2e-6)
    np.testing.assert_allclose(result["returns"], case["returns"], atol=2e-6)
    assert result["advantages"].dtype == result["returns"].dtype == torch.float32
    assert all(isinstance(value, float) for value in metrics.values())


def documented_batch():
    """Rows [0,0,1,0], [0,0,0,.5], [0,2,0,0] of tasks a, a, b with masks of 3, 4 and 2."""
    lengths = torch.tensor([3, 4, 2])
    return {
        "token_level_rewards": torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0.5], [0, 2, 0, 0]]),
        "values": torch.tensor([[0.1, 0.2, 0.3, 0], [0, 0.1, 0.2, 0.3], [0.5, 0.5, 0, 0]]),
        "action_mask": torch.arange(4) < lengths[:, None],
        "uid": ["a", "a", "b"],
        "run": [0, 1, 0],
    }


def test_ppo_has_the_documented_values_and_masks_them():
    result, _ = ADVANTAGE_FN.get("ppo")()(documented_batch())
    # the original's fourth value is -1.574492: whitened, not masked again
    np.testing.assert_allclose(
        result["advantages"][0], [0.301006, 0.092617, -0.115771, 0], atol=1e-5
    )
    np.testing.assert_allclose(
        result["returns"], [[1, 1, 1, 0], [0.5] * 4, [2, 2, 0, 0]], atol=1e-6
    )


def test_rloo_has_the_documented_values_but_for_the_group_of_one():
    result, metrics = ADVANTAGE_FN.get("rloo")()(documented_batch())
    np.testing.assert_allclose(result["advantages"][:2, 0], [0.5, -0.5])
    assert not result["advantages"][2].any()  # the original gives the raw reward, 2
    assert metrics["group_of_one_count"] == 1


def gigpo_rows(runs, task=0):
    return [
        Experience(
            tokens=np.arange(3),
            prompt_length=1,
            eid=EID(batch=0, task=task, run=run, step=step),
            reward=0.0,
            info={"step_reward": reward, "env_state_hash": state},
        )
        for run, steps in enumerate(runs)
        for step, (reward, state) in enumerate(steps)
    ]


RUNS = [[(0, "A"), (1, "B")], [(0, "A"), (0, "C")], [(0.5, "A"), (0.5, "B")]]
GIGPO = [0.666666, 0.583333, -1.333332, -0.666666, 0.666666, 0.083333]


def test_gigpo_has_the_documented_values():
    fn = ADVANTAGE_FN.get("gigpo")
    rows, metrics = fn()(gigpo_rows(RUNS))
    np.testing.assert_allclose([row.advantages[0] for row in rows], GIGPO, atol=2e-6)
    np.testing.assert_allclose(ref.gigpo(RUNS), GIGPO, atol=2e-6)
    assert metrics["anchor_groups_total"] == 3
    assert metrics["anchor_groups_size_gt1"] == 2
    assert metrics["anchor_group_hit_ratio"] == pytest.approx(5 / 6)
    for args in ({"fnorm": "std"}, {"gamma": 0.5, "omega": 2.0}):
        rows, _ = fn(**args)(gigpo_rows(RUNS))
        renamed = {("norm" if k == "fnorm" else k): v for k, v in args.items()}
        expected = ref.gigpo(RUNS, **renamed)
        np.testing.assert_allclose([row.advantages[0] for row in rows], expected, rtol=1e-5)


def test_gigpo_keeps_equal_states_of_two_tasks_apart():
    both = gigpo_rows(RUNS, task=0) + gigpo_rows([[(9, "A")], [(5, "A")]], task=1)
    rows, _ = ADVANTAGE_FN.get("gigpo")()(both)
    np.testing.assert_allclose([row.advantages[0] for row in rows[:6]], GIGPO, atol=2e-6)

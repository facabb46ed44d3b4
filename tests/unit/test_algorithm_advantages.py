"""Grouped advantages: sums, drops, and rows that must not move others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.algorithm.advantages import ADVANTAGES, GRPOAdvantage
from trinity_dask.experience import EID, Experience

REWARDS = st.lists(
    st.lists(st.floats(-10, 10, allow_nan=False, width=32), min_size=1, max_size=8),
    min_size=1,
    max_size=6,
)


def experience(task, run, reward, mask=(True, True, True)):
    return Experience(
        tokens=np.arange(1, 2 + len(mask)),
        prompt_length=1,
        eid=EID(batch=1, task=task, run=run),
        reward=reward,
        action_mask=np.array(mask),
    )


def batch(groups):
    return [experience(t, k, r) for t, rewards in enumerate(groups) for k, r in enumerate(rewards)]


def scores(rows):
    return [float(row.advantages.max() + row.advantages.min()) for row in rows]


@settings(max_examples=60, deadline=None)
@given(REWARDS)
def test_fault_28_advantages_sum_to_zero_in_every_group(groups):
    rows, metrics = GRPOAdvantage(epsilon=1e-4)(batch(groups))
    assert len(rows) == sum(len(group) for group in groups)
    for task in range(len(groups)):
        of_group = [float(row.advantages[0]) for row in rows if row.eid.task == task]
        assert abs(sum(of_group)) < 1e-4
    assert metrics["group_of_one_count"] == sum(len(group) == 1 for group in groups)


def test_fault_28_every_rollout_of_the_group_counts():
    rows, _ = GRPOAdvantage()(batch([[0, 1, 1, 1, 5, 9]]))
    rewards = np.array([0, 1, 1, 1, 5, 9.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    np.testing.assert_allclose([r.advantages[0] for r in rows], expected, rtol=1e-5)


@pytest.mark.parametrize("level", ["group", "batch"])
def test_fault_27_no_cancellation(level):
    rows, _ = GRPOAdvantage(std_cal_level=level)(batch([[0.0] + [0.95] * 7]))
    assert max(abs(float(row.advantages[0])) for row in rows) < 3
    rows, _ = GRPOAdvantage(std_cal_level=level)(batch([[1e6, 1e6 + 1, 1e6, 1e6]]))
    assert float(rows[1].advantages[0]) == pytest.approx(1.5, abs=1e-3)


def test_fault_32_a_fully_masked_row_moves_no_other():
    def advantages(masked_reward):
        rows = batch([[0, 1, 1, 0]])
        rows.append(experience(0, 4, masked_reward, mask=(False, False, False)))
        got, _ = GRPOAdvantage()(rows)
        assert not got[-1].advantages.any()
        return [row.advantages.tolist() for row in got[:-1]]

    assert advantages(0.0) == advantages(100.0)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_an_unscorable_row_gets_zero_and_moves_no_other(reward):
    rows = [*batch([[0, 1]]), experience(0, 2, reward)]
    got, metrics = GRPOAdvantage()(rows)
    alone, _ = GRPOAdvantage()(batch([[0, 1]]))
    assert scores(got[:2]) == scores(alone)
    assert not got[2].advantages.any()
    assert metrics["unscored_count"] == 1


def test_equal_rewards_have_no_variance_whatever_their_rounding():
    rows, metrics = GRPOAdvantage(epsilon=0.0)(batch([[0.1] * 3, [0.7] * 7]))
    assert all(not row.advantages.any() for row in rows)
    assert metrics["zero_variance_group_count"] == 2
    kept, metrics = GRPOAdvantage(std_threshold=0.0)(batch([[0.1] * 3, [0, 1]]))
    assert [row.eid.task for row in kept] == [1, 1]
    assert metrics["filtered_count"] == 3


def test_std_threshold_drops_groups_of_one_and_noise():
    groups = [[0, 1, 1, 0], [1, 1, 1, 1], [0.2], [0.5, 0.500001]]
    kept, metrics = GRPOAdvantage(std_threshold=1e-3)(batch(groups))
    assert {row.eid.task for row in kept} == {0}
    assert metrics["filtered_count"] == 7


def test_fault_26_masked_places_get_no_advantage_and_change_none():
    short = [experience(0, k, r, mask=(True, True)) for k, r in enumerate([0, 1])]
    padded = [experience(0, k, r, mask=(True, True, False, False)) for k, r in enumerate([0, 1])]
    for a, b in zip(GRPOAdvantage()(short)[0], GRPOAdvantage()(padded)[0], strict=True):
        np.testing.assert_array_equal(a.advantages, b.advantages[:2])
        assert not b.advantages[2:].any()
        assert a.advantages.dtype == np.float32
        assert a.returns is not a.advantages


def test_batch_level_divides_by_the_std_of_all_rewards():
    rewards = [[0, 1], [0, 10]]
    rows, _ = GRPOAdvantage(std_cal_level="batch", epsilon=0.0)(batch(rewards))
    spread = np.std([0, 1, 0, 10], ddof=1)
    np.testing.assert_allclose(
        [r.advantages[0] for r in rows], np.array([-0.5, 0.5, -5, 5]) / spread, rtol=1e-6
    )


def test_groups_are_by_task_id_not_by_prompt():
    rows, metrics = GRPOAdvantage()(batch([[0, 1], [5, 6]]))
    assert metrics["group_count"] == 2
    np.testing.assert_allclose(
        [r.advantages[0] for r in rows[:2]], [r.advantages[0] for r in rows[2:]]
    )


def test_no_experiences_give_none():
    rows, metrics = ADVANTAGES.get("grpo")()([])
    assert rows == []
    assert metrics["group_count"] == 0


@pytest.mark.parametrize(
    "args", [{"epsilon": -1.0}, {"std_threshold": -0.1}, {"std_cal_level": "bach"}]
)
def test_impossible_arguments_are_refused(args):
    with pytest.raises(ValueError, match=next(iter(args))):
        GRPOAdvantage(**args)

"""Grouped advantages: sums, drops, and rows that must not move others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.algorithm.advantages import ADVANTAGES, GRPOAdvantage, runs_in_trainer
from trinity_dask.buffer.operators.operators import OPERATORS
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


COMPARING = {
    "grpo": {},
    "grpo-batch": {"std_cal_level": "batch"},
    "grpo-none": {"std_cal_level": "none"},
    "opmd": {},
    "rec": {},
    "step_wise_grpo": {},
    "gigpo": {},
}


def grouped(label):
    return ADVANTAGES.get(label.partition("-")[0])(**COMPARING[label])


@settings(max_examples=25, deadline=None)
@given(REWARDS, st.sampled_from(sorted(COMPARING)))
def test_fault_28_every_comparison_sums_to_zero(groups, label):
    rows, metrics = grouped(label)(batch(groups))
    for task in range(len(groups)):
        of_group = [float(row.advantages[0]) for row in rows if row.eid.task == task]
        assert abs(sum(of_group)) < 1e-4 * max(1.0, max(map(abs, of_group)))
    assert metrics["group_of_one_count"] == sum(len(group) == 1 for group in groups)


@pytest.mark.parametrize("label", COMPARING)
def test_fault_27_no_comparison_cancels(label):
    rows, _ = grouped(label)(batch([[0.0] + [0.95] * 7]))
    assert max(abs(float(row.advantages[0])) for row in rows) < 3


@pytest.mark.parametrize("label", COMPARING)
def test_fault_32_masked_and_unscored_rows_move_no_other(label):
    def advantages(reward, mask):
        rows = batch([[0, 1, 1, 0.25]])
        rows.append(experience(0, 4, reward, mask=mask))
        got, _ = grouped(label)(rows)
        assert not got[-1].advantages.any()
        return [row.advantages.tolist() for row in got[:4]]

    nothing = (False, False, False)
    expected = advantages(0.0, nothing)
    assert advantages(100.0, nothing) == expected
    assert advantages(None, (True, True, True)) == expected
    assert advantages(float("nan"), (True, True, True)) == expected


@pytest.mark.parametrize("name", ["asymre", *COMPARING])
def test_a_group_of_one_gets_zero_and_one_warning(name, caplog):
    fn = ADVANTAGES.get("asymre")() if name == "asymre" else grouped(name)
    for _ in range(2):
        rows, metrics = fn(batch([[0.7], [0, 1]]))
        assert not rows[0].advantages.any()
        assert metrics["group_of_one_count"] == 1
    assert sum("nothing to compare" in record.message for record in caplog.records) == 1


def test_dropped_groups_are_replaced_by_copies_with_names_of_their_own():
    fn = GRPOAdvantage(std_threshold=0.0, duplicate_experiences=True)
    groups = [[0, 1], [1, 1], [1, 0], [0.3], [0, 0]]
    rows, metrics = fn(batch(groups))
    assert len({row.eid.uid for row in rows}) == len(rows) == 8
    assert metrics["filtered_count"] == 5
    assert metrics["duplicated_count"] == 4
    assert {row.eid.task for row in rows} == {0, 2}
    again, _ = fn(batch(groups))
    assert [row.eid.tid for row in again] == [row.eid.tid for row in rows]
    rows[0].advantages[:] = 9.0
    assert all(not (row.advantages == 9.0).any() for row in rows[1:])
    assert fn(batch([[1, 1], [0.5]]))[0] == []


def test_rank_penalty_needs_logprobs():
    with pytest.raises(ValueError, match="log-probs"):
        GRPOAdvantage(rank_penalty=0.1)(batch([[0, 1]]))


def steps_of(run_rewards, task=0):
    """Runs of unequal numbers of steps; the reward is at the last one."""
    rows = []
    for run, reward in enumerate(run_rewards):
        for step in range(run + 1):
            row = experience(task, run, reward if step == run else 0.0)
            row.eid.step = step
            rows.append(row)
    return rows


def test_a_run_counts_once_however_many_steps_it_has():
    rows, metrics = ADVANTAGES.get("step_wise_grpo")()(steps_of([0, 1, 0, 1])[::-1])
    for row in rows:
        expected = 0.866024 if row.eid.run % 2 else -0.866024
        np.testing.assert_allclose(row.advantages, expected, atol=1e-5)
    assert metrics["experience_count"] == 10
    kept, metrics = ADVANTAGES.get("step_wise_grpo")(std_threshold=0.0)(
        steps_of([1, 1]) + steps_of([0, 1], task=1)
    )
    assert {row.eid.task for row in kept} == {1}
    assert metrics["skipped_group_ratio"] == 0.5
    assert metrics["filtered_count"] == 3


def test_rec_drops_the_surplus_of_bad_answers():
    fn = ADVANTAGES.get("rec")(drop="balance")
    rows, metrics = fn(batch([[1, 0, 0, 0, 0, 0]]))
    found = [float(row.advantages[0]) for row in rows]
    assert sorted(found) == pytest.approx([-0.5, 0, 0, 0, 0, 0.5])
    assert metrics["drop_balance"] == 4
    assert [float(row.advantages[0]) for row in fn(batch([[1, 0, 0, 0, 0, 0]]))[0]] == found


def test_raft_keeps_the_best():
    groups = [[0, 2, 2], [1, 1], [0.4], [0, 0.6]]
    rows, metrics = ADVANTAGES.get("raft")()(batch(groups))
    # also of a group whose answers are all equal, and of one answer
    assert [(row.eid.task, row.eid.run) for row in rows] == [(0, 1), (1, 0), (2, 0), (3, 1)]
    assert metrics["filtered_count"] == 4
    rows, _ = ADVANTAGES.get("raft")(n_best=2, min_reward=0.5)(batch(groups))
    assert [(row.eid.task, row.eid.run) for row in rows] == [(0, 1), (0, 2), (1, 0), (1, 1), (3, 1)]


def test_a_missing_state_hash_is_like_no_other():
    rows = batch([[0, 1, 0]])
    for row in rows:
        row.info["step_reward"] = row.reward
    got, metrics = ADVANTAGES.get("gigpo")()(rows)
    assert metrics["anchor_groups_size_gt1"] == 0
    found = [float(row.advantages[0]) for row in got]
    assert found == pytest.approx([-1 / 3, 2 / 3, -1 / 3], abs=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_no_experience_is_no_error(name):
    fn = ADVANTAGES.get(name)()
    if not runs_in_trainer(fn):
        assert fn([])[0] == []


def turns(rewards, rows_of_run, task=0):
    """Runs that return one experience or several, all with the run's reward."""
    rows = []
    for run, (reward, n) in enumerate(zip(rewards, rows_of_run, strict=True)):
        for step in range(n):
            row = experience(task, run, reward)
            row.eid.step = step
            rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("grpo", {}, [0.5 / 0.408249, 0.0, -0.5 / 0.408249, 0.0]),
        ("grpo", {"std_cal_level": "batch"}, [0.5 / 0.408249, 0.0, -0.5 / 0.408249, 0.0]),
        ("opmd", {}, [0.5, 0.0, -0.5, 0.0]),
        ("opmd", {"opmd_baseline": "logavgexp"}, [0.438140, -0.061860, -0.561860, -0.061860]),
        ("asymre", {}, [0.6, 0.1, -0.4, 0.1]),
        ("rec", {"std_normalize": True}, [2**0.5, 0.0, -(2**0.5), 0.0]),
        ("reinforce", {}, [1.0, 0.5, 0.0, 0.5]),
    ],
)
def test_group_statistics_count_runs_not_experiences(name, args, expected):
    rows, metrics = ADVANTAGES.get(name)(**args)(turns([1.0, 0.5, 0.0, 0.5], [1, 2, 2, 1]))
    found = [float(row.advantages[0]) for row in rows]
    assert found == pytest.approx([expected[row.eid.run] for row in rows], abs=1e-5)
    assert metrics["group_advantages/reward_mean/mean"] == pytest.approx(0.5)
    assert metrics["group_advantages/reward_std/mean"] == pytest.approx(0.408248, abs=1e-5)


def test_the_experiences_of_a_single_run_are_no_group():
    rows = turns([1.0], [2])
    rows[0].reward = 0.0
    got, metrics = GRPOAdvantage()(rows)
    assert scores(got) == [0.0, 0.0]
    assert metrics["group_of_one_count"] == 1
    kept, _ = GRPOAdvantage(std_threshold=0.0)(rows + turns([0, 1], [2, 1], task=1))
    assert {row.eid.task for row in kept} == {1}


def test_raft_keeps_all_experiences_of_the_best_run():
    rows, _ = ADVANTAGES.get("raft")()(turns([0.5, 1.0], [1, 2]))
    assert [(row.eid.run, row.eid.step) for row in rows] == [(1, 0), (1, 1)]


def test_rec_balances_runs():
    fn = ADVANTAGES.get("rec")(drop="balance")
    rows, metrics = fn(turns([1, 0, 0, 0], [1, 2, 2, 2]))
    assert metrics["drop_balance"] == 2
    assert sorted(float(row.advantages[0]) for row in rows) == pytest.approx(
        [-0.5, -0.5, 0, 0, 0, 0, 0.5]
    )


def test_filters_and_pass_rates_count_runs():
    """One right run of one experience and one wrong run of three: half of the task's runs."""
    rows = turns([1.0, 0.0], [1, 3]) + turns([0.0, 0.0], [1, 2], task=1) + turns([1.0], [2], task=2)
    rows[-1].reward = 0.0  # two experiences of one run are nothing to compare
    for row in rows:
        row.info["task_index"] = {"index": row.eid.task, "taskset_id": 0}
    for name in ("reward_std_filter", "dapo_dynamic_sampling"):
        kept, metrics = OPERATORS.get(name)().process(rows)
        assert {row.eid.task for row in kept} == {0}, name
    found = OPERATORS.get("reward_std_filter")().process(turns([1.0, 0.0], [1, 3]))[1]
    assert found["origin_group_advantages/reward_mean/mean"] == 0.5
    assert found["origin_group_advantages/reward_std/mean"] == 0.5
    _, metrics = OPERATORS.get("pass_rate_calculator")().process(rows)
    assert metrics["selector_metric"][0] == {"indices": [0, 1, 2], "values": [0.5, 0.0, 0.5]}


GROUPED = [
    ("grpo", {}), ("grpo", {"std_cal_level": "batch"}), ("grpo", {"rank_penalty": 0.3}),
    ("grpo", {"std_threshold": 0.1}), ("grpo", {"std_cal_level": "none"}), ("opmd", {}),
    ("opmd", {"opmd_baseline": "logavgexp", "tau": 0.5}), ("asymre", {}), ("reinforce", {}),
    ("rec", {}), ("rec", {"std_normalize": True, "drop": "balance"}), ("raft", {"n_best": 2}),
    ("raft", {"min_reward": 0.5}), ("step_wise_grpo", {}), ("gigpo", {}),
]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.integers(1, 4)), min_size=1, max_size=6
    )
)
@pytest.mark.parametrize(("name", "args"), GROUPED)
def test_more_experiences_of_a_run_are_no_more_runs(name, args, runs):
    """What a run's rows get, and which runs stay, is what its only row would get."""
    rewards, counts = zip(*runs, strict=True)

    def scored(rows):
        for row in rows:
            row.logprobs = np.full(3, -1.0 - row.eid.run % 3, np.float32)
        kept, metrics = ADVANTAGES.get(name)(**args)(rows)
        return {r.eid.rid: float(r.advantages[0]) for r in kept}, kept, metrics

    other = turns([1.0, 0.0], [1, 1], task=1)
    alone, _, of_one = scored(turns(rewards, [1] * len(rewards)) + other)
    found, kept, of_several = scored(turns(rewards, counts) + other)
    assert found == pytest.approx(alone, abs=1e-9)
    for row in kept:
        assert float(row.advantages[0]) == pytest.approx(alone[row.eid.rid], abs=1e-9)
    shared = [key for key in of_one if "group" in key and "anchor" not in key]
    assert {k: of_several[k] for k in shared} == pytest.approx({k: of_one[k] for k in shared})

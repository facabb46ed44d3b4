"""Operators that look at outcomes and rewards, alone and in the pipeline."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trinity_dask.buffer.data.taskset import SELECTOR_METRIC
from trinity_dask.buffer.operators.operators import OPERATORS, OverlongPenalty
from trinity_dask.config.schema import OperatorConfig
from trinity_dask.experience import EID, RESPONSE_TRUNCATED, Experience
from trinity_dask.experience.schema import encode, from_table
from trinity_dask.explorer.coordinator import ExperiencePipeline


def group(
    task: int, rewards: Sequence[float | None], accuracy: Sequence[float] = (), length: int = 2
) -> list[Experience]:
    made = []
    for run, reward in enumerate(rewards):
        metrics = {"accuracy": accuracy[run]} if accuracy else {}
        exp = Experience([0] * (1 + length), eid=EID(1, task, run), reward=reward, metrics=metrics)
        exp.info = {"task_index": {"index": task, "taskset_id": 0}}
        made.append(exp)
    return made


def process(name: str, exps: list[Experience], **args: Any) -> tuple[list[Experience], Any]:
    return OPERATORS.get(name)(**args).process(exps)


def tasks_of(exps: list[Experience]) -> list[Any]:
    return list(dict.fromkeys(e.eid.task for e in exps))


def test_dynamic_sampling_keeps_groups_with_right_and_wrong_answers() -> None:
    exps = group(0, [1.0] * 4) + group(1, [0.0] * 3) + group(2, [1.0, 0.0]) + group(3, [1.0])
    kept, metrics = process("dapo_dynamic_sampling", exps)
    assert tasks_of(kept) == [2]
    assert metrics == {
        "filtered_count": 8.0,
        "dropped_all_correct": 4.0,
        "dropped_all_wrong": 3.0,
        "kept_group_count": 1.0,
    }


def test_the_accuracy_decides_not_the_reward() -> None:
    exps = group(0, [1.0, 0.0], accuracy=[1, 1]) + group(1, [1.0, 1.0], accuracy=[1, 0])
    assert tasks_of(process("dapo_dynamic_sampling", exps)[0]) == [1]
    other, _ = process("dapo_dynamic_sampling", exps, metric_key="absent")
    assert tasks_of(other) == [0]
    signed = group(0, [0, 0], accuracy=[1, -1]) + group(1, [0, 0], accuracy=[-1, -1])
    assert tasks_of(process("dapo_dynamic_sampling", signed)[0]) == [0]
    half = group(0, [0.5, 1.0])
    assert process("dapo_dynamic_sampling", half)[0] == []
    assert process("dapo_dynamic_sampling", half, correct_threshold=0.5)[0] == half


@pytest.mark.parametrize("name", ["dapo_dynamic_sampling", "reward_std_filter"])
def test_fault_32_masked_and_unscored_rows_have_no_say(name: str) -> None:
    masked = group(0, [1.0, 1.0, 0.0])
    masked[2].action_mask = np.zeros(2, np.bool_)
    unscored = group(1, [1.0, None, 1.0]) + group(2, [1.0, float("nan")])
    assert process(name, masked + unscored)[0] == []


PENALTIES = [(10, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (150, -1.0)]


@pytest.mark.parametrize(("length", "expected"), PENALTIES)
def test_the_overlong_penalty_is_piecewise_linear(length: int, expected: float) -> None:
    assert OverlongPenalty(100, 20).penalty(length) == expected
    assert OverlongPenalty(100, 20, penalty_factor=2.0).penalty(length) == 2 * expected


def test_the_overlong_penalty_of_the_paper_and_without_a_cache() -> None:
    assert OverlongPenalty(20_480, 4_096).penalty(18_432) == -0.5
    step = OverlongPenalty(100, 0)
    assert [step.penalty(n) for n in (99, 100, 101)] == [0.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="cache_tokens must be between"):
        OverlongPenalty(10, 20)


def test_the_overlong_penalty_is_added_to_rewards() -> None:
    exps = group(0, [1.0, None], length=9)
    kept, metrics = process("overlong_penalty", exps, max_response_tokens=10, cache_tokens=2)
    assert [e.reward for e in kept] == [0.5, None]
    assert metrics == {
        "penalty/mean": -0.5,
        "penalty/max": -0.5,
        "penalty/min": -0.5,
        "penalised_count": 1.0,
    }


@pytest.mark.parametrize(
    ("op_type", "expected"), [("ADD", 3.0), ("SUB", -1.0), ("MUL", 2.0), ("DIV", 0.5)]
)
def test_reward_shaping(op_type: str, expected: float) -> None:
    exps = group(0, [1.0, 1.0, None])
    exps[0].info["quality"] = 4.0
    config = [{"stats_key": "quality", "op_type": op_type, "weight": 0.5}]
    kept, metrics = process("reward_shaping_mapper", exps, reward_shaping_configs=config)
    assert [e.reward for e in kept] == [expected, 1.0, None]
    assert metrics["reward_diff/mean"] == (expected - 1) / 2
    assert (metrics["reward_diff/min"], metrics["reward_diff/max"]) == (
        min(expected - 1, 0.0),
        max(expected - 1, 0.0),
    )


def test_shaping_goes_in_order_and_divides_by_no_zero() -> None:
    exps = group(0, [1.0])
    exps[0].info |= {"a": 3.0, "zero": 0.0}
    steps = [
        {"stats_key": "a", "op_type": "add"},
        {"stats_key": "a", "op_type": "MUL", "weight": 2.0},
        {"stats_key": "zero", "op_type": "DIV"},
    ]
    process("reward_shaping_mapper", exps, reward_shaping_configs=steps)
    assert exps[0].reward == (1 + 3) * 6
    for broken in ({"op_type": "ADD"}, {"stats_key": "a", "op_type": "POW"}, {"stats_kee": "a"}):
        with pytest.raises(ValueError, match="each entry is stats_key, op_type"):
            process("reward_shaping_mapper", [], reward_shaping_configs=[broken])


def test_pass_rates_are_feedback() -> None:
    exps = group(0, [1.0, 0.0]) + group(1, [1.0, 1.0]) + group(2, [None, float("nan")])
    other = group(7, [0.0])
    other[0].info["task_index"] = {"index": 7, "taskset_id": 1}
    kept, metrics = process("pass_rate_calculator", exps + other)
    assert len(kept) == 7
    assert metrics.pop(SELECTOR_METRIC) == {
        0: {"indices": [0, 1], "values": [0.5, 1.0]},
        1: {"indices": [7], "values": [0.0]},
    }
    third = pytest.approx(1 / 3)
    assert metrics == {
        "selection/valid_ratio": third,
        "selection/strict_valid_ratio": third,
        "selection/<1_ratio": pytest.approx(2 / 3),
        "selection/>0_ratio": pytest.approx(2 / 3),
        "selection/<15_16_ratio": pytest.approx(2 / 3),
        "selection/>1_16_ratio": pytest.approx(2 / 3),
    }
    assert process("pass_rate_calculator", [])[1] == {SELECTOR_METRIC: {}}


def test_eight_tasks_of_four_runs_through_the_pipeline(tmp_path: Path) -> None:
    exps = [e for task in range(8) for e in group(task, [0.0, 1.0, 2.0, 3.0])]
    operators = [OperatorConfig("pass_rate_calculator"), OperatorConfig("reward_filter")]
    operators[1].args = {"threshold": 0.5}
    table, metrics, filtered = ExperiencePipeline(operators).process([encode(exps, {})])
    assert metrics["experience_pipeline/experience_count"] == 24 == table.num_rows
    assert filtered == 8
    assert metrics[SELECTOR_METRIC] == {0: {"indices": list(range(8)), "values": [1.5] * 8}}
    assert metrics["experience_pipeline/pass_rate_calculator/selection/valid_ratio"] == 0.0
    numbers = [value for key, value in metrics.items() if key != SELECTOR_METRIC]
    assert all(isinstance(value, float) for value in numbers)
    assert not [key for key in metrics if key.count("experience_pipeline") > 1]


def test_the_rows_of_a_task_are_made_to_lie_together() -> None:
    """Sub-tasks of one task come back when they like."""
    a, b = group(0, [0.0, 1.0]), group(1, [0.0, 1.0])
    tables = [encode([a[0], b[0]], {}), encode([b[1]], {}), encode([a[1]], {})]
    table, _, _ = ExperiencePipeline([]).process(tables)
    assert [(e.eid.task, e.eid.run) for e in from_table(table)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert isinstance(table, pa.Table)


def test_a_cut_answer_is_masked_or_punished_not_both() -> None:
    args = {"max_response_tokens": 10, "cache_tokens": 2}
    operators = [
        OperatorConfig("mask_response_truncated"),
        OperatorConfig("overlong_penalty", args),
    ]
    with pytest.raises(ValueError, match="exclude each other"):
        ExperiencePipeline(operators)


def test_the_dapo_operators_together() -> None:
    cut = group(0, [0.0, 1.0])
    cut[0].truncate_status = RESPONSE_TRUNCATED
    exps = cut + group(1, [0.0, 1.0]) + group(2, [1.0, 1.0])
    names = ["mask_response_truncated", "dapo_dynamic_sampling"]
    table, metrics, filtered = ExperiencePipeline([OperatorConfig(n) for n in names]).process(
        [encode(exps, {})]
    )
    # the only wrong answer of task 0 is not learned, so the group has nothing to compare
    assert tasks_of(from_table(table)) == [1]
    assert (table.num_rows, filtered) == (2, 4)
    assert metrics["experience_pipeline/mask_response_truncated/masked_truncated_count"] == 1.0

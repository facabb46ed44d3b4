"""Operators and the pipeline: rows in = rows out + filtered."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from trinity_dask.algorithm.advantages import ADVANTAGES
from trinity_dask.buffer.operators.operators import OPERATORS
from trinity_dask.config.schema import OperatorConfig
from trinity_dask.experience import EID, RESPONSE_TRUNCATED, Experience
from trinity_dask.experience.schema import encode, from_table
from trinity_dask.explorer.coordinator import ExperiencePipeline


def group(task: int, rewards: Sequence[float | None]) -> list[Experience]:
    return [
        Experience(tokens=[1, 2, 3], eid=EID(1, task, run), reward=reward)
        for run, reward in enumerate(rewards)
    ]


def apply(name: str, exps: list[Experience], **args: Any) -> tuple[list[float | None], Any]:
    kept, metrics = OPERATORS.get(name)(**args).process(exps)
    return [e.reward for e in kept], metrics


def test_reward_filter() -> None:
    exps = group(0, [-0.5, 0.0, 0.5, None, float("nan")])
    assert apply("reward_filter", exps) == ([0.0, 0.5], {"filtered_count": 3.0})
    assert apply("reward_filter", exps, threshold=0.5)[0] == [0.5]


def test_invalid_reward_filter() -> None:
    exps = group(0, [1.0, None, float("nan"), 0.0])
    assert apply("invalid_reward_filter", exps) == ([1.0, 0.0], {"filtered_count": 2.0})


def test_reward_std_filter() -> None:
    exps = group(0, [0.0, 1.0]) + group(1, [1.0, 1.0]) + group(2, [0.5]) + group(3, [0.1] * 3)
    kept, metrics = apply("reward_std_filter", exps)
    assert kept == [0.0, 1.0]
    assert metrics["filtered_count"] == metrics["operator_filtered_count"] == 6.0
    assert metrics["origin_group_advantages/reward_std/max"] == 0.5
    assert metrics["origin_group_advantages/reward_mean/mean"] == pytest.approx(0.525)
    assert apply("reward_std_filter", group(0, [0.0, 1.0]), threshold=0.5)[0] == []


def test_mask_response_truncated() -> None:
    exps = group(0, [0.0, 1.0])
    exps[1].truncate_status = RESPONSE_TRUNCATED
    assert apply("mask_response_truncated", exps)[1] == {"masked_truncated_count": 1.0}
    masks = [e.action_mask.tolist() for e in exps if e.action_mask is not None]
    assert masks == [[True, True], [False, False]]


def test_pipeline_runs_operators_then_advantages() -> None:
    tables = [encode(group(0, [0.0, 1.0]), {}), encode(group(1, [1.0, None]), {}), encode([], {})]
    pipeline = ExperiencePipeline(
        [
            OperatorConfig("invalid_reward_filter"),
            OperatorConfig("reward_filter", {"threshold": -1}),
        ],
        ADVANTAGES.get("grpo")(),
    )
    table, metrics, filtered = pipeline.process(tables)
    exps = from_table(table)
    assert filtered == 1
    assert [e.eid.tid for e in exps] == ["1/0", "1/0", "1/1"]
    advantages = [e.advantages for e in exps if e.advantages is not None]
    assert np.allclose([a[0] for a in advantages], [-(0.5**0.5), 0.5**0.5, 0.0], atol=1e-5)
    assert metrics["experience_pipeline/invalid_reward_filter/filtered_count"] == 1.0
    assert metrics["experience_pipeline/reward_filter/filtered_count"] == 0.0
    assert metrics["experience_pipeline/experience_count"] == 3.0
    assert metrics["time/experience_pipeline"] >= 0


def test_the_same_operator_twice_keeps_both_metrics() -> None:
    pipeline = ExperiencePipeline(
        [OperatorConfig("reward_filter", {"threshold": t}) for t in (0, 1)]
    )
    _, metrics, filtered = pipeline.process([encode(group(0, [-1.0, 0.5, 2.0]), {})])
    counts = {k: v for k, v in metrics.items() if k.endswith("filtered_count")}
    assert counts == {
        "experience_pipeline/reward_filter/filtered_count": 1.0,
        "experience_pipeline/reward_filter#2/filtered_count": 1.0,
    }
    assert filtered == 2


def test_nothing_in_nothing_out() -> None:
    table, metrics, filtered = ExperiencePipeline([], ADVANTAGES.get("grpo")()).process([])
    assert (table.num_rows, filtered) == (0, 0)
    assert metrics["experience_pipeline/experience_count"] == 0.0


def test_rows_may_not_be_invented() -> None:
    pipeline = ExperiencePipeline([], lambda exps: (exps * 2, {}))
    with pytest.raises(ValueError, match="returned 4 of 2"):
        pipeline.process([encode(group(0, [0.0, 1.0]), {})])


def test_unknown_operators_and_arguments_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'reward_filter'"):
        ExperiencePipeline([OperatorConfig("reward_filte")])
    with pytest.raises(ValueError, match="did you mean 'threshold'"):
        ExperiencePipeline([OperatorConfig("reward_filter", {"treshold": 1})])

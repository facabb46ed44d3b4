"""Relations between tasksets, selectors and the operators that they need."""

from typing import Any

import pytest

from trinity_dask.config.checks import tasksets, train_tasksets
from trinity_dask.config.compose import resolve_config
from trinity_dask.config.schema import (
    BufferConfig,
    Config,
    ExplorerInputConfig,
    OperatorConfig,
    RolloutArgs,
    SelectorConfig,
    TasksetConfig,
)


def config(*sets: TasksetConfig, operators: tuple[str, ...] = (), **source: Any) -> Config:
    explorer_input = ExplorerInputConfig(tasksets=list(sets), **source)
    buffer = BufferConfig(
        explorer_input=explorer_input, operators=[OperatorConfig(name) for name in operators]
    )
    return resolve_config(Config(buffer=buffer))


def learning(*keys: str) -> TasksetConfig:
    selector = SelectorConfig("difficulty_based", feature_keys=list(keys))
    return TasksetConfig(path="a.jsonl", data_selector=selector)


def test_every_taskset_gets_its_defaults() -> None:
    cfg = config(
        TasksetConfig(path="a"),
        TasksetConfig(path="b", name="mine", rollout_args=RolloutArgs(max_tokens=3)),
        default_reward_fn="math_reward",
    )
    assert list(tasksets(cfg)) == []
    first, second = cfg.buffer.explorer_input.train_tasksets
    assert (first.name, second.name) == ("taskset_0", "mine")
    assert (first.workflow, first.reward_fn) == ("simple_workflow", "math_reward")
    assert first.repeat_times == cfg.algorithm.repeat_times
    assert (first.rollout_args.temperature, second.rollout_args.max_tokens) == (1.0, 3)
    keys = [key for key, _ in train_tasksets(cfg)]
    assert keys == [f"buffer.explorer_input.tasksets.{i}" for i in range(2)]


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (config(TasksetConfig()), "tasksets.0.path is empty"),
        (config(TasksetConfig(path="a"), taskset=TasksetConfig(path="b")), "are both set"),
        (config(learning("f0", "f1")), "add the operator pass_rate_calculator"),
        (config(learning("f0"), operators=("pass_rate_calculator",)), "needs 2 number columns"),
    ],
)
def test_what_cannot_work_is_said(cfg: Config, message: str) -> None:
    (problem,) = tasksets(cfg)
    assert message in problem


def test_a_learning_selector_with_its_operator_is_fine() -> None:
    assert list(tasksets(config(learning("f0", "f1"), operators=("pass_rate_calculator",)))) == []

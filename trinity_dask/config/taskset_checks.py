"""Relations between the values of tasksets.

Invariant: each check is a generator of problems; ``tasksets`` stands for ``taskset`` wherever
there are several, and never beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from trinity_dask.config import modes
from trinity_dask.config.schema import Config, TasksetConfig

TASKS = "buffer.explorer_input"


def tasksets(config: Config) -> Iterator[str]:
    if not modes.samples(config.mode):
        return
    source = config.buffer.explorer_input
    if modes.explores(config.mode):
        yield from _train_tasksets(config)
    seen: set[str] = set()
    for index, taskset in enumerate(source.eval_tasksets):
        key = f"{TASKS}.eval_tasksets.{index}"
        yield from _taskset(key, taskset)
        if taskset.name in seen:
            yield f"{key}.name={taskset.name!r} is taken by an earlier one; give it another name"
        seen.add(taskset.name or "")


def train_tasksets(config: Config) -> Iterator[tuple[str, TasksetConfig]]:
    """The train tasksets with their keys."""
    source = config.buffer.explorer_input
    if not source.tasksets:
        yield f"{TASKS}.taskset", source.taskset
    for index, taskset in enumerate(source.tasksets):
        yield f"{TASKS}.tasksets.{index}", taskset


def _train_tasksets(config: Config) -> Iterator[str]:
    source = config.buffer.explorer_input
    if source.tasksets and source.taskset.path:
        yield (
            f"{TASKS}.taskset.path={source.taskset.path} and {TASKS}.tasksets are both set; put "
            "all train tasksets into tasksets, or leave tasksets empty"
        )
    learns = False
    for key, taskset in train_tasksets(config):
        yield from _taskset(key, taskset)
        selector = taskset.data_selector
        learns = learns or selector.selector_type == "difficulty_based"
        wanted = {"difficulty_based": 2, "offline_easy2hard": 1}.get(selector.selector_type, 0)
        if len(selector.feature_keys) < wanted:
            yield (
                f"{key}.data_selector.feature_keys={selector.feature_keys}: selector_type="
                f"{selector.selector_type} needs {wanted} number columns of the file"
            )
    if learns and not any(o.name == "pass_rate_calculator" for o in config.buffer.operators):
        yield (
            f"{TASKS}: selector_type=difficulty_based learns from pass rates: add the operator "
            "pass_rate_calculator to buffer.operators, before those that drop rows"
        )


def _taskset(key: str, taskset: TasksetConfig) -> Iterator[str]:
    if not taskset.path:
        yield f"{key}.path is empty: set it to a file of tasks, as {key}.path=tasks.jsonl"
    if not taskset.workflow:
        yield f"{key}.workflow is empty: name a workflow, as {key}.workflow=simple_workflow"

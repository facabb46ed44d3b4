"""The fields about tasks, rows and the store between explorer and trainer.

Invariant: a name of the table is a function of this module: state -> field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from trinity_dask.config.algorithms import OFFLINE_TYPES, repeat_times
from trinity_dask.manager.config_registry.config_registry import (
    CONFIG_GENERATORS,
    algorithm_of,
    setters,
)
from trinity_dask.manager.config_registry.state import State

_TASKS, _STORE = "buffer.explorer_input", "buffer.trainer_input.experience_buffer"
_NAMES = """
    set_total_epochs =buffer.total_epochs
    set_total_steps =buffer.total_steps
    set_explore_batch_size =buffer.batch_size samples
    set_train_batch_size =buffer.train_batch_size trains
    set_buffer_max_retry_times buffer.max_retry_times
    set_max_retry_interval buffer.max_retry_interval
    set_taskset_path =buffer.explorer_input.taskset.path online
    set_taskset_args =buffer.explorer_input.taskset.workflow_args online
    set_eval_tasksets =buffer.explorer_input.eval_tasksets samples
    set_default_workflow_type =buffer.explorer_input.default_workflow samples
    set_default_eval_workflow_type buffer.explorer_input.default_eval_workflow_type samples
    set_default_reward_fn_type =buffer.explorer_input.default_reward_fn samples
    set_storage_type =buffer.trainer_input.experience_buffer.storage_type trains
    set_enable_replay_buffer =buffer.trainer_input.experience_buffer.replay_buffer.enable online
    set_reuse_cooldown_time =buffer.trainer_input.experience_buffer.replay_buffer.reuse_cooldown_time_s replay
    set_priority_fn =buffer.trainer_input.experience_buffer.replay_buffer.priority_fn replay
    set_priority_fn_args =buffer.trainer_input.experience_buffer.replay_buffer.priority_fn_args replay
    set_experience_buffer_path =buffer.trainer_input.experience_buffer.path offline
    set_dpo_dataset_kwargs =buffer.trainer_input.experience_buffer.format.chosen_key dpo
    set_sft_dataset_kwargs =buffer.trainer_input.experience_buffer.format.prompt_type sft
"""  # noqa: E501  (a table)
globals().update(setters(__name__, _NAMES, {}))


def get_train_batch_size(state: State) -> int:
    """Rows per train step: those that were set, or what a batch of the explorer has."""
    rows = state.get("buffer.train_batch_size")
    group = state.get("algorithm.repeat_times") or repeat_times(algorithm_of(state))
    return int(rows or state.get("buffer.batch_size") * group)


def get_train_batch_size_per_gpu(state: State) -> int:
    """Rows per train step and rank; the last rank may have fewer."""
    return -(-get_train_batch_size(state) // max(int(state.get("cluster.trainer.n_workers")), 1))


def parse_priority_fn_args(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as a form has them: numbers from texts, empty ones left out."""
    parsed = {}
    for name, value in raw.items():
        text = str(value).strip()
        try:
            number = float(text)
        except ValueError:
            parsed[name] = value
            continue
        parsed[name] = int(number) if number.is_integer() and "." not in text else number
    return {name: value for name, value in parsed.items() if value not in ("", None)}


@CONFIG_GENERATORS.register_check()
def check_train_batch_size(state: State) -> Optional[str]:
    """Each rank needs a row of each mini-batch."""
    ranks, minis = state.get("cluster.trainer.n_workers"), state.get("trainer.mini_batches")
    if get_train_batch_size(state) < ranks * minis:
        return (
            f"buffer.train_batch_size={get_train_batch_size(state)} is fewer than "
            f"cluster.trainer.n_workers={ranks} x trainer.mini_batches={minis}"
        )
    return None


@CONFIG_GENERATORS.register_check()
def check_taskset_path(state: State) -> Optional[str]:
    """Tasks come from somewhere."""
    needed = algorithm_of(state) not in OFFLINE_TYPES and not state.get(f"{_TASKS}.tasksets")
    if needed and state.get("mode") != "train" and not state.get(f"{_TASKS}.taskset.path"):
        return f"{_TASKS}.taskset.path is empty: set it to a file of tasks, as tasks.jsonl"
    return None


@CONFIG_GENERATORS.register_check()
def check_experience_buffer_path(state: State) -> Optional[str]:
    """So do rows."""
    if algorithm_of(state) in OFFLINE_TYPES and not state.get(f"{_STORE}.path"):
        return f"{_STORE}.path is empty: set it to a file of rows, as rows.jsonl"
    return None

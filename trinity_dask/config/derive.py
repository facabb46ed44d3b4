"""Values that follow from other values.

Invariant: a derived key is filled in only while it is ``None``, so resolving twice
changes nothing and a value that a user gave always stays; the input is not changed.
"""

from __future__ import annotations

import copy
import os

from trinity_dask.config import job_dir, modes
from trinity_dask.config.algorithms import repeat_times
from trinity_dask.config.fields import values
from trinity_dask.config.schema import (
    DEFAULT_THREADS,
    AlgorithmConfig,
    Config,
    GroupConfig,
    ModelConfig,
    RolloutArgs,
    TasksetConfig,
)

ENGINE_SHARE, COLOCATED_SHARE = 0.9, 0.25  # of a GPU's memory, for an engine


def resolve_config(cfg: Config) -> Config:
    """A copy with choices spelled canonically and every derived key filled in."""
    config = copy.deepcopy(cfg)
    for _, kind, section, name in values(config):
        value = getattr(section, name)
        if kind.choices and isinstance(value, str):
            word = kind.aliases.get(value.lower(), value.lower())
            setattr(section, name, word if word in kind.choices else value)
    if "://" not in config.checkpoint_root_dir:
        config.checkpoint_root_dir = os.path.abspath(os.path.expanduser(config.checkpoint_root_dir))
    if config.job_dir is None:
        config.name, config.job_dir = job_dir.choose(config)
    if config.stages:  # each stage derives its own values from base + stage
        return config
    for name, nthreads in DEFAULT_THREADS.items():
        group: GroupConfig = getattr(config.cluster, name)
        group.nthreads = nthreads if group.nthreads is None else group.nthreads
    _lengths(config.model)
    _explorer(config)
    _algorithm(config.algorithm)
    _mode(config)
    _tasksets(config)
    _trainer(config)
    return config


def _lengths(model: ModelConfig) -> None:
    """prompt + response = model length: one unset is the remainder, both unset half each."""
    total, prompt, response = (
        model.max_model_len,
        model.max_prompt_tokens,
        model.max_response_tokens,
    )
    if total is None:
        if prompt is not None and response is not None:
            model.max_model_len = prompt + response
        return
    if prompt is None and response is None:
        prompt = total // 2
    if prompt is None and response is not None:
        prompt = total - response
    model.max_prompt_tokens = prompt
    if response is None and prompt is not None:
        model.max_response_tokens = total - prompt


def _explorer(config: Config) -> None:
    explorer = config.explorer
    if explorer.batch_timeout_s is None:
        explorer.batch_timeout_s = explorer.longest_batch_s
    if explorer.rollout_model.dtype is None:
        explorer.rollout_model.dtype = config.model.dtype
    if config.algorithm.repeat_times is None:
        config.algorithm.repeat_times = repeat_times(config.algorithm.algorithm_type)


def _algorithm(algorithm: AlgorithmConfig) -> None:
    """A function in a file, ``path/to/file.py:name``, is found from any working directory."""
    for key in ("advantage_fn", "policy_loss_fn", "entropy_loss_fn", "sample_strategy"):
        path, colon, attribute = (getattr(algorithm, key) or "").rpartition(":")
        if path.endswith(".py"):
            setattr(algorithm, key, os.path.abspath(os.path.expanduser(path)) + colon + attribute)


def _mode(config: Config) -> None:
    """One device for all cannot hold a full-size sampler, and nccl needs two."""
    colocated, engine = config.mode == "colocate", config.explorer.rollout_model
    if engine.gpu_memory_utilization is None:
        engine.gpu_memory_utilization = COLOCATED_SHARE if colocated else ENGINE_SHARE
    sync = config.synchronizer
    if colocated and sync.sync_method == "nccl":
        sync.sync_method = "memory"
    if sync.peer_timeout_s is None:
        joins = config.cluster.type == "address" and modes.meets(config.mode)
        file = config.buffer.trainer_input.experience_buffer.storage_type == "file"
        sync.peer_timeout_s = sync.sync_timeout_s if joins and not file else 0.0


def _tasksets(config: Config) -> None:
    source = config.buffer.explorer_input
    repeat = config.algorithm.repeat_times
    _taskset(source.taskset, config, name="taskset", repeat_times=repeat or 1)
    for index, taskset in enumerate(source.tasksets):
        _taskset(taskset, config, name=f"taskset_{index}", repeat_times=repeat or 1)
    for index, taskset in enumerate(source.eval_tasksets):
        _taskset(taskset, config, name=f"eval_taskset_{index}", repeat_times=1)


def _taskset(taskset: TasksetConfig, config: Config, name: str, repeat_times: int) -> None:
    source = config.buffer.explorer_input
    taskset.name = taskset.name or name
    taskset.workflow = taskset.workflow or source.default_workflow
    taskset.reward_fn = taskset.reward_fn or source.default_reward_fn
    if taskset.repeat_times is None:
        taskset.repeat_times = repeat_times
    _rollout_args(taskset.rollout_args, config.model)


def _rollout_args(args: RolloutArgs, model: ModelConfig) -> None:
    inherited = {
        "temperature": model.temperature,
        "top_p": model.top_p,
        "top_k": model.top_k,
        "max_tokens": model.max_response_tokens,
    }
    for name, value in inherited.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _trainer(config: Config) -> None:
    alone = config.mode == "train" and not config.synchronizer.peer_timeout_s
    if config.trainer.total_steps is None and alone:  # else the explorers say when it ends
        config.trainer.total_steps = config.buffer.total_steps
    store = config.buffer.trainer_input.experience_buffer
    if store.path is None and store.storage_type == "store":
        store.path = f"{config.job_dir}/buffer/{store.name}"

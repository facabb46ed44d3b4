"""Names that stand for code: workflows, rewards, operators, the functions of an algorithm.

Invariant: a name that leads nowhere, or an argument that its function does not have, is
refused before a cluster is started. What the workers alone may have (a dotted path, when
the cluster is not of this machine) is left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trinity_dask.config import modes
from trinity_dask.config.checks import train_tasksets
from trinity_dask.config.compose import split_stages
from trinity_dask.config.errors import ConfigError, raise_if
from trinity_dask.config.schema import Config, TasksetConfig


def check_names(config: Config) -> None:
    """Raise :class:`ConfigError` with one line per name or argument that does not exist."""
    from trinity_dask.registry import load_object, load_plugins

    problems = list(_tried("plugin_dirs", lambda: load_plugins(config.plugin_dirs)))
    if config.prepare is not None and config.cluster.type == "local":
        problems += _tried("prepare", lambda: load_object(config.prepare or ""))
    for stage in [] if problems else split_stages(config):
        prefix = f"stage {stage.stage_name!r}: " if stage.stage_name else ""
        problems += [prefix + line for line in _stage_problems(stage)]
        if modes.samples(stage.mode) and config.prepare is None:
            problems += [prefix + line for line in _template_problems(stage)]
    raise_if(list(dict.fromkeys(problems)))


def check_start_model(stages: list[Config]) -> None:
    """Raise :class:`ConfigError` unless the first stage's model is on this machine's disk.

    A preset with ``prepare`` makes its model later; then nothing is checked here.
    """
    from trinity_dask.models.checks import (
        attention_implementation,
        check_model_dir,
        check_vllm_adapter,
        check_vllm_cpu,
    )

    first = stages[0]
    if first.prepare is not None:
        return
    try:
        check_model_dir(first.model.model_path)
        wanted = first.model.attn_implementation
        if wanted is not None:
            from transformers import AutoConfig

            trust = first.model.trust_remote_code
            config = AutoConfig.from_pretrained(first.model.model_path, trust_remote_code=trust)
            attention_implementation(config, wanted)
        on_cpu = [stage for stage in stages if not stage.cluster.rollout.gpus_per_worker]
        sampling = [stage.explorer.rollout_model for stage in on_cpu if stage.mode != "train"]
        if any(model.engine_type == "vllm" for model in sampling):
            check_vllm_cpu(first.model.model_path)
        engines = {s.explorer.rollout_model.engine_type for s in stages if s.mode != "train"}
        lora = first.model.lora
        if "vllm" in engines and lora.rank > 0 and lora.target_modules == ["all-linear"]:
            check_vllm_adapter(first.model.model_path)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _stage_problems(stage: Config) -> Iterator[str]:
    from trinity_dask.algorithm.table import resolve_algorithm
    from trinity_dask.models import ENGINES

    yield from _tried("algorithm", lambda: _check_teacher(stage, resolve_algorithm))
    if stage.mode == "train":
        return
    yield from _operator_problems(stage)
    engine = stage.explorer.rollout_model.engine_type
    is_path = ":" in engine or "." in engine
    if engine not in ENGINES.names() and (stage.cluster.type == "local" or not is_path):
        yield from _tried("explorer.rollout_model.engine_type", lambda: ENGINES.get(engine))
    source = stage.buffer.explorer_input
    for key, taskset in train_tasksets(stage):
        yield from _taskset_problems(key, taskset, stage)
    for index, taskset in enumerate(source.eval_tasksets):
        key = f"buffer.explorer_input.eval_tasksets.{index}"
        yield from _taskset_problems(key, taskset, stage)


def _check_teacher(stage: Config, resolve: Callable[..., Any]) -> None:
    spec = resolve(asdict(stage.algorithm))
    if spec.uses_teacher_logits and modes.trains(stage.mode) and not stage.model.teacher_model_path:
        raise ValueError(
            f"policy_loss_fn {spec.resolved['policy_loss_fn']!r} compares with a teacher's whole "
            "distribution, which no row carries; set model.teacher_model_path=<directory>"
        )


def _operator_problems(stage: Config) -> Iterator[str]:
    from trinity_dask.buffer.operators.operators import OPERATORS
    from trinity_dask.registry import build

    for index, operator in enumerate(stage.buffer.operators):
        yield from _tried(
            f"buffer.operators.{index}",
            lambda each=operator: build(each.name, OPERATORS.get(each.name), each.args),
        )


def _taskset_problems(key: str, taskset: TasksetConfig, stage: Config) -> Iterator[str]:
    from trinity_dask.rewards import REWARD_FUNCTIONS
    from trinity_dask.workflows import WORKFLOWS

    for name, registry in (("workflow", WORKFLOWS), ("reward_fn", REWARD_FUNCTIONS)):
        value: str | None = getattr(taskset, name)
        is_path = value is not None and (":" in value or "." in value)
        if value is None or (is_path and stage.cluster.type != "local"):
            continue
        yield from _tried(f"{key}.{name}", lambda v=value, r=registry: r.get(v))


def _template_problems(stage: Config) -> Iterator[str]:
    """Tasksets of the shipped workflows' kind whose prompts no template can write out."""
    from trinity_dask.models.checks import TOKENIZER_FILES, has_chat_template
    from trinity_dask.models.tokenizer import NO_TEMPLATE
    from trinity_dask.workflows import WORKFLOWS
    from trinity_dask.workflows.simple import SimpleWorkflow

    path = Path(stage.model.model_path)
    here = any((path / name).is_file() for name in TOKENIZER_FILES)
    if not here or has_chat_template(str(path)):
        return
    source = stage.buffer.explorer_input
    evals = [
        (f"buffer.explorer_input.eval_tasksets.{index}", taskset)
        for index, taskset in enumerate(source.eval_tasksets)
    ]
    for key, taskset in [*train_tasksets(stage), *evals]:
        name, fmt = taskset.workflow or source.default_workflow, taskset.format
        known = WORKFLOWS.get(name) if name in WORKFLOWS.names() else None
        plain = fmt.prompt_type == "plaintext" and not fmt.apply_chat_template
        chats = getattr(known, "sample", None) is SimpleWorkflow.sample
        if taskset.path and chats and not plain:
            yield f"{key}: {path}: {NO_TEMPLATE}"


def _tried(key: str, load: Callable[..., Any]) -> Iterator[str]:
    """The error of ``load`` as a line of ``key``."""
    try:
        load()
    except (ValueError, LookupError) as error:
        text = error.args[0] if error.args else error  # a KeyError's str is a repr
        yield str(text) if str(text).startswith(f"{key}:") else f"{key}: {text}"

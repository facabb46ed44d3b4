"""From presets and overrides, or from a file, to one typed configuration.

Invariant: what :func:`load_config` returns has only known keys (a field of the dataclasses, or
one below an open section; so too those that came through ``+``, and the entries of ``stages``,
which Hydra itself accepts), values of the right type and range, and every derived key filled in.
A derived key is filled in only while it is ``None``, so resolving twice changes nothing and a
value that a user gave always stays. Each stage is the base with the stage's keys merged over it,
key by key; what a stage does not mention it inherits, only the functions of an algorithm not by a
stage with another ``algorithm_type``, since they belong to the algorithm. ``from_yaml(save(cfg))``
is equal to ``cfg`` but for literal secrets; a file appears complete or not at all. Needs Hydra,
neither torch nor dask.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Glob, Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_dask.config import checks, job_dir, modes
from trinity_dask.config.algorithms import REPEAT_TIMES
from trinity_dask.config.errors import ConfigError, ConfigWarning, hint, raise_if
from trinity_dask.config.fields import fields_of, values
from trinity_dask.config.hints import (
    ADDED_GROUPS,
    CANNOT_REMOVE,
    HYDRA_ERRORS,
    check_key,
    explain,
    kind_at,
    parse,
    with_mappings,
)
from trinity_dask.config.paths import absolute, conf_dir, groups, make_absolute
from trinity_dask.config.schema import (
    DEFAULT_THREADS,
    DERIVED,
    STAGE_KEYS,
    AlgorithmConfig,
    Config,
    GroupConfig,
    ModelConfig,
    TasksetConfig,
)
from trinity_dask.config.secrets import masked_keys, missing_variables, shown, veil
from trinity_dask.files import write_text

VERSION_BASE = "1.3"
ENGINE_SHARE, COLOCATED_SHARE = 0.9, 0.25  # of a GPU's memory, for an engine
_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@functools.cache
def register_schema() -> None:
    """Make the dataclasses known to Hydra as ``schema``, the base of ``config.yaml``."""
    ConfigStore.instance().store(name="schema", node=Config)


def compose_tree(
    overrides: Sequence[str], config_name: str = "config", config_dir: Optional[str] = None
) -> DictConfig:
    """Compose presets and overrides; keys and types are checked, values are not.

    ``config_dir`` is a directory with more presets, as Hydra's ``--config-dir``.

    Raises:
        ConfigError: an unknown key, group or option, or a value of the wrong type.
    """
    overrides = with_mappings(overrides)
    check_overrides(overrides, config_dir)
    register_schema()
    extra = [f"hydra.searchpath=[file://{os.path.abspath(config_dir)}]"] if config_dir else []
    try:
        with initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE):
            tree = compose(config_name, overrides=[*overrides, *extra])
    except HYDRA_ERRORS as error:
        raise ConfigError(explain(error)) from error
    raise_if(list(find_unknown(cast(dict[str, Any], OmegaConf.to_container(tree)))))
    return tree


def to_config(tree: DictConfig, lenient: bool = False) -> Config:
    """The typed configuration of a composed tree, interpolations resolved, nothing derived.

    ``lenient``: a text keeps the interpolation of an environment variable that is not there.
    """
    raise_if(list(find_unknown(cast(dict[str, Any], OmegaConf.to_container(tree)))))
    try:
        for key, text in list(_texts(OmegaConf.to_container(tree))) if lenient else ():
            if missing_variables(text):
                OmegaConf.update(tree, key, text.replace("${", "\\${"))
        # before a merge over the schema turns a preset's ??? into the default
        missing = sorted(OmegaConf.missing_keys(tree))
        raise_if([f"{key} must be set: add {key}=..." for key in missing])
        if OmegaConf.get_type(tree) is Config:
            typed = copy.deepcopy(tree)
        else:
            typed = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), tree))
        root = OmegaConf.select(typed, "checkpoint_root_dir")
        # before interpolations that contain it are resolved, so that they are absolute too
        OmegaConf.update(typed, "checkpoint_root_dir", absolute(root))
        written = OmegaConf.to_container(typed)
        if lenient:
            written = json.loads(json.dumps(written).replace(r"\\${", "${"))
        return veil(cast(Config, OmegaConf.to_object(typed)), written)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def _texts(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values of the texts in plain containers."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _texts(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, str):
        yield prefix, tree


def resolve(cfg: DictConfig | Config) -> Config:
    """The typed configuration with every derived key filled in (idempotent).

    With ``stages`` only ``job_dir`` is derived here: each stage derives its own values
    (:func:`split_stages`).
    """
    return resolve_config(cfg if isinstance(cfg, Config) else to_config(cfg))


def validate(config: Config, rules: Sequence[checks.Check] = ()) -> list[str]:
    """Check a resolved configuration, all its stages included; returns the warnings.

    ``rules`` are the relations between values to check (empty: all that concern it).

    Raises:
        ConfigError: all problems at once, one line each with the key, the value, what is
            allowed and the fix.
    """
    of_stage = () if config.stages else checks.STAGE_CHECKS
    found = [kind.problem(key, getattr(at, name)) for key, kind, at, name in values(config)]
    lines = [line for line in found if line is not None]
    # without those that only repeat another: rollout_args inherit from model, seeds from seed
    lines = [line for line in lines if ".rollout_args." not in line] or lines
    if any(line.startswith("seed=") for line in lines):
        lines = [line for line in lines if ".seed=" not in line]
    # relations between values only when each value is sound
    rules = rules or (*of_stage, *checks.RUN_CHECKS)
    lines = lines or [line for rule in rules for line in rule(config)]
    raise_if(lines or list(_stage_name_problems(config)))
    warned = [] if config.stages else list(checks.warnings(config))
    for stage in split_stages(config) if config.stages else ():
        prefix = f"stage {stage.stage_name!r}: "
        try:
            warned += [prefix + line for line in validate(stage, checks.STAGE_CHECKS)]
        except ConfigError as error:
            lines += [prefix + line for line in str(error).splitlines()]
    raise_if(lines)
    return warned


def finish(
    tree: DictConfig, overrides: Sequence[str] = (), subdir: Optional[str] = None
) -> tuple[Config, list[str]]:
    """The resolved, validated configuration of a composed tree, and the warnings.

    ``overrides`` are those that made the tree: one without any effect is refused.
    ``subdir`` is put after the name, for one job of a sweep.

    Raises:
        ConfigError: a value, or a combination of values, that cannot work.
    """
    config = to_config(tree)
    if subdir is not None:
        config.name = f"{config.name}/{subdir}"
    config = resolve_config(config)
    return config, validate(config) + _shadowed(config, overrides)


def _shadowed(config: Config, overrides: Sequence[str]) -> list[str]:
    """Warnings for overrides that some stages do not see because they set the key themselves.

    Raises:
        ConfigError: an override that no stage sees.
    """
    useless, partial = list[str](), list[str]()
    numbered = ", ".join(f"{i} is {s.get('stage_name')}" for i, s in enumerate(config.stages))
    for item in map(parse, overrides if config.stages else ()):
        key, names = item.key_or_group, list[str]()
        for stage in config.stages if (config.mode, key) != ("bench", "mode") else ():
            node: Any = stage
            for part in key.split("."):
                node = node.get(part, {}) if isinstance(node, Mapping) else {}
            if not isinstance(node, Mapping):  # the base's value is not seen
                names.append(str(stage.get("stage_name")))
        if names and len(names) == len(config.stages):
            useless.append(
                f"{item.input_line} has no effect: every stage sets {key}; "
                f"override it per stage, as stages.0.{key}=... ({numbered})"
            )
        elif names:
            partial.append(f"{item.input_line} does not apply to stage {', '.join(names)}")
    raise_if(useless)
    return partial


def load_config(*overrides: str) -> Config:
    """Compose, resolve and validate; for notebooks and tests.

    Example: ``load_config("+experiment=sort_digits", "engine=torch")``.

    Raises:
        ConfigError: the message names the key, the value, what is allowed and the fix.
    """
    config, messages = finish(compose_tree(overrides), overrides)
    for message in messages:
        warnings.warn(message, ConfigWarning, stacklevel=2)
    return config


# known keys ----------------------------------------------------------------------------
def check_overrides(overrides: Sequence[str], config_dir: Optional[str] = None) -> None:
    """Every override names a key that exists or an option of a group that exists.

    Raises:
        ConfigError: one line per bad override.
    """
    known, problems = groups(config_dir), list[str]()
    for override in map(parse, overrides):
        name = override.key_or_group
        is_option = isinstance(override.value(), str) or override.is_sweep_override()
        if name == "hydra" or name.startswith(("hydra.", "hydra/")):
            continue
        # model={...} is a value for the section of the same name as a group
        if name in known and (is_option or name in ADDED_GROUPS):
            problems += _option_problems(override, known[name])
        elif "/" in name:
            problems.append(f"unknown group {name!r}; {hint(name, list(known))}")
        elif name in DERIVED:
            problems.append(
                f"{name} is derived: set checkpoint_root_dir, project, group and name instead"
            )
        elif (kind := kind_at(name)) is None:
            problems.append(str(check_key(name)))
        elif override.is_delete() and not name.startswith("stages.") and not kind.is_open:
            problems.append(CANNOT_REMOVE.format(name))  # only what a preset added can go again
    raise_if(problems)


def _option_problems(override: Override, options: list[str]) -> Iterator[str]:
    name, value = override.key_or_group, override.value()
    if override.is_delete() or isinstance(value, Glob):
        return
    if override.is_discrete_sweep():
        wanted = [str(item).strip("'\"") for item in override.sweep_string_iterator()]
    else:
        wanted = [str(item) for item in value] if isinstance(value, list) else [str(value)]
    for option in wanted:
        if option not in options:
            yield f"no option {option!r} in group {name!r}; {hint(option, options)}"
        elif name in ADDED_GROUPS and not override.is_add():
            yield f"{name}={option} needs a leading +: write +{name}={option}"
        elif name not in ADDED_GROUPS and override.is_add():
            yield f"group {name!r} already has an option: write {name}={option} without the +"


def find_unknown(
    tree: Mapping[str, Any], section: type = Config, prefix: str = ""
) -> Iterator[str]:
    """One line for each key of ``tree`` (a plain composed config) that does not exist."""
    for name, value in tree.items():
        key, kind = f"{prefix}{name}", fields_of(section).get(str(name))
        if kind is None or (section is Config and prefix and name not in STAGE_KEYS):
            yield str(check_key(key))
        elif kind.section is not None and isinstance(value, Mapping):
            yield from find_unknown(value, kind.section, f"{key}.")
        elif isinstance(value, list) and (kind.item is not None or key == "stages"):
            for index, entry in enumerate(value):
                if isinstance(entry, Mapping):
                    yield from find_unknown(entry, kind.item or Config, f"{key}.{index}.")
                elif key == "stages":
                    yield (
                        f"stages.{index}: {entry!r} is not a mapping; a stage is stage_name and "
                        "sections"
                    )


# derived values ------------------------------------------------------------------------
def resolve_config(cfg: Config) -> Config:
    """A copy with choices spelled canonically and every derived key filled in."""
    config = copy.deepcopy(cfg)
    for _, kind, section, name in values(config):
        value = getattr(section, name)
        if kind.choices and isinstance(value, str):
            word = kind.aliases.get(value.lower(), value.lower())
            setattr(section, name, word if word in kind.choices else value)
    make_absolute(config)
    if config.job_dir is None:
        config.name, config.job_dir = job_dir.choose(config)
    if config.stages:  # each stage derives its own values from base + stage
        return config
    for name, nthreads in DEFAULT_THREADS.items():
        group: GroupConfig = getattr(config.cluster, name)
        group.nthreads = nthreads if group.nthreads is None else group.nthreads
    _lengths(config.model)
    explorer, algorithm, trainer = config.explorer, config.algorithm, config.trainer
    if explorer.batch_timeout_s is None:
        explorer.batch_timeout_s = explorer.longest_batch_s
    if explorer.rollout_model.dtype is None:
        explorer.rollout_model.dtype = config.model.dtype
    if algorithm.repeat_times is None:  # a type that is not ours: 1
        algorithm.repeat_times = REPEAT_TIMES.get(algorithm.algorithm_type, 1)
    _mode(config)
    _tasksets(config)
    alone = config.mode == "train" and not config.synchronizer.peer_timeout_s
    if trainer.total_steps is None and alone:  # else the explorers say when it ends
        trainer.total_steps = config.buffer.total_steps
    store = config.buffer.trainer_input.experience_buffer
    if store.path is None and store.storage_type == "store":
        store.path = f"{config.job_dir}/buffer/{store.name}"
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


def _mode(config: Config) -> None:
    """One device for all cannot hold a full-size sampler, and nccl needs two."""
    colocated, engine = config.mode == "colocate", config.explorer.rollout_model
    if engine.gpu_memory_utilization is None:
        engine.gpu_memory_utilization = COLOCATED_SHARE if colocated else ENGINE_SHARE
    sync = config.synchronizer
    _patience(config)
    if colocated and sync.sync_method == "nccl":
        sync.sync_method = "memory"
    if sync.peer_timeout_s is None:
        joins = config.cluster.type == "address" and modes.meets(config.mode)
        file = config.buffer.trainer_input.experience_buffer.storage_type == "file"
        sync.peer_timeout_s = sync.sync_timeout_s if joins and not file else 0.0


def _patience(config: Config) -> None:
    """What one side may take is what the other has to wait for: a wait that is shorter ends runs
    that are only slow."""
    sync, store = config.synchronizer, config.buffer.trainer_input.experience_buffer
    batch_s = config.explorer.batch_timeout_s or config.explorer.longest_batch_s
    step_s = config.trainer.step_timeout_s
    if sync.meet_timeout_s is None:
        sync.meet_timeout_s = sync.sync_timeout_s + max(2 * batch_s, step_s)
    if store.max_read_timeout_s is None:
        # while it waits for rows, an evaluation and a batch may stand between it and them
        store.max_read_timeout_s = max(1800.0, sync.meet_timeout_s)


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
    model, args = config.model, taskset.rollout_args
    inherited = {
        "temperature": model.temperature,
        "top_p": model.top_p,
        "top_k": model.top_k,
        "max_tokens": model.max_response_tokens,
    }
    for key, value in inherited.items():
        if getattr(args, key) is None:
            setattr(args, key, value)


# stages --------------------------------------------------------------------------------
def split_stages(config: Config) -> list[Config]:
    """One resolved configuration per stage, in order; one when there are no stages.

    A stage's ``job_dir`` is ``<job_dir>/<stage_name>``. A stage that another follows
    exports its weights (``save_hf_checkpoint`` at least ``last``): the next starts there.

    Raises:
        ConfigError: a stage has a value of the wrong type.
    """
    base = resolve_config(config)
    if not base.stages:
        return [base]
    stages = [_merge(base, stage, index) for index, stage in enumerate(base.stages)]
    for stage in stages[:-1]:
        if stage.trainer.save_hf_checkpoint == "never":
            stage.trainer.save_hf_checkpoint = "last"
    return stages


def _stage_name_problems(config: Config) -> Iterator[str]:
    """Names that are missing, unusable as a directory, or given twice."""
    seen: set[str] = set()
    for index, stage in enumerate(config.stages):
        name = stage.get("stage_name")
        key = f"stages.{index}.stage_name"
        if not isinstance(name, str) or not _STAGE_NAME.fullmatch(name):
            yield (
                f"{key}={name!r}: every stage needs a name of letters, digits, '_', '-' or '.'; "
                f"it becomes a directory, as stage_name: warmup"
            )
        elif name in seen:
            yield f"{key}={name!r} is already the name of an earlier stage; give it another"
        seen.add(str(name))


def _merge(base: Config, stage: Mapping[str, Any], index: int) -> Config:
    inherited = copy.deepcopy(base)
    inherited.stages = []
    wanted = (stage.get("algorithm") or {}).get("algorithm_type", base.algorithm.algorithm_type)
    if wanted != base.algorithm.algorithm_type:
        inherited.algorithm = AlgorithmConfig(optimizer=inherited.algorithm.optimizer)
    inherited.job_dir = f"{base.job_dir}/{stage.get('stage_name', index)}"
    if base.mode == "bench":  # of all stages, whatever each of them once ran
        stage = {key: value for key, value in stage.items() if key != "mode"}
    try:
        # texts that are veiled are objects to OmegaConf
        start = OmegaConf.structured(inherited, flags={"allow_objects": True})
        tree = OmegaConf.unsafe_merge(start, dict(stage))
        return resolve_config(cast(Config, OmegaConf.to_object(cast(DictConfig, tree))))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, prefix=f"stages.{index}.")) from error


# files --------------------------------------------------------------------------------
def to_yaml(cfg: Config) -> str:
    """Every key with its value, in the order of the dataclasses; no secret is in it.

    What came from the environment is written as its interpolation.
    """
    return OmegaConf.to_yaml(OmegaConf.create(shown(cfg)))


def save(cfg: Config, path: str | os.PathLike[str]) -> Path:
    """Write ``cfg`` to ``path``, whole or not at all; parent directories are made."""
    write_text(Path(path), to_yaml(cfg))
    return Path(path)


def from_yaml(path: str | os.PathLike[str], lenient: bool = False) -> Config:
    """Read a saved or hand-written configuration; keys it lacks keep their defaults.

    ``lenient``, for one that is only looked at: secrets that were masked stay so, and variables
    that this environment does not have stay interpolations.

    Raises:
        ConfigError: the file is missing, not YAML, or has unknown keys or wrong types; it holds
            masked values.
    """
    try:
        tree = OmegaConf.load(os.fspath(path))
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration file {os.fspath(path)!r}") from error
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{os.fspath(path)} is not a YAML configuration: {reason}") from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(f"{os.fspath(path)} holds a list; a configuration is a mapping")
    if not lenient:
        raise_if(
            [
                f"{key} is masked in {os.fspath(path)}: a secret is not saved; set it as "
                f"{key}=${{oc.env:NAME}}, which is"
                for key in masked_keys(OmegaConf.to_container(tree))
            ]
        )
    return to_config(cast(DictConfig, tree), lenient)

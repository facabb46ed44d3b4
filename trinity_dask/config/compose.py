"""From presets and overrides, or from a file, to one typed configuration.

Invariant: what :func:`load_config` returns has only known keys, values of the right type
and range, and every derived key filled in. ``from_yaml(save(cfg))`` is equal to ``cfg``; a
file appears complete or not at all. Needs Hydra, neither torch nor dask.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_dask.config import checks
from trinity_dask.config.derive import resolve_config
from trinity_dask.config.errors import ConfigError, ConfigWarning, raise_if
from trinity_dask.config.fields import values
from trinity_dask.config.hints import (
    HYDRA_ERRORS,
    check_overrides,
    explain,
    find_unknown,
    parse,
    with_mappings,
)
from trinity_dask.config.paths import conf_dir
from trinity_dask.config.schema import Config
from trinity_dask.config.stages import setting_stages, split_stages, stage_problems
from trinity_dask.files import write_text

VERSION_BASE = "1.3"


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
    check_tree(tree)
    return tree


def check_tree(tree: DictConfig) -> None:
    """Refuse keys that do not exist, wherever in the tree they are."""
    plain = cast(dict[str, Any], OmegaConf.to_container(tree, resolve=False))
    raise_if(list(find_unknown(plain)))


def to_config(tree: DictConfig) -> Config:
    """The typed configuration of a composed tree, interpolations resolved, nothing derived."""
    check_tree(tree)
    try:
        # before a merge over the schema turns a preset's ??? into the default
        missing = sorted(OmegaConf.missing_keys(tree))
        raise_if([f"{key} must be set: add {key}=..." for key in missing])
        if OmegaConf.get_type(tree) is Config:
            typed = copy.deepcopy(tree)
        else:
            typed = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), tree))
        root = OmegaConf.select(typed, "checkpoint_root_dir")
        if "://" not in root:
            # before interpolations that contain it are resolved, so that they are absolute too
            root = os.path.abspath(os.path.expanduser(root))
            OmegaConf.update(typed, "checkpoint_root_dir", root)
        return cast(Config, OmegaConf.to_object(typed))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def resolve(cfg: DictConfig | Config) -> Config:
    """The typed configuration with every derived key filled in (idempotent).

    With ``stages`` only ``job_dir`` is derived here: each stage derives its own values
    (:func:`trinity_dask.config.stages.split_stages`).
    """
    return resolve_config(cfg if isinstance(cfg, Config) else to_config(cfg))


def validate(config: Config) -> list[str]:
    """Check a resolved configuration, all its stages included; returns the warnings.

    Raises:
        ConfigError: all problems at once, one line each with the key, the value, what is
            allowed and the fix.
    """
    if not config.stages:
        raise_if(_problems(config, checks.STAGE_CHECKS + checks.RUN_CHECKS))
        return list(checks.warnings(config))
    raise_if(_problems(config, checks.RUN_CHECKS) or list(stage_problems(config)))
    problems, found = list[str](), list[str]()
    for stage in split_stages(config):
        name = f"stage {stage.stage_name!r}"
        problems += [f"{name}: {line}" for line in _problems(stage, checks.STAGE_CHECKS)]
        found += [f"{name}: {line}" for line in checks.warnings(stage)]
    raise_if(problems)
    return found


def _problems(config: Config, rules: tuple[checks.Check, ...]) -> list[str]:
    """Ranges first; relations between values only when each value is sound."""
    found = [kind.problem(key, getattr(at, name)) for key, kind, at, name in values(config)]
    lines = [line for line in found if line is not None]
    # without those that only repeat another: rollout_args inherit from model, seeds from seed
    lines = [line for line in lines if ".rollout_args." not in line] or lines
    if any(line.startswith("seed=") for line in lines):
        lines = [line for line in lines if ".seed=" not in line]
    return lines or [line for rule in rules for line in rule(config)]


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
        key = item.key_or_group
        names = [] if config.mode == "bench" and key == "mode" else setting_stages(config, key)
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


# files --------------------------------------------------------------------------------
def to_yaml(cfg: Config) -> str:
    """Every key with its value, in the order of the dataclasses."""
    return OmegaConf.to_yaml(OmegaConf.structured(cfg))


def save(cfg: Config, path: str | os.PathLike[str]) -> Path:
    """Write ``cfg`` to ``path``, whole or not at all; parent directories are made."""
    write_text(Path(path), to_yaml(cfg))
    return Path(path)


def from_yaml(path: str | os.PathLike[str]) -> Config:
    """Read a saved or hand-written configuration; keys it lacks keep their defaults.

    Raises:
        ConfigError: the file is missing, not YAML, or has unknown keys or wrong types.
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
    return to_config(cast(DictConfig, tree))

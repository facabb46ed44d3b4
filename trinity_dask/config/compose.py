"""From presets and overrides to one typed configuration.

Invariant: what :func:`load_config` returns has only known keys, values of the right type
and range, and every derived key filled in. Needs Hydra, neither torch nor dask.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Sequence
from typing import Any, Optional, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_dask.config.derive import resolve_config
from trinity_dask.config.errors import ConfigError, ConfigWarning, raise_if
from trinity_dask.config.explain import HYDRA_ERRORS, explain
from trinity_dask.config.overrides import check_overrides, check_shadowed
from trinity_dask.config.paths import conf_dir
from trinity_dask.config.schema import Config
from trinity_dask.config.unknown import find_unknown
from trinity_dask.config.validation import validate

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


def _raise_if_missing(tree: DictConfig) -> None:
    """A preset's ``???``, which a merge over the schema would turn into the default."""
    raise_if([f"{key} must be set: add {key}=..." for key in sorted(OmegaConf.missing_keys(tree))])


def check_tree(tree: DictConfig) -> None:
    """Refuse keys that do not exist, wherever in the tree they are."""
    raise_if(find_unknown(cast(dict[str, Any], OmegaConf.to_container(tree, resolve=False))))


def to_config(tree: DictConfig) -> Config:
    """The typed configuration of a composed tree, interpolations resolved, nothing derived."""
    check_tree(tree)
    try:
        _raise_if_missing(tree)
        typed = _typed(tree)
        root = OmegaConf.select(typed, "checkpoint_root_dir")
        # before interpolations that contain it are resolved, so that they become absolute too
        OmegaConf.update(typed, "checkpoint_root_dir", absolute(root))
        return cast(Config, OmegaConf.to_object(typed))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def _typed(tree: DictConfig) -> DictConfig:
    """A copy that has all keys and their types; a composed tree has them from ``schema``."""
    if OmegaConf.get_type(tree) is Config:
        return copy.deepcopy(tree)
    return cast(DictConfig, OmegaConf.merge(OmegaConf.structured(Config), tree))


def absolute(path: str) -> str:
    """An absolute local path; a URL stays as it is, for validation to refuse."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def resolve(cfg: DictConfig | Config) -> Config:
    """The typed configuration with every derived key filled in (idempotent).

    With ``stages`` only ``job_dir`` is derived here: each stage derives its own values
    (:func:`trinity_dask.config.stages.split_stages`).
    """
    return resolve_config(cfg if isinstance(cfg, Config) else to_config(cfg))


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
    return config, validate(config) + check_shadowed(config, overrides)


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

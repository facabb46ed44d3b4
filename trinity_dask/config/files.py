"""Configurations as YAML files.

Invariant: ``from_yaml(save(cfg))`` is equal to ``cfg``; a file appears complete or not at
all.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_dask.config.compose import to_config
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.schema import Config


def to_yaml(cfg: Config) -> str:
    """Every key with its value, in the order of the dataclasses."""
    return OmegaConf.to_yaml(OmegaConf.structured(cfg))


def save(cfg: Config, path: str | os.PathLike[str]) -> Path:
    """Write ``cfg`` to ``path`` by rename; parent directories are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    part.write_text(to_yaml(cfg), encoding="utf-8")
    os.replace(part, target)
    return target


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

"""A job of several stages as several configurations.

Invariant: each stage is the base with the stage's keys merged over it, key by key; what a
stage does not mention it inherits. Only the functions of an algorithm are not inherited
by a stage with another ``algorithm_type``, since they belong to the algorithm.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trinity_dask.config.derive import resolve_config
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.hints import explain
from trinity_dask.config.schema import AlgorithmConfig, Config

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


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


def stage_problems(config: Config) -> Iterator[str]:
    """Names that are missing, unusable as a directory, or given twice."""
    seen: set[str] = set()
    for index, stage in enumerate(config.stages):
        name = stage.get("stage_name")
        key = f"stages.{index}.stage_name"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            yield (
                f"{key}={name!r}: every stage needs a name of letters, digits, '_', '-' or '.'; "
                f"it becomes a directory, as stage_name: warmup"
            )
        elif name in seen:
            yield f"{key}={name!r} is already the name of an earlier stage; give it another"
        seen.add(str(name))


def setting_stages(config: Config, key: str) -> list[str]:
    """Names of the stages that set ``key`` themselves, so that the base's value is not seen."""
    return [str(stage.get("stage_name")) for stage in config.stages if _sets(stage, key)]


def _sets(stage: Mapping[str, Any], key: str) -> bool:
    node: Any = stage
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return not isinstance(node, Mapping)


def _merge(base: Config, stage: Mapping[str, Any], index: int) -> Config:
    inherited = copy.deepcopy(base)
    inherited.stages = []
    if _changes_algorithm(base, stage):
        inherited.algorithm = AlgorithmConfig(optimizer=inherited.algorithm.optimizer)
    inherited.job_dir = f"{base.job_dir}/{stage.get('stage_name', index)}"
    if base.mode == "bench":  # of all stages, whatever each of them once ran
        stage = {key: value for key, value in stage.items() if key != "mode"}
    try:
        tree = OmegaConf.unsafe_merge(OmegaConf.structured(inherited), dict(stage))
        return resolve_config(cast(Config, OmegaConf.to_object(cast(DictConfig, tree))))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, prefix=f"stages.{index}.")) from error


def _changes_algorithm(base: Config, stage: Mapping[str, Any]) -> bool:
    section = stage.get("algorithm") or {}
    wanted = section.get("algorithm_type", base.algorithm.algorithm_type)
    return bool(wanted != base.algorithm.algorithm_type)

"""Where the presets are, and which there are; where the paths of a command lead.

Invariant: the same ``conf/`` is found in a checkout (next to the package) and in an
installed wheel (inside the package). A relative path means the directory in which the command
was given, whatever directory a worker was started in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from trinity_dask.config.errors import ConfigError
from trinity_dask.config.schema import Config, ExperienceBufferConfig, TasksetConfig
from trinity_dask.config.secrets import veiled_like

_PACKAGE = Path(__file__).resolve().parent.parent


def conf_dir() -> Path:
    """The directory that holds ``config.yaml`` and the groups."""
    candidates = (_PACKAGE / "conf", _PACKAGE.parent / "conf")
    for path in candidates:
        if (path / "config.yaml").is_file():
            return path
    looked = " or ".join(str(path) for path in candidates)
    raise ConfigError(
        f"the presets are missing: no config.yaml in {looked}; reinstall trinity-dask"
    )


def groups(config_dir: Optional[str] = None) -> dict[str, list[str]]:
    """Group name -> its options, sorted; with those of a directory of the user's."""
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir={config_dir}: there is no such directory")
    found: dict[str, list[str]] = {}
    for home in (conf_dir(), *([Path(config_dir)] if config_dir else [])):
        for folder in sorted(path for path in home.iterdir() if path.is_dir()):
            options = (path.stem for path in folder.glob("*.yaml"))
            found[folder.name] = sorted({*found.get(folder.name, []), *options})
    return found


# paths of a command --------------------------------------------------------------------
# URLs of databases in files: what follows is a path
_FILE_DATABASES = ("sqlite:///", "duckdb:///")
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def make_absolute(config: Config) -> None:
    """Every path and every ``file.py:name`` of ``config`` from the present directory, in place."""
    for section, name, to_absolute in _paths_of(config):
        value = getattr(section, name)
        if isinstance(value, str):
            setattr(section, name, veiled_like(value, to_absolute(value)))
        elif value:
            setattr(section, name, [veiled_like(each, to_absolute(each)) for each in value])


def absolute(path: str) -> str:
    """A path or a pattern; URLs stay as they are, but for those of databases in files."""
    for scheme in _FILE_DATABASES:
        if path.startswith(scheme) and len(path) > len(scheme) and ":memory:" not in path:
            return scheme + absolute(path.removeprefix(scheme))
    return path if not path or "://" in path else os.path.abspath(os.path.expanduser(path))


def _unless_on_the_hub(path: str) -> str:
    known = _HUB_NAME.fullmatch(path) and "." not in os.path.basename(path).strip(".")
    return path if known and not os.path.exists(path) else absolute(path)


def _model(path: str) -> str:
    """A model that a preset makes later is not there yet; ``org/name`` is told as it was given."""
    is_name = path.count("/") == 1 and _HUB_NAME.fullmatch(path) and not os.path.exists(path)
    return path if is_name else absolute(path)


def _code(name: str) -> str:
    """``file.py:name``; registered names and those of modules stay."""
    path, colon, attribute = name.rpartition(":")
    return f"{absolute(path)}{colon}{attribute}" if path.endswith(".py") else name


def _paths_of(config: Config) -> Iterator[tuple[Any, str, Any]]:
    yield config, "prepare", _code
    yield config, "plugin_dirs", absolute
    yield config, "checkpoint_root_dir", absolute
    yield config.cluster, "local_directory", absolute
    yield config.monitor, "sinks", _code
    yield config.synchronizer, "path", absolute
    model = _model if config.prepare is None else absolute
    for section, name in (
        (config.model, "model_path"),
        (config.model, "teacher_model_path"),
        (config.model.lora, "path"),
        (config.critic, "model_path"),
    ):
        yield section, name, model
    for name in (
        *("advantage_fn", "policy_loss_fn", "kl_penalty_fn", "kl_loss_fn", "entropy_loss_fn"),
        "sample_strategy",
    ):
        yield config.algorithm, name, _code
    yield config.explorer.rollout_model, "engine_type", _code
    source, target = config.buffer.explorer_input, config.buffer.trainer_input
    yield source, "default_workflow", _code
    yield source, "default_reward_fn", _code
    data: list[TasksetConfig | ExperienceBufferConfig] = [
        *(source.taskset, *source.tasksets, *source.eval_tasksets),
        *(target.experience_buffer, *target.auxiliary_buffers),
    ]
    for each in data:
        yield each, "path", _unless_on_the_hub
        if isinstance(each, TasksetConfig):
            yield each, "workflow", _code
            yield each, "reward_fn", _code
        else:
            yield each.replay_buffer, "priority_fn", _code
    for operator in config.buffer.operators:
        yield operator, "name", _code

"""The overrides of a command, checked before anything is composed.

Invariant: every override names a key that exists or an option of a group that exists;
each value of a sweep is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException

from trinity_dask.config.errors import ConfigError, raise_if
from trinity_dask.config.explain import cannot_read
from trinity_dask.config.keys import DERIVED, kind_at
from trinity_dask.config.nearest import hint
from trinity_dask.config.paths import groups
from trinity_dask.config.schema import Config
from trinity_dask.config.stages import setting_stages
from trinity_dask.config.unknown import check_key

#: groups without a default option: chosen with a leading +
ADDED_GROUPS = ("experiment",)


def check_overrides(overrides: Sequence[str], config_dir: Optional[str] = None) -> None:
    """Raise :class:`ConfigError` with one line per bad override."""
    known = all_groups(config_dir)
    raise_if([line for item in overrides for line in _problems(parse(item), known)])


def parse(override: str) -> Override:
    """One override of Hydra's grammar."""
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigError(cannot_read(override)) from error


def check_shadowed(config: Config, overrides: Sequence[str]) -> list[str]:
    """Warnings for overrides that some stages do not see because they set the key themselves.

    Raises:
        ConfigError: an override that no stage sees.
    """
    useless, partial = list[str](), list[str]()
    for item in map(parse, overrides):
        key = item.key_or_group
        names = [] if config.mode == "bench" and key == "mode" else setting_stages(config, key)
        if names and len(names) == len(config.stages):
            useless.append(
                f"{item.input_line} has no effect: every stage sets {key}; "
                f"override it per stage, as stages.0.{key}=... ({_numbered(config)})"
            )
        elif names:
            partial.append(f"{item.input_line} does not apply to stage {', '.join(names)}")
    raise_if(useless)
    return partial


def _numbered(config: Config) -> str:
    return ", ".join(f"{i} is {stage.get('stage_name')}" for i, stage in enumerate(config.stages))


def single_values(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The override lists to check for a sweep: every swept value once, not every combination."""
    parsed = [parse(item) for item in overrides]
    choices = [_choices(item) for item in parsed]
    first = [options[0] for options in choices]
    yield first
    for index, options in enumerate(choices):
        for option in options[1:]:
            yield [*first[:index], option, *first[index + 1 :]]


def _choices(override: Override) -> list[str]:
    """Plain overrides for the values of one override; of a range only its two ends."""
    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        return [f"{key}={value.start}", f"{key}={value.end}"]
    if isinstance(value, Glob):
        options = groups().get(override.key_or_group, [])
        return [f"{key}={name}" for name in value.filter(options)]
    if not override.is_discrete_sweep():
        return [override.input_line or ""]
    names = [f"{key}={value}" for value in override.sweep_string_iterator()]
    return [names[0], names[-1]] if override.is_range_sweep() else names


def all_groups(config_dir: Optional[str] = None) -> dict[str, list[str]]:
    """The groups of the presets and of a directory of the user's, with their options."""
    known = dict(groups())
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir={config_dir}: there is no such directory")
    for path in sorted(Path(config_dir).iterdir()) if config_dir else []:
        if path.is_dir():
            options = sorted(item.stem for item in path.glob("*.yaml"))
            known[path.name] = sorted({*known.get(path.name, []), *options})
    return known


def _problems(override: Override, known: dict[str, list[str]]) -> Iterator[str]:
    name = override.key_or_group
    if name == "hydra" or name.startswith(("hydra.", "hydra/")):
        return
    if name in known and _names_option(override, name):
        yield from _group_problems(override, name, known[name])
    elif "/" in name:
        yield f"unknown group {name!r}; {hint(name, list(known))}"
    elif name in DERIVED:
        yield f"{name} is derived: set checkpoint_root_dir, project, group and name instead"
    else:
        problem = check_key(name) or _removal_problem(override)
        if problem is not None:
            yield problem


def _removal_problem(override: Override) -> Optional[str]:
    """Only what a preset added (in a stage or an open section) can be taken away again."""
    key = override.key_or_group
    kind = kind_at(key)
    if not override.is_delete() or kind is None or kind.is_open:
        return None
    return f"~{key}: a key cannot be removed; set it to another value, as {key}=..."


def _names_option(override: Override, name: str) -> bool:
    """False for ``model={...}``, a value for the section of the same name."""
    return name in ADDED_GROUPS or isinstance(override.value(), str) or override.is_sweep_override()


def _group_problems(override: Override, name: str, options: list[str]) -> Iterator[str]:
    if override.is_delete():
        return
    for option in _option_names(override):
        if option not in options:
            yield f"no option {option!r} in group {name!r}; {hint(option, options)}"
        elif name in ADDED_GROUPS and not override.is_add():
            yield f"{name}={option} needs a leading +: write +{name}={option}"
        elif name not in ADDED_GROUPS and override.is_add():
            yield f"group {name!r} already has an option: write {name}={option} without the +"


def _option_names(override: Override) -> list[str]:
    value = override.value()
    if isinstance(value, Glob):
        return []
    if override.is_discrete_sweep():
        return [str(name).strip("'\"") for name in override.sweep_string_iterator()]
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]

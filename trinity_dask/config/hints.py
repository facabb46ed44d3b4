"""What was meant by a key, an option or an override that cannot be, told in one line.

Invariant: a message names what was given and the nearest thing that exists. Errors of Hydra and
OmegaConf are translated; one that is not known keeps its own first line.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Optional

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from trinity_dask.config.errors import ConfigError, hint, nearest
from trinity_dask.config.fields import Kind, all_keys, fields_of
from trinity_dask.config.paths import groups
from trinity_dask.config.schema import STAGE_KEYS, Config

HYDRA_ERRORS = (HydraException, OmegaConfBaseException)
#: groups without a default option: chosen with a leading +
ADDED_GROUPS = ("experiment",)

# keys of Trinity-RFT that have another name or place here
_STORE, _TASKS = "buffer.trainer_input.experience_buffer", "buffer.explorer_input"
RENAMED = {
    "cluster.node_num": "cluster.rollout.n_workers",
    "cluster.gpu_per_node": "cluster.rollout.gpus_per_worker",
    "cluster.ray_address": "cluster.address",
    "explorer.runner_per_model": "cluster.rollout.nthreads",
    "explorer.rollout_model.engine_num": "cluster.rollout.n_workers",
    f"{_STORE}.capacity": f"{_STORE}.capacity_batches",
    f"{_STORE}.replay_buffer.reuse_cooldown_time": f"{_STORE}.replay_buffer.reuse_cooldown_time_s",
    f"{_TASKS}.taskset.task_selector": f"{_TASKS}.taskset.data_selector",
    f"{_TASKS}.taskset.default_workflow_type": f"{_TASKS}.taskset.workflow",
    f"{_TASKS}.taskset.default_reward_fn_type": f"{_TASKS}.taskset.reward_fn",
    f"{_TASKS}.default_workflow_type": f"{_TASKS}.default_workflow",
    f"{_TASKS}.default_reward_fn_type": f"{_TASKS}.default_reward_fn",
    "data_processor.experience_pipeline.operators": "buffer.operators",
    "monitor.monitor_type": "monitor.sinks",
    "monitor.monitor_args": "monitor.sink_args",
    "trainer.max_token_len_per_gpu": "trainer.micro_batch_tokens",
}
_CANNOT_READ = (
    "cannot read {!r}: an override is key=value, with quotes around values that "
    "have spaces, commas or brackets, as 'key=\"a b\"'"
)
CANNOT_REMOVE = "~{0}: a key cannot be removed; set it to another value, as {0}=..."
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list, as [a,b]",
    dict: "a mapping, as {key: value}",
}


# keys ---------------------------------------------------------------------------------
def split_path(path: str) -> list[str]:
    """``a.b[0].c`` and ``a.b.0.c`` alike as parts."""
    return [part for part in path.replace("[", ".").replace("]", "").split(".") if part]


def _of_stage(path: str) -> tuple[str, list[str]]:
    """``stages.1.`` and the parts of the rest, for a key inside a stage."""
    parts = split_path(path)
    if len(parts) > 2 and parts[0] == "stages":
        return ".".join(parts[:2]) + ".", parts[2:]
    return "", parts


def kind_at(path: str) -> Optional[Kind]:
    """The kind of the key at a dotted path (of the run or of a stage); None: no such key.

    Everything below an open section is an open section.
    """
    prefix, parts = _of_stage(path)
    if prefix and parts[0] not in STAGE_KEYS:
        return None
    kind = Kind(section=Config)
    for part in parts:
        if kind.is_open:
            return kind
        if kind.item is not None and part.isdigit():
            kind = Kind(section=kind.item)
        elif kind.section is not None and part in fields_of(kind.section):
            kind = fields_of(kind.section)[part]
        else:
            return None
    return kind


def check_key(path: str) -> Optional[str]:
    """The problem with a dotted key, or None when it exists."""
    if kind_at(path) is not None:
        return None
    prefix, parts = _of_stage(path)
    if prefix and parts[0] in fields_of(Config) and parts[0] not in STAGE_KEYS:
        return (
            f"{prefix}{parts[0]}: {parts[0]!r} belongs to the whole run and cannot change in a "
            f"stage; set it at the top level (a stage may set: {', '.join(STAGE_KEYS)})"
        )
    renamed = RENAMED.get(".".join(parts))
    if renamed is not None:
        return f"unknown key '{path}'; here it is '{prefix}{renamed}'"
    by_leaf: dict[str, str] = {}  # a key elsewhere with this last name, or the nearest one
    for key, _ in all_keys(Config):
        by_leaf.setdefault(split_path(key)[-1], key)
    elsewhere = by_leaf.get(parts[-1]) or by_leaf.get(nearest(parts[-1], by_leaf) or "")
    meant = _in_place(parts, STAGE_KEYS if prefix else ()) or elsewhere
    if meant is not None:
        here = prefix if split_path(meant)[0] in STAGE_KEYS else ""
        if prefix and len(parts) == 1:  # of the words that a stage may hold
            return f"unknown key '{path}'; did you mean {meant!r}?"
        return f"unknown key '{path}'; did you mean '{here}{meant}'?"
    section: type = Config
    walked: list[str] = []
    for part in parts:
        below = fields_of(section).get(part, Kind()).section
        if below is None:
            break
        section, walked = below, [*walked, part]
    where = f"in '{'.'.join(walked)}'" if walked else "at the top level"
    return f"unknown key '{path}'; keys {where}: {', '.join(fields_of(section))}"


def _in_place(parts: list[str], top: tuple[str, ...] = ()) -> Optional[str]:
    """The path with each wrong part replaced by its nearest sibling; None if one has none."""
    kind, fixed = Kind(section=Config), list[str]()
    for index, part in enumerate(parts):
        if kind.item is not None and part.isdigit():
            kind = Kind(section=kind.item)
            fixed.append(part)
            continue
        if kind.section is None:
            return ".".join(fixed) or None
        known = fields_of(kind.section)
        names = list((top if index == 0 else ()) or known)
        names += list(groups()) if len(parts) == 1 and not top else []
        name = part if part in names else nearest(part, names)
        if name is None:
            return None
        fixed.append(name if name in known else f"+{name}=...")
        kind = known.get(name, Kind())
    return ".".join(fixed)


# overrides ----------------------------------------------------------------------------
def with_mappings(overrides: Sequence[str]) -> list[str]:
    """The same overrides, a mapping written as Hydra takes it: with a leading ``++``.

    Hydra merges ``key={...}`` over what is there, and refuses the keys that an open section does
    not have yet. Keys that do not exist are found in the composed tree instead.
    """
    return [_plain_mapping(parse(item)) or item for item in overrides]


def _plain_mapping(override: Override) -> Optional[str]:
    if override.is_add() or override.is_force_add() or override.is_delete():
        return None
    value = override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    return f"++{override.input_line}" if all(isinstance(v, dict) for v in values) else None


def parse(override: str) -> Override:
    """One override of Hydra's grammar."""
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigError(_CANNOT_READ.format(override)) from error


def single_values(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The override lists to check for a sweep: every swept value once, not every combination."""
    choices = [_values_of(parse(item)) for item in overrides]
    first = [options[0] for options in choices]
    yield first
    for index, options in enumerate(choices):
        for option in options[1:]:
            yield [*first[:index], option, *first[index + 1 :]]


def _values_of(override: Override) -> list[str]:
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


# errors of Hydra and OmegaConf ----------------------------------------------------------
def explain(error: BaseException, prefix: str = "") -> str:
    """One line for a composition error; ``prefix`` is put before the key it names."""
    message = str(error)
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        if not error.options:
            return f"no preset {error.missing_cfg_file!r}: {message.splitlines()[0]}"
        return f"no option {option!r} in group {group!r}; {hint(option, list(error.options))}"
    if isinstance(error, OverrideParseException):
        return _CANNOT_READ.format(error.override)
    cause: Optional[BaseException] = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        if lines[0].startswith("Ambiguous value"):
            name = lines[0].removeprefix("Ambiguous value for argument ")
            return (
                f"{name} has several values: write key=[a,b] for a list, or add --multirun to sweep"
            )
        append = re.search(r"use (\+\S+)$", message)
        return f"{lines[0]} Write {append.group(1)}" if append else " ".join(lines)
    # the override that Hydra's message quotes, as typed
    quoted = re.search(r"^Error merging override (.+)$", message, re.MULTILINE) or re.search(
        r"^To append to your config use \+(.+)$", message, re.MULTILINE
    )
    preset = re.match(r"In '([^']+)': ", message)
    where = f"in preset {preset.group(1)}: " if preset else ""
    return where + _omegaconf(cause, prefix, quoted.group(1) if quoted else None)


def _omegaconf(error: OmegaConfBaseException, prefix: str, override: Optional[str]) -> str:
    key = ".".join(split_path(override.split("=", 1)[0] if override else error.full_key or ""))
    key, text = prefix + key.lstrip("+~"), str(error).splitlines()[0]
    if isinstance(error, MissingMandatoryValue):
        return f"{key} must be set: add {key}=... to the command"
    if isinstance(error, InterpolationResolutionError):
        return f"{key}: {text}; name an existing key in ${{...}}"
    if "does not support deletion" in text:
        return CANNOT_REMOVE.format(key)
    if isinstance(error, ConfigKeyError | AttributeError):  # not in the structure
        if (problem := check_key(key)) is not None:
            return problem
        if str(error.key) in key.split(".") or override is None:
            return f"{key} is not set by the presets; to add it write ++{override or key + '=...'}"
        kind = kind_at(key)
        entry = ".0" if kind is not None and kind.item is not None else ""  # a list of sections
        return str(check_key(f"{key}{entry}.{error.key}"))
    if isinstance(error, ValidationError):  # of the wrong type
        inner = ".".join(split_path(error.full_key or ""))
        key = inner if inner.startswith(key + ".") else key
        shown = override or (key if error.value is None else f"{key}={error.value}")
        # of a key in a list of sections OmegaConf reports only the end
        ends = [each for each, _ in all_keys(Config) if f".{each}".endswith(f".{inner}")]
        kind = kind_at(key) or kind_at(ends[0] if ends else inner)
        wanted = None if kind is None or kind.is_open else type_words(kind.annotation)
        return f"{shown}: " + (text if wanted is None else f"the value must be {wanted}")
    return f"{key}: {text}" if key else text


def type_words(annotation: Any) -> str:
    """``a whole number``, ``a number or null``, ..."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [item for item in typing.get_args(annotation) if item is not type(None)]
        return f"{type_words(members[0])} or null"
    origin = typing.get_origin(annotation) or annotation
    return _WORDS.get(origin, "a section, as key.subkey=value")

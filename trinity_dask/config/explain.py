"""Hydra's and OmegaConf's errors as one line: the key, the value, what is allowed, the fix.

Invariant: pure translation; an error it does not know keeps its own first line.
"""

from __future__ import annotations

import re
import types
import typing
from typing import Any, Optional

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from trinity_dask.config.keys import all_keys, kind_at, split_path
from trinity_dask.config.nearest import hint
from trinity_dask.config.unknown import check_key, unknown_key

HYDRA_ERRORS = (HydraException, OmegaConfBaseException)

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list, as [a,b]",
    dict: "a mapping, as {key: value}",
}


def explain(error: BaseException, prefix: str = "") -> str:
    """One line for a composition error; ``prefix`` is put before the key it names."""
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return cannot_read(error.override)
    cause = _root(error)
    override = _override_of(str(error))
    if cause is not None:
        preset = re.match(r"In '([^']+)': ", str(error))
        where = f"in preset {preset.group(1)}: " if preset else ""
        return where + _omegaconf(cause, prefix, override)
    return _plain_hydra(str(error))


def _root(error: BaseException) -> Optional[OmegaConfBaseException]:
    """OmegaConf's error behind Hydra's."""
    seen: Optional[BaseException] = error
    while seen is not None and not isinstance(seen, OmegaConfBaseException):
        seen = seen.__cause__ or seen.__context__
    return seen


def cannot_read(override: str) -> str:
    """An override that is not in the grammar."""
    return (
        f"cannot read {override!r}: an override is key=value, with quotes around values that "
        "have spaces, commas or brackets, as 'key=\"a b\"'"
    )


def type_words(annotation: Any) -> str:
    """``a whole number``, ``a number or null``, ..."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [item for item in typing.get_args(annotation) if item is not type(None)]
        return f"{type_words(members[0])} or null"
    origin = typing.get_origin(annotation) or annotation
    return _WORDS.get(origin, "a section, as key.subkey=value")


def _omegaconf(error: OmegaConfBaseException, prefix: str, override: Optional[str]) -> str:
    key = ".".join(split_path(override.split("=", 1)[0] if override else error.full_key or ""))
    key = prefix + key.lstrip("+~")
    text = str(error).splitlines()[0]
    if isinstance(error, MissingMandatoryValue):
        return f"{key} must be set: add {key}=... to the command"
    if isinstance(error, InterpolationResolutionError):
        return f"{key}: {text}; name an existing key in ${{...}}"
    if "does not support deletion" in text:
        return f"~{key}: a key cannot be removed; set it to another value, as {key}=..."
    if isinstance(error, ConfigKeyError | AttributeError):
        return _not_in_struct(error, key, override)
    if isinstance(error, ValidationError):
        return _wrong_type(error, key, override)
    return f"{key}: {text}" if key else text


def _not_in_struct(error: OmegaConfBaseException, key: str, override: Optional[str]) -> str:
    if check_key(key) is not None:
        return unknown_key(key)
    if str(error.key) in key.split(".") or override is None:
        return f"{key} is not set by the presets; to add it write ++{override or key + '=...'}"
    return unknown_key(f"{key}.0.{error.key}")  # inside a list of sections


def _wrong_type(error: OmegaConfBaseException, key: str, override: Optional[str]) -> str:
    inner = ".".join(split_path(error.full_key or ""))
    key = inner if inner.startswith(key + ".") else key
    kind = kind_at(key) or kind_at(_whole_path(inner))
    wanted = type_words(kind.annotation) if kind is not None and not kind.is_open else None
    given = "" if error.value is None else f"={error.value}"
    shown = override if override is not None else key + given
    if wanted is None:
        return f"{shown}: {str(error).splitlines()[0]}"
    return f"{shown}: the value must be {wanted}"


def _whole_path(tail: str) -> str:
    """The full key of which OmegaConf reports only the end."""
    matches = [key for key, _ in all_keys() if key == tail or key.endswith("." + tail)]
    return matches[0] if matches else tail


def _missing_option(error: MissingConfigException) -> str:
    wanted = error.missing_cfg_file or ""
    group, _, option = wanted.rpartition("/")
    if not error.options:
        return f"no preset {wanted!r}: {str(error).splitlines()[0]}"
    return f"no option {option!r} in group {group!r}; {hint(option, list(error.options))}"


def _override_of(message: str) -> Optional[str]:
    """The override that Hydra's message quotes, as typed."""
    found = re.search(r"^Error merging override (.+)$", message, re.MULTILINE) or re.search(
        r"^To append to your config use \+(.+)$", message, re.MULTILINE
    )
    return found.group(1) if found else None


def _plain_hydra(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if lines[0].startswith("Ambiguous value"):
        name = lines[0].removeprefix("Ambiguous value for argument ")
        return f"{name} has several values: write key=[a,b] for a list, or add --multirun to sweep"
    append = re.search(r"use (\+\S+)$", message)
    if append:
        return f"{lines[0]} Write {append.group(1)}"
    return " ".join(lines)

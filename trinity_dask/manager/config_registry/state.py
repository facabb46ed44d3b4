"""What has been chosen of a configuration, and what one key of it may be: plain values.

Invariant: a :class:`State` is never changed, a change gives another one; a :class:`Field` follows
from the state and the structured configuration alone. Limits, choices and meanings are those of
the dataclasses.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import yaml
from omegaconf import OmegaConf

from trinity_dask.config.algorithms import GROUP_TYPES, OFFLINE_TYPES
from trinity_dask.config.compose import compose_tree
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.fields import Kind, all_keys, comments, fields_of
from trinity_dask.config.hints import kind_at, type_words
from trinity_dask.config.schema import DERIVED, Config
from trinity_dask.config.secrets import masked_keys, shown
from trinity_dask.manager.config_registry.choices import FUNCTIONS

HEADER = "# @package _global_"
_SLOTS = tuple(FUNCTIONS)
_STORE = "buffer.trainer_input.experience_buffer"
_ENGINE = "explorer.rollout_model"


@dataclass(frozen=True)
class Field:
    """One key as a form shows it.

    ``kind``: text, number, whole, switch, choice, list, mapping, or note (nothing to set: ``help``
    says what took its place). ``range`` is text; ``problem`` what is wrong with the value alone.
    """

    key: str
    kind: str
    value: Any = None
    choices: tuple[str, ...] = ()
    range: str = ""
    help: str = ""
    visible: bool = True
    problem: Optional[str] = None
    label: str = ""


@dataclass(frozen=True)
class State:
    """``words`` choose presets, as ``+experiment=...``; ``values`` are set over them."""

    words: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    # repeat_times of algorithms that compare a group, and of the others
    remembered: Mapping[bool, Any] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The value at a dotted key: chosen here, or what the presets give; None: neither."""
        if key in self.values:
            return self.values[key]
        node: Any = base(self.words)
        parts = key.split(".")
        for index, part in enumerate(parts):
            node = node.get(part) if isinstance(node, Mapping) else None
            inner = ".".join(parts[: index + 1])
            if inner in self.values:
                node = self.values[inner]
        return node

    def set(self, key: str, value: Any) -> State:
        """With this key, and without what it makes meaningless."""
        if key.startswith("stages."):
            key, value = "stages", _in_stage(self.get("stages"), key, value)
        state = replace(self, values={**self.values, key: value})
        if key == "algorithm.algorithm_type":
            return _of_algorithm(state, self.get(key), value)
        if key.removeprefix("algorithm.") in _SLOTS:
            return state.without(f"{key}_args")
        if key == f"{_ENGINE}.tensor_parallel_size" and self.get("cluster.rollout.gpus_per_worker"):
            return state.set("cluster.rollout.gpus_per_worker", value)
        return state

    def without(self, *keys: str) -> State:
        """As the presets have these keys and all below them."""
        prefixes = tuple(f"{key}." for key in keys)
        kept = {
            k: v for k, v in self.values.items() if k not in keys and not k.startswith(prefixes)
        }
        return replace(self, values=kept)

    def chosen(self) -> dict[str, Any]:
        """What differs from the presets."""
        plain = State(self.words)
        return {key: value for key, value in self.values.items() if plain.get(key) != value}

    def overrides(self) -> list[str]:
        """The words of a command line that mean this state."""
        known = set(keys())
        return [
            *self.words,
            *(
                f"{'' if key in known else '++'}{key}={word(value)}"
                for key, value in self.chosen().items()
            ),
        ]

    def plain_secrets(self) -> list[str]:
        """The keys chosen here whose value no file may hold."""
        found: list[str] = []
        for key, value in self.chosen().items():
            names = tuple(key.split("."))
            found.extend(masked_keys(shown(value, names), names))
        return found

    def to_yaml(self) -> str:
        """A preset file with this state: the presets as its defaults, and what is set over them.

        Secrets are masked: :meth:`plain_secrets` names them.
        """
        defaults: list[Any] = []
        for item in self.words:
            name, _, option = item.lstrip("+").partition("=")
            defaults.append(option if name == "experiment" else {f"override /{name}": option})
        tree: dict[str, Any] = {"defaults": [*defaults, "_self_"]}
        for key, value in self.chosen().items():
            *path, last = key.split(".")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[last] = shown(value, tuple(key.split(".")))
        return f"{HEADER}\n{yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)}"


def from_yaml(text: str) -> State:
    """The state of a preset file, or of a job's whole ``config.yaml``.

    Raises:
        ConfigError: it is no YAML mapping, or names a key or preset that does not exist.
    """
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError("a configuration is a mapping of keys to values")
    words = []
    for item in tree.pop("defaults", []):
        for name, option in item.items() if isinstance(item, dict) else (("", item),):
            if name:
                words.append(f"{name.removeprefix('override /').lstrip('/')}={option}")
            elif option != "_self_":
                words.append(f"+experiment={option}")
    values = dict(_leaves({k: v for k, v in tree.items() if k not in DERIVED}))
    state = State(tuple(words), values)
    return replace(state, values=state.chosen())


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        kind = kind_at(key)
        if kind is None:
            raise ConfigError(f"unknown key {key!r}")
        if kind.section is not None and isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


@functools.lru_cache(maxsize=32)
def base(words: tuple[str, ...]) -> Mapping[str, Any]:
    """What the presets give, interpolations unresolved."""
    tree: Any = OmegaConf.to_container(compose_tree(words))
    return tree


@functools.cache
def keys() -> dict[str, Kind]:
    """Every key that a form can set, in order; lists of sections are set as a whole."""
    return {
        key: kind
        for key, kind in all_keys(Config)
        if kind.section is None and ".0." not in key and key not in DERIVED
    }


@functools.cache
def meaning(key: str) -> str:
    """The words beside a key in the dataclasses."""
    section: Any = Config
    *path, last = key.split(".")
    for part in path:
        section = fields_of(section)[part].section or dict
        if section is dict:  # below an open section
            return ""
    return comments(section).get(last, "")


def field_of(state: State, key: str, visible: bool = True, label: str = "") -> Field:
    """The field of one of our keys, as the state has it.

    Raises:
        ConfigError: there is no such key.
    """
    kind = kind_at(key)
    if kind is None:
        raise ConfigError(f"unknown key {key!r}")
    value, slot = state.get(key), key.removeprefix("algorithm.")
    choices = kind.choices or FUNCTIONS.get(slot, ())
    shown = _kind(key, kind, bool(choices))
    limits = "" if kind.range is None else str(kind.range)
    return Field(
        key,
        shown,
        value,
        choices,
        limits,
        meaning(key),
        visible,
        problem(key, kind, value),
        label or key.rpartition(".")[2],
    )


def _kind(key: str, kind: Kind, has_choices: bool) -> str:
    if has_choices:
        return "choice"
    words = (
        "a mapping" if kind.annotation is None or key not in keys() else type_words(kind.annotation)
    )
    if kind.item is not None:
        return "list"
    for start, name in (
        ("a whole", "whole"),
        ("a number", "number"),
        ("true", "switch"),
        ("a list", "list"),
        ("a mapping", "mapping"),
    ):
        if words.startswith(start):
            return name
    return "text"


def problem(key: str, kind: Kind, value: Any) -> Optional[str]:
    """What is wrong with a value by itself: its type, its range, its choices."""
    if isinstance(value, str) and "${" in value:
        return None
    if key in keys() and value is None and "null" not in type_words(kind.annotation):
        return f"{key} needs a value"
    shown = _kind(key, kind, bool(kind.choices))
    right: dict[str, tuple[type, ...]] = {
        "whole": (int,),
        "number": (int, float),
        "switch": (bool,),
        "list": (list,),
    }
    expected = right.get(shown)
    is_flag = isinstance(value, bool) and shown != "switch"
    if expected and value is not None and (is_flag or not isinstance(value, expected)):
        return f"{key}={value}: the value must be {type_words(kind.annotation)}"
    if isinstance(value, str) and kind.choices:
        value = kind.aliases.get(value.lower(), value.lower())
    return kind.problem(key, value)


def word(value: Any) -> str:
    """A value as Hydra's command line takes it."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{word(item)}" for name, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(word, value)) + "]"
    # a backslash means something to the command line only before a quote, as that of the end
    text = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), str(value))
    return f"'{text}'"


def _in_stage(stages: Sequence[Mapping[str, Any]], key: str, value: Any) -> list[Any]:
    """All stages, with the key of one of them set: a list is overridden as a whole."""
    changed: list[Any] = copy.deepcopy(list(stages))
    _, index, *path, last = key.split(".")
    node = changed[int(index)]
    for part in path:
        node = node.setdefault(part, {})
    node[last] = value
    return changed


def _of_algorithm(state: State, before: str, after: str) -> State:
    """Another algorithm has its own functions, data and group size."""
    state = state.without(*(f"algorithm.{slot}{end}" for slot in _SLOTS for end in ("", "_args")))
    values, remembered = dict(state.values), dict(state.remembered)
    grouped = after in GROUP_TYPES
    if (before in GROUP_TYPES) != grouped:
        remembered[not grouped] = values.pop("algorithm.repeat_times", None)
        if remembered.get(grouped) is not None:
            values["algorithm.repeat_times"] = remembered[grouped]
    offline = after in OFFLINE_TYPES
    if offline != (before in OFFLINE_TYPES):
        values["mode"] = "train" if offline else "both"
        values[f"{_STORE}.storage_type"] = "file" if offline else "store"
    return replace(state, values=values, remembered=remembered)

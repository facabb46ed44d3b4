"""The fields of the configuration page by Trinity-RFT's names, and the one way to make them.

Invariant: every ``set_*`` is a function of a state that gives a field and changes nothing; which
key of ours it is about, and why there is none, is read from the converter's table.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

from trinity_dask.compat.trinity_config import KEYS
from trinity_dask.config import modes
from trinity_dask.config.algorithms import OFFLINE_TYPES
from trinity_dask.manager.config_registry.choices import ARGUMENTS, chosen
from trinity_dask.manager.config_registry.state import Field, State, field_of

Setter = Callable[..., Field]
Check = Callable[[State], Optional[str]]
_OF_FUNCTION = re.compile(rf"set_(\w+)_in_({'|'.join(ARGUMENTS)})")


def algorithm_of(state: State) -> str:
    return str(state.get("algorithm.algorithm_type"))


def uses_critic(state: State) -> bool:
    """Whether the advantage is made from a critic's values."""
    return function_of(state, "advantage_fn") == "ppo"


def function_of(state: State, slot: str) -> str:
    """The function that the algorithm has for ``slot``: the one named, or its own."""
    return chosen(slot, algorithm_of(state), state.get(f"algorithm.{slot}"))


#: conditions of visibility by the word that a table gives
VISIBLE: dict[str, Callable[[State], bool]] = {
    "always": lambda state: True,
    "samples": lambda state: modes.samples(str(state.get("mode"))),
    "trains": lambda state: modes.trains(str(state.get("mode"))),
    "critic": uses_critic,
    "offline": lambda state: algorithm_of(state) in OFFLINE_TYPES,
    "online": lambda state: algorithm_of(state) not in OFFLINE_TYPES,
    "group": lambda state: algorithm_of(state) != "dpo",
    "replay": lambda state: bool(
        state.get("buffer.trainer_input.experience_buffer.replay_buffer.enable")
    ),
    "dpo": lambda state: algorithm_of(state) == "dpo",
    "sft": lambda state: algorithm_of(state) in ("sft", "cpt"),
}


class ConfigRegistry:
    """Fields by name, in the order of their registration, with their checks."""

    def __init__(self) -> None:
        self.setters: dict[str, Setter] = {}
        self.defaults: dict[str, Any] = {}
        self.checks: dict[str, Check] = {}
        self.visible: dict[str, Callable[[State], bool]] = {}
        self.others: dict[str, Mapping[str, Any]] = {}

    def register_config(
        self,
        default_value: Any = None,
        config_func: Optional[Setter] = None,
        visible: Optional[Callable[[State], bool]] = None,
        other_configs: Optional[Mapping[str, Any]] = None,
    ) -> Any:
        """Register ``set_<name>``; without ``config_func`` a decorator.

        ``other_configs`` are keys of a configuration with the values a page starts with.
        """
        if config_func is None:
            return functools.partial(
                self.register_config, default_value, visible=visible, other_configs=other_configs
            )
        name = config_func.__name__.removeprefix("set_")
        self.setters[name], self.defaults[name] = config_func, default_value
        self.visible[name] = visible or VISIBLE["always"]
        self.others[name] = dict(other_configs or {})
        return config_func

    def register_check(self) -> Callable[[Check], Check]:
        """Decorator for ``check_<name>``: the problem of the field, or None."""

        def register(check: Check) -> Check:
            self.checks[check.__name__.removeprefix("check_")] = check
            return check

        return register

    def get_configs(
        self,
        *names: str,
        columns_config: Optional[Sequence[int]] = None,
        state: Optional[State] = None,
    ) -> list[Field]:
        """The fields of these names (all: none given), with their checks' problems.

        ``columns_config`` is accepted and has no meaning: the page arranges its fields itself.

        Raises:
            LookupError: there is no such field.
        """
        state = State() if state is None else state
        found = []
        for name in names or tuple(self.setters):
            if name not in self.setters:
                raise LookupError(f"there is no field {name!r}; there are {sorted(self.setters)}")
            field = self.setters[name](state)
            problem = self.checks[name](state) if name in self.checks else None
            if field.visible and problem and not field.problem:
                values = {**vars(field), "problem": problem}
                field = Field(**values)
            found.append(field)
        return found


CONFIG_GENERATORS = ConfigRegistry()


def setters(module: str, table: str, notes: Mapping[str, str]) -> dict[str, Setter]:
    """The functions of a module: ``name key [condition]`` a line.

    ``key`` is theirs; ``=key`` ours. ``notes`` say what took the place of what is neither.
    """
    theirs, made = {row.theirs: row for row in KEYS}, dict[str, Setter]()
    for line in filter(None, map(str.strip, table.splitlines())):
        name, key, *conditions = line.split()
        row = theirs.get(key)
        if key.startswith("=") or (row is not None and row.ours is not None):
            ours: Optional[str] = key[1:] if row is None else row.ours
            note = ""
        else:
            ours, note = None, notes.get(name) or (row.note if row is not None else "")
        setter = _setter(name, ours, note, conditions or ["always"])
        setter.__module__ = module
        made[name] = CONFIG_GENERATORS.register_config(
            None if ours is None else State().get(ours),
            setter,
            functools.partial(_all_hold, tuple(conditions)),
        )
    return made


def _all_hold(conditions: Sequence[str], state: State) -> bool:
    return all(VISIBLE[word](state) for word in conditions)


def _setter(name: str, ours: Optional[str], note: str, conditions: Iterable[str]) -> Setter:
    of_function = _OF_FUNCTION.fullmatch(name)
    words = tuple(conditions)

    def setter(state: State, **kwargs: Any) -> Field:
        visible = _all_hold(words, state)
        if ours is None:
            return Field("", "note", help=note, visible=visible, label=name.removeprefix("set_"))
        if of_function is not None:
            argument, slot = of_function.groups()
            visible &= argument in ARGUMENTS[slot].get(function_of(state, slot), ())
        return field_of(state, ours, visible, kwargs.get("label") or name.removeprefix("set_"))

    setter.__name__ = setter.__qualname__ = name
    setter.__doc__ = f"The field of {ours}." if ours else f"Nothing to set: {note}."
    return setter

"""What a configuration field may hold, written on the field itself.

Invariant: range and choices of a key stand beside its type and default (:func:`setting`) and
nowhere else; validation, hints, docs/configuration.md and the code that uses them read them here.
Choices are matched without regard to case.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import math
import tokenize
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from trinity_dask.config.errors import hint


@dataclass(frozen=True)
class Range:
    """Allowed interval of a number; ``gt``/``lt`` exclude their end, ``also`` is one more value
    (``-1`` for "off")."""

    ge: Optional[float] = None
    gt: Optional[float] = None
    le: Optional[float] = None
    lt: Optional[float] = None
    also: Optional[float] = None

    def contains(self, value: float) -> bool:
        if self.also is not None and value == self.also:
            return True
        return math.isfinite(value) and (
            (self.ge is None or value >= self.ge)
            and (self.le is None or value <= self.le)
            and (self.gt is None or value > self.gt)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        ends = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        parts = [f"{sign} {bound:.12g}" for sign, bound in ends if bound is not None]
        text = " and ".join(parts) or "any number"
        return text if self.also is None else f"{text}, or {self.also:g}"


def setting(
    default: Any,
    *,
    choices: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
    **bounds: float,
) -> Any:
    """A dataclass field with limits. Its comment is its meaning, its name has the unit.

    Args:
        default: the value, or a callable that makes it.
        choices: the words it may hold; ``aliases`` are words of Trinity-RFT that mean the same.
        bounds: the range of a number (of each one in a list), as the fields of :class:`Range`.
    """
    made = {"default_factory": default} if callable(default) else {"default": default}
    limits = {"range": Range(**bounds) if bounds else None, "choices": choices}
    return dataclasses.field(**made, metadata=limits | {"aliases": aliases or {}})


@dataclass(frozen=True)
class Kind:
    """What a key holds (a section, a list of sections, an open dict, or a value) and its limits."""

    annotation: Any = None
    section: Optional[type] = None
    item: Optional[type] = None  # the section type of each list entry
    is_open: bool = False
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    range: Optional[Range] = None

    def problem(self, key: str, value: Any) -> Optional[str]:
        """What is wrong with ``value``, or None."""
        if value is None:
            return None
        if self.choices and value not in self.choices:
            return f"{key}={value} is not a choice; {hint(str(value), self.choices)}"
        numbers = value if isinstance(value, list) else [value]
        if self.range is not None and not all(map(self.range.contains, numbers)):
            return f"{key}={value} is out of range: it must be {self.range}"
        return None


@functools.cache
def fields_of(section: type) -> dict[str, Kind]:
    """Field name -> kind, in the order of the dataclass."""
    hints, found = typing.get_type_hints(section), dict[str, Kind]()
    for field in dataclasses.fields(section):
        annotation, below = hints[field.name], dict[str, Any]()
        item = next(iter(typing.get_args(annotation)), None)
        if dataclasses.is_dataclass(annotation):
            below = {"section": annotation}
        elif typing.get_origin(annotation) is dict:
            below = {"is_open": True}
        elif typing.get_origin(annotation) is list and dataclasses.is_dataclass(item):
            below = {"item": item}
        found[field.name] = Kind(annotation, **below, **field.metadata)
    return found


def choices_of(section: type, name: str) -> tuple[str, ...]:
    """The words that a field may hold."""
    return fields_of(section)[name].choices


def all_keys(section: type, prefix: str = "") -> Iterator[tuple[str, Kind]]:
    """Every dotted key below ``section``, sections included, depth first.

    Entries of a list of sections are written with index 0.
    """
    for name, kind in fields_of(section).items():
        key = prefix + name
        yield key, kind
        below = kind.section or kind.item
        if below is not None:
            yield from all_keys(below, f"{key}.0." if kind.item else f"{key}.")


def values(config: Any, prefix: str = "") -> Iterator[tuple[str, Kind, Any, str]]:
    """(dotted key, kind, section object, field name) of every non-section key of ``config``."""
    section: type = type(config)
    for name, kind in fields_of(section).items():
        if kind.section is not None:
            yield from values(getattr(config, name), f"{prefix}{name}.")
        elif kind.item is not None:
            for index, item in enumerate(getattr(config, name)):
                yield from values(item, f"{prefix}{name}.{index}.")
        else:
            yield prefix + name, kind, config, name


@functools.cache
def comments(section: type) -> dict[str, str]:
    """Field -> the comment above it and behind it, as one text."""
    source = inspect.getsource(section)
    by_line = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = source.splitlines()
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = node.lineno - 1
            while above in by_line and lines[above - 1].lstrip().startswith("#"):
                above -= 1
            numbers = range(above + 1, (node.end_lineno or node.lineno) + 1)
            words = [by_line[number] for number in numbers if number in by_line]
            found[node.target.id] = " ".join(words)
    return found

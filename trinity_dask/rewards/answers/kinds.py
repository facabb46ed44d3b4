"""The kinds of answers, as values that can be compared.

Invariant: a form holds what its text says and nothing of how it was written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from trinity_dask.rewards.answers.grammar import Node
from trinity_dask.rewards.answers.units import Unit


@dataclass(frozen=True)
class Text:
    """Words. ``key`` is equal for equal ones."""

    key: str


@dataclass(frozen=True)
class Opaque:
    """Mathematics that is not read here."""

    text: str


@dataclass(frozen=True)
class Value:
    r"""One expression (two where ``\pm`` occurs), and its unit where it has one."""

    nodes: tuple[Node, ...]
    unit: Optional[Unit] = None


@dataclass(frozen=True)
class Ratio:
    """``1 : 2 : 3``"""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Relation:
    """An equation or inequality: ``left - right`` compared with 0 by ``sign`` (``=<>`` ...)."""

    sign: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Assigned:
    """``x = form``"""

    name: str
    form: Any


@dataclass(frozen=True)
class Interval:
    """From ``low`` to ``high``, with the ends that belong to it."""

    low: Node
    high: Node
    has_low: bool
    has_high: bool


@dataclass(frozen=True)
class Region:
    """A union of intervals and single points; ``of`` is the variable that lies there, if named."""

    parts: tuple[Any, ...]
    of: str = ""


@dataclass(frozen=True)
class Many:
    """Several answers. ``kind``: ``set``, ``bare`` (unordered), ``tuple``, ``list`` (ordered)."""

    kind: str
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of forms."""

    rows: tuple[tuple[Any, ...], ...]


Form = Any
EMPTY = Many("set", ())

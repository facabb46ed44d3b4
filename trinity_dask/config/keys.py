"""The tree of valid keys, read from the dataclasses.

Invariant: the dataclasses of :mod:`trinity_dask.config.schema` are the only source; a
section typed ``dict`` is open (any key), every other section is closed.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from typing import Any, Optional

from trinity_dask.config.schema import Config

#: filled by resolve; refused as an override
DERIVED = ("job_dir", "stage_name")
#: what a stage may change besides its name; the cluster and the names belong to the run
STAGE_KEYS = (
    "stage_name",
    "mode",
    "seed",
    "algorithm",
    "model",
    "buffer",
    "explorer",
    "trainer",
    "synchronizer",
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a key holds: a section, a list of sections, an open dict, or a value."""

    section: Optional[type] = None
    item: Optional[type] = None  # the section type of each list entry
    is_open: bool = False
    annotation: Any = None

    @property
    def is_value(self) -> bool:
        return self.section is None and self.item is None and not self.is_open


@functools.cache
def fields_of(section: type) -> dict[str, Kind]:
    """Field name -> kind, in the order of the dataclass."""
    hints = typing.get_type_hints(section)
    return {f.name: _kind(hints[f.name]) for f in dataclasses.fields(section)}


def _kind(annotation: Any) -> Kind:
    if dataclasses.is_dataclass(annotation):
        return Kind(section=typing.cast(type, annotation), annotation=annotation)
    if typing.get_origin(annotation) is dict:
        return Kind(is_open=True, annotation=annotation)
    if typing.get_origin(annotation) is list:
        (item,) = typing.get_args(annotation)
        if dataclasses.is_dataclass(item):
            return Kind(item=typing.cast(type, item), annotation=annotation)
    return Kind(annotation=annotation)


def all_keys(section: type = Config, prefix: str = "") -> Iterator[tuple[str, Kind]]:
    """Every dotted key below ``section``, sections included, depth first.

    Entries of a list of sections are written with index 0.
    """
    for name, kind in fields_of(section).items():
        key = prefix + name
        yield key, kind
        below = kind.section or kind.item
        if below is not None:
            yield from all_keys(below, f"{key}.0." if kind.item else f"{key}.")


def values(config: Any, prefix: str = "") -> Iterator[tuple[str, type, str, Any]]:
    """(dotted key, section type, field name, value) of every non-section key of a config."""
    section: type = type(config)
    for name, kind in fields_of(section).items():
        value = getattr(config, name)
        if kind.section is not None:
            yield from values(value, f"{prefix}{name}.")
        elif kind.item is not None:
            for index, item in enumerate(value):
                yield from values(item, f"{prefix}{name}.{index}.")
        else:
            yield prefix + name, section, name, value


def kind_at(path: str) -> Optional[Kind]:
    """The kind of the key at a dotted path; None when there is no such key.

    Everything below an open section is an open section.
    """
    kind = Kind(section=Config)
    for part in split_path(path):
        if kind.is_open:
            return kind
        if kind.item is not None and part.isdigit():
            kind = Kind(section=kind.item)
        elif kind.section is not None and part in fields_of(kind.section):
            kind = fields_of(kind.section)[part]
        else:
            return None
    return kind


def split_path(path: str) -> list[str]:
    """``a.b[0].c`` and ``a.b.0.c`` alike as parts."""
    return [part for part in path.replace("[", ".").replace("]", "").split(".") if part]

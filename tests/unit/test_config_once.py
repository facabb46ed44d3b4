"""A choice or a default of the configuration is written in the dataclasses and nowhere else.

``algorithm`` imports nothing of this project; what it has in common with the configuration is
compared in test_algorithm_table.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import trinity_dask
from trinity_dask.config.fields import all_keys, choices_of, fields_of
from trinity_dask.config.schema import Config, GroupConfig, OptimizerConfig

ROOT = Path(trinity_dask.__file__).parent
SOURCES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] not in ("config", "algorithm")
]
SECTIONS = {Config} | {kind.section or kind.item for _, kind in all_keys(Config)} - {None}


def words(path: Path) -> Iterator[tuple[int, frozenset[str]]]:
    """Every list of at least three texts in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            texts = [item.value for item in node.elts if isinstance(item, ast.Constant)]
            if len(texts) == len(node.elts) >= 3 and all(isinstance(t, str) for t in texts):
                yield node.lineno, frozenset(texts)


def test_choices_are_written_once():
    choices = {
        frozenset(kind.choices): f"{section.__name__}.{name}"
        for section in SECTIONS
        for name, kind in fields_of(section).items()
        if len(kind.choices) >= 3
    }
    assert frozenset(choices_of(OptimizerConfig, "lr_scheduler_type")) in choices
    twice = [
        f"{path.relative_to(ROOT)}:{line} repeats {choices[found]}"
        for path in SOURCES
        for line, found in words(path)
        if found in choices
    ]
    assert twice == []


def defaults(path: Path) -> Iterator[tuple[int, str, float]]:
    """Numbers that fields of classes in a file have by default, the telling ones."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if (
                isinstance(item, ast.AnnAssign)
                and isinstance(item.target, ast.Name)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, int | float)
                and item.value.value not in (0, 1)
                and item.target.id != "seed"  # everything that is random has one
            ):
                yield item.lineno, item.target.id, item.value.value


def test_defaults_are_written_once():
    known = {
        (name, getattr(section(), name)): f"{section.__name__}.{name}"
        for section in SECTIONS - {GroupConfig}
        for name, kind in fields_of(section).items()
        if isinstance(getattr(section(), name), int | float)
    }
    twice = [
        f"{path.relative_to(ROOT)}:{line} repeats {known[name, value]}"
        for path in SOURCES
        for line, name, value in defaults(path)
        if (name, value) in known
    ]
    assert twice == []

"""The shape of the code: one idea in a function and a file, a stated invariant in each.

Invariant: a limit here is a number a reader can see broken; the message names the place.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE_FILES = sorted((ROOT / "trinity_dask").rglob("*.py"))
FILES = PACKAGE_FILES + sorted(
    path
    for folder in ("benchmarks", "scripts", "examples", "notebooks")
    for path in (ROOT / folder).rglob("*.py")
)

MAX_FUNCTION_LINES = 80
MAX_MEDIAN_FUNCTION_LINES = 12
MIN_MEDIAN_FUNCTION_SPAN = 8  # lines with the docstring; a call costs its reader a hop
MAX_FILE_LINES = 600
LEFT_OVERS = re.compile(
    r"\b(TODO|FIXME|XXX|HACK)\b|[Pp]laceholder docstring|NotImplementedError\(\)"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines of the body, without the docstring: explaining is not what makes code long."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def missing_annotations(function: Function) -> list[str]:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    missing = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
    returns = function.returns is not None or function.name == "__init__"
    return missing + ([] if returns else ["return"])


def swallowed(tree: ast.AST) -> list[int]:
    """Lines of handlers of every exception that do nothing about it."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(statement, ast.Pass) for statement in node.body)
    ]


def problems(source: str, typed: bool = True) -> list[str]:
    """Everything in one file that breaks a rule, with its line."""
    tree = ast.parse(source)
    found = []
    if not ast.get_docstring(tree):
        found.append("no module docstring")
    if source.count("\n") > MAX_FILE_LINES:
        found.append(f"{source.count(chr(10))} lines; at most {MAX_FILE_LINES}")
    for function in functions(tree):
        where = f"line {function.lineno}: {function.name}"
        if length(function) > MAX_FUNCTION_LINES:
            found.append(f"{where} has {length(function)} lines; at most {MAX_FUNCTION_LINES}")
        if typed and (missing := missing_annotations(function)):
            found.append(f"{where} lacks type hints for {missing}")
    found += [f"line {line}: swallows every exception" for line in swallowed(tree)]
    for number, text in enumerate(source.splitlines(), 1):
        if LEFT_OVERS.search(text):
            found.append(f"line {number}: unfinished: {text.strip()}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_file_keeps_the_rules(path):
    assert problems(path.read_text(), typed=path in PACKAGE_FILES) == []


def test_most_functions_are_short():
    lengths = [length(f) for path in PACKAGE_FILES for f in functions(ast.parse(path.read_text()))]
    assert statistics.median(lengths) <= MAX_MEDIAN_FUNCTION_LINES


def test_most_functions_are_worth_the_hop():
    spans = [
        (f.end_lineno or 0) - f.lineno + 1
        for path in PACKAGE_FILES
        for f in functions(ast.parse(path.read_text()))
    ]
    assert statistics.median(spans) >= MIN_MEDIAN_FUNCTION_SPAN


LONG = "\n".join(f"    x = {index}" for index in range(MAX_FUNCTION_LINES + 1))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n", "no module docstring"),
        ('"""m"""\n' + "x = 1\n" * (MAX_FILE_LINES + 1), "lines; at most"),
        (f'"""m"""\ndef f() -> None:\n{LONG}\n', "at most 80"),
        ('"""m"""\ndef f(a) -> None:\n    return\n', "type hints for ['a']"),
        ('"""m"""\ndef f(a: int):\n    return a\n', "type hints for ['return']"),
        ('"""m"""\ntry:\n    f()\nexcept Exception:\n    pass\n', "swallows"),
        ('"""m"""\n# TO' + "DO: later\n", "unfinished"),
    ],
)
def test_a_broken_rule_is_found(source, message):
    assert any(message in problem for problem in problems(source))

"""Reads docs/walks.md and holds it against the code and against the trace of a run.

Invariant: a hop follows from an earlier one only if the trace of a real run, or the text of
the function, shows that the one calls the other; a hop left out breaks the chain, so a walk
cannot look shorter than it is. ``⇢`` marks the few hops where nobody calls anybody: a waiter
that is woken, an object that has kept the thing.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trinity_dask"
WALKS = ROOT / "docs" / "walks.md"
_ENTRY = re.compile(r"^\d+\. (?P<woken>⇢ )?`(?P<file>[\w/]+\.py):(?P<name>[\w.]+)` — (?P<text>.+)$")
_TITLE = re.compile(r"^## (.+)$")


@dataclass(frozen=True)
class Hop:
    """``name`` in ``file`` (below trinity_dask/); ``woken``: no call leads to it."""

    file: str
    name: str
    woken: bool = False

    @property
    def key(self) -> str:
        return f"{self.file}:{self.name}"


@dataclass
class Walk:
    title: str
    hops: list[Hop] = field(default_factory=list)

    @property
    def files(self) -> int:
        return len({hop.file for hop in self.hops})

    @property
    def functions(self) -> int:
        return len({hop.key for hop in self.hops})


def read_walks(text: str) -> list[Walk]:
    """The numbered lists of the page, by heading."""
    walks: list[Walk] = []
    for line in text.splitlines():
        if title := _TITLE.match(line):
            walks.append(Walk(title[1]))
        elif entry := _ENTRY.match(line):
            walks[-1].hops.append(Hop(entry["file"], entry["name"], bool(entry["woken"])))
        elif re.match(r"^\d+\. ", line):
            raise ValueError(f"not `file.py:function` — what happens: {line!r}")
    return [walk for walk in walks if walk.hops]


@cache
def definitions(file: str) -> dict[str, ast.AST]:
    """Functions and methods of a module by qualified name; nested ones belong to the outer."""
    found: dict[str, ast.AST] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + child.name] = child
            elif isinstance(child, ast.If | ast.Try):
                visit(child, prefix)

    path = PACKAGE / file
    if path.is_file():
        visit(ast.parse(path.read_text()), "")
    return found


@cache
def mentions(key: str) -> frozenset[str]:
    """Names, attributes and strings in the body of a function: whom it may call, and start."""
    file, name = key.split(":")
    node = definitions(file).get(name)
    words: set[str] = set()
    for child in ast.walk(node) if node is not None else ():
        if isinstance(child, ast.Name):
            words.add(child.id)
        elif isinstance(child, ast.Attribute):
            words.add(child.attr)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            words.add(child.value)
    return frozenset(words)


def calls(caller: Hop, callee: Hop, trace: set[tuple[str, str]]) -> bool:
    """Seen in the trace, or written in the caller (a task, a thread, another process)."""
    if (caller.key, callee.key) in trace:
        return True
    short = callee.name.rpartition(".")[2]
    return not short.startswith("__") and short in mentions(caller.key)


def returns_to(caller: Hop, stack: list[Hop], i: int, trace: set[tuple[str, str]]) -> bool:
    """Whether the result of ``stack[i]`` goes to ``caller``. The text alone is believed only for
    the last hop: a word like ``wait`` stands in many functions."""
    return (caller.key, stack[i].key) in trace or (
        i == len(stack) - 1 and calls(caller, stack[i], trace)
    )


def broken_links(walk: Walk, trace: set[tuple[str, str]]) -> list[str]:
    """Hops that no earlier hop calls, and that call none: the data cannot have come there."""
    stack, broken = walk.hops[:1], []
    for hop in walk.hops[1:]:
        down = next((i for i in reversed(range(len(stack))) if calls(stack[i], hop, trace)), None)
        up = next(
            (i for i in reversed(range(len(stack))) if returns_to(hop, stack, i, trace)), None
        )
        if down is not None:
            stack = [*stack[: down + 1], hop]
        elif up is not None:
            stack = [*stack[:up], hop]
        elif hop.woken:
            stack = [*stack, hop]
        else:
            broken.append(f"{walk.title}: nothing leads to {hop.key}")
            stack = [*stack, hop]
    return broken


def read_trace(folder: Path) -> set[tuple[str, str]]:
    """Pairs (caller, callee) of every process; the caller is empty where a task begins."""
    lines = [line for path in folder.glob("*.txt") for line in path.read_text().splitlines()]
    return {(caller, callee) for caller, callee in (line.split(" ", 1) for line in lines)}

"""Write the reference part of ``docs/configuration.md`` from the dataclasses.

Invariant: what stands above the marker is written by hand and kept; what stands below is
made from ``trinity_dask/config/schema.py`` alone, so the page cannot say what the code does
not. ``--check`` writes nothing and exits 1 when the page is not current.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from generated_page import marker, renewed, write_page  # noqa: E402  (beside this script)

from trinity_dask.config import schema  # noqa: E402  (the package is one level up)
from trinity_dask.config.fields import Kind, comments, fields_of  # noqa: E402
from trinity_dask.config.paths import groups  # noqa: E402

PAGE = Path(__file__).with_name("configuration.md")
MARKER = marker(Path(__file__).name)


def page(old: str) -> str:
    """The page with its hand-written part kept and its reference made anew."""
    return renewed(old, MARKER, reference())


def reference() -> str:
    parts = [_presets(), *(_section(item, paths) for item, paths in sections().items())]
    return "\n\n".join(parts)


def _presets() -> str:
    rows = [f"| `{name}` | {', '.join(options)} |" for name, options in groups().items()]
    return "\n".join(["## Presets", "", "| group | options |", "|---|---|", *rows])


def sections() -> dict[type, list[str]]:
    """Each section type with all the places where it occurs, outermost first."""
    found: dict[type, list[str]] = {}

    def visit(section: type, path: str) -> None:
        found.setdefault(section, []).append(path)
        for name, kind in fields_of(section).items():
            below = kind.section or kind.item
            if below is not None:
                inner = f"{path}.{name}".lstrip(".") + (".<i>" if kind.item else "")
                visit(below, inner)

    visit(schema.Config, "")
    return found


def _section(section: type, paths: list[str]) -> str:
    title = ", ".join(f"`{path}`" for path in paths) if paths != [""] else "Top level"
    lines = [f"## {title}", ""]
    described = _docstring(section)
    if described:
        lines += [described, ""]
    lines += ["| key | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    return "\n".join(lines + list(_rows(section)))


def _docstring(section: type) -> str:
    """The class's own words; dataclasses invent a docstring that only repeats the fields."""
    text = inspect.cleandoc(section.__doc__ or "")
    return "" if text.startswith(f"{section.__name__}(") else " ".join(text.split())


def _rows(section: type) -> Iterator[str]:
    notes = comments(section)
    default = section()
    for name, kind in fields_of(section).items():
        cells = (
            f"`{name}`",
            _type(kind),
            _default(getattr(default, name), kind),
            ", ".join(f"`{choice}`" for choice in kind.choices) or str(kind.range or ""),
            _meaning(section, name, notes.get(name, "")),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(kind: Kind) -> str:
    if kind.section is not None:
        return "section"
    if kind.item is not None:
        return "list of sections"
    text = str(kind.annotation).removeprefix("typing.").replace("typing.", "")
    if isinstance(kind.annotation, type) and not hasattr(kind.annotation, "__origin__"):
        text = kind.annotation.__name__
    if text.startswith("Optional["):
        return f"{text[len('Optional[') : -1]} or null"
    return text


def _default(value: Any, kind: Kind) -> str:
    if kind.section is not None:
        return "see there"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    return f"`{value}`"


def _meaning(section: type, name: str, note: str) -> str:
    if section is schema.Config and name in schema.DERIVED:
        return f"derived; not to be set. {note}"
    if section is schema.Config and name == "stages":
        return (
            f"one entry per stage, each with: {', '.join(f'`{key}`' for key in schema.STAGE_KEYS)}"
        )
    return note


if __name__ == "__main__":
    sys.exit(write_page(PAGE, page, __doc__))

"""What the pages that are partly made from the code have in common.

Invariant: what stands above a page's marker is written by hand and kept; what stands below is
made anew. ``--check`` writes nothing and exits 1 when the page is not current.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def marker(script: str) -> str:
    """The line of a page below which ``docs/<script>`` writes."""
    return f"<!-- Below this line: written by docs/{script}; do not edit. -->"


def renewed(old: str, line: str, made: str) -> str:
    """The text ``old`` with what stands below its marker ``line`` replaced by ``made``.

    Raises:
        ValueError: the page has lost its marker line.
    """
    if line not in old:
        raise ValueError(f"the page has lost its marker line, put it back: {line}")
    return f"{old.partition(line)[0]}{line}\n\n{made}\n"


def write_page(page: Path, renew: Callable[[str], str], about: str | None) -> int:
    """The command line of a page's script: ``renew`` gives the new text for the old one."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is not current")
    check = parser.parse_args().check
    old = page.read_text(encoding="utf-8")
    new = renew(old)
    if check:
        return int(old != new)
    page.write_text(new, encoding="utf-8")
    return 0

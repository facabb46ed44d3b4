"""Write the table of ``docs/models.md``: every architecture through every check.

Invariant: a cell is what its check gave when this script ran, never what was hoped for; one that
fails stops nothing and is written as what went wrong. Takes ten minutes: vLLM is started once
for each architecture. ``--check`` writes nothing and exits 1 when the page is not current.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]
os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made here

from architectures import ARCHITECTURES, COLUMNS, Stand, vllm_sync  # noqa: E402  (found above)
from generated_page import marker, renewed, write_page  # noqa: E402

from trinity_dask.models.checks import check_vllm_cpu, read_model_config  # noqa: E402

PAGE = Path(__file__).with_name("models.md")
MARKER = marker(Path(__file__).name)


def page(old: str) -> str:
    """The page with its hand-written part kept and its table made anew."""
    notes: dict[str, str] = {}
    heads = [*COLUMNS, "vLLM (CPU)"]
    lines = [f"| architecture | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as root:
            stand = Stand(name, Path(root))
            cells = [_cell(stand, column, check, notes) for column, check in COLUMNS.items()]
            try:
                check_vllm_cpu(stand.path)
            except ValueError as refusal:
                reason = str(refusal).partition(": ")[2]
                notes[f"{name}, vLLM"] = f"refused at `validate`: {reason}"
                cells.append("refused")
            else:
                cells.append(_cell(stand, "vLLM (CPU)", vllm_sync, notes))
            kind = read_model_config(stand.path)["model_type"]
        lines.append(f"| {name} (`{kind}`) | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    reasons = [f"* {where}: {reason}" for where, reason in notes.items()]
    return renewed(old, MARKER, "\n".join([*lines, "", *reasons]))


def _cell(stand: Stand, column: str, check: object, notes: dict[str, str]) -> str:
    try:
        return check(stand)  # type: ignore[operator]
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        notes[f"{stand.name}, {column}"] = f"{type(error).__name__}: {text}"
        return "✗"


if __name__ == "__main__":
    sys.exit(write_page(PAGE, page, __doc__))

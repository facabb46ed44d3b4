"""Write the table of ``docs/models.md``: every architecture through every check.

Invariant: a cell is what its check gave when this script ran, never what was hoped for; one that
fails stops nothing and is written as what went wrong. All of it takes about twenty minutes on two
cores, since vLLM is started once for each one: ``make_models.py gpt2 qwen3-moe`` makes these
rows anew and keeps the others.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]
os.environ["HF_HUB_OFFLINE"] = "1"  # everything is made here

from architectures import ARCHITECTURES, COLUMNS, Stand, vllm_sync  # noqa: E402  (found above)
from generated_page import marker, renewed  # noqa: E402

from trinity_dask.models.checks import check_vllm_cpu, read_model_config  # noqa: E402

PAGE = Path(__file__).with_name("models.md")
MARKER = marker(Path(__file__).name)
VLLM = "vLLM (CPU)"


def page(old: str, names: list[str]) -> str:
    """The page with its hand-written part, and the rows of others than ``names``, kept."""
    below = old.partition(MARKER)[2].splitlines()
    rows = {line.split()[1]: line for line in below if line.startswith("| ")}
    reasons = [line for line in below if line.startswith("* ")]
    for name in names:
        notes: dict[str, str] = {}
        rows[name] = _row(name, notes)
        print(rows[name], flush=True)
        reasons = [line for line in reasons if not line.startswith(f"* {name}, ")]
        reasons += [f"* {name}, {where}: {reason}" for where, reason in notes.items()]
    heads = [*COLUMNS, VLLM]
    lines = [f"| architecture | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    lines += [rows[name] for name in ARCHITECTURES if name in rows]
    return renewed(old, MARKER, "\n".join([*lines, "", *sorted(reasons)]))


def _row(name: str, notes: dict[str, str]) -> str:
    with tempfile.TemporaryDirectory() as root:
        stand = Stand(name, Path(root))
        cells = [_cell(stand, column, check, notes) for column, check in COLUMNS.items()]
        try:
            check_vllm_cpu(stand.path)
        except ValueError as refusal:
            notes[VLLM] = f"refused by `validate`: {str(refusal).partition(': ')[2]}"
            cells.append("refused")
        else:
            cells.append(_cell(stand, VLLM, vllm_sync, notes))
        kind = read_model_config(stand.path)["model_type"]
    return f"| {name} (`{kind}`) | {' | '.join(cells)} |"


def _cell(stand: Stand, column: str, check: Callable[[Stand], str], notes: dict[str, str]) -> str:
    try:
        return check(stand)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        notes[column] = f"{type(error).__name__}: {text}"
        return "✗"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page(text, sys.argv[1:] or list(ARCHITECTURES)), encoding="utf-8")

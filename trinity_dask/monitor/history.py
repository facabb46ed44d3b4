"""A run's metrics in its directory: the lines of the file, and the table they make.

Invariant: a line is valid JSON for every reader (NaN and infinities are not JSON, so the
value is null and its name is kept under ``nonfinite``), and decoding gives the values that
were logged. The table has one row per stage, role and step. Of values logged twice for the
same step the last one counts, and steps that a resumed run went back behind are gone until
it reaches them again. An unreadable line (a killed process leaves at most one) is skipped and
counted in ``frame.attrs["skipped_lines"]``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("stage", "role", "step", "incarnation", "time")
RESERVED = frozenset({"stage", "time", "role", "step", "incarnation", "nonfinite"})


def metrics_path(job_dir: str | Path) -> Path:
    """The metrics file of a job directory."""
    return Path(job_dir) / "monitor" / "metrics.jsonl"


def as_floats(metrics: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """The metrics as Python floats, and the names of those that are no numbers.

    Numpy scalars, one-element tensors and booleans count as numbers.
    """
    values: dict[str, float] = {}
    rejected = []
    for name, value in metrics.items():
        try:
            if name in RESERVED or isinstance(value, str):
                raise TypeError(name)
            values[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last one
            rejected.append(name)
    return values, rejected


def encode_line(
    time_s: float, role: str, step: int, incarnation: int, metrics: Mapping[str, float]
) -> str:
    """One JSON object with a trailing newline; ``metrics`` as made by :func:`as_floats`."""
    line: dict[str, Any] = {"time": time_s, "role": role, "step": step, "incarnation": incarnation}
    nonfinite = {name: repr(value) for name, value in metrics.items() if not math.isfinite(value)}
    line.update({name: None if name in nonfinite else value for name, value in metrics.items()})
    if nonfinite:
        line["nonfinite"] = nonfinite
    return json.dumps(line, allow_nan=False) + "\n"


def decode_line(text: str) -> dict[str, Any]:
    """The line as a flat dict with non-finite values restored.

    Raises:
        ValueError: the text is not a JSON object with ``role`` and ``step``.
    """
    line = json.loads(text)
    if not isinstance(line, dict) or "role" not in line or "step" not in line:
        raise ValueError(f"not a metrics line: {text[:80]!r}")
    for name, spelled in line.pop("nonfinite", {}).items():
        line[name] = float(spelled)
    return line


def load_metrics(job_dir: str | Path) -> pd.DataFrame:
    """Metrics of a job as a table: KEYS, then one column per metric (NaN where absent).

    ``job_dir`` is a stage's directory (column ``stage`` is then ``""``) or the directory
    above the stages; stages come in the order in which they began.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    skipped = 0
    for stage, path in stage_files(Path(job_dir)):
        lines, bad = read_lines(path)
        skipped += bad
        rows += [{"stage": stage, **row} for row in merge(lines)]
    names = sorted({name for row in rows for name in row} - set(KEYS))
    frame = pd.DataFrame(rows, columns=[*KEYS, *names])
    frame.attrs["skipped_lines"] = skipped
    return frame


def stage_files(job_dir: Path) -> list[tuple[str, Path]]:
    """(stage, its metrics file) in the order in which the stages began; ``""`` = no stages."""
    own = metrics_path(job_dir)
    if own.exists():
        return [("", own)]
    begun: list[tuple[float, Path]] = []
    for path in job_dir.glob("*/monitor/metrics.jsonl"):
        lines, _ = read_lines(path)
        begun.append((lines[0].get("time", 0.0) if lines else math.inf, path))
    return [(path.parents[1].name, path) for _, path in sorted(begun, key=lambda pair: pair[0])]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The decoded lines of one file in order, and how many could not be read."""
    lines = []
    bad = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                if text.strip():
                    lines.append(decode_line(text))
            except ValueError:
                bad += 1
    return lines, bad


def merge(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per role and step, ordered by role and step."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    incarnations: dict[str, int] = {}
    for line in lines:
        role, step = line["role"], line["step"]
        if line.get("incarnation", 1) > incarnations.get(role, 0):
            incarnations[role] = line.get("incarnation", 1)
            # the resumed run stands at `step`: what its predecessor did later never happened
            rows = {key: row for key, row in rows.items() if key[0] != role or key[1] <= step}
        rows.setdefault((role, step), {}).update(line)
    return [rows[key] for key in sorted(rows)]

"""A run's metrics, read back from its directory.

Invariant: one row per stage, role and step. Of values logged twice for the same step the
last one counts, and steps that a resumed run went back behind are gone until it reaches
them again. An unreadable line (a killed process leaves at most one) is skipped and
counted in ``frame.attrs["skipped_lines"]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_dask.monitor.record import decode_line
from trinity_dask.monitor.sinks import metrics_path

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("stage", "role", "step", "incarnation", "time")


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
    stages = [path for path in job_dir.glob("*/monitor/metrics.jsonl") if path.is_file()]
    return [(path.parents[1].name, path) for path in sorted(stages, key=_first_time)]


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The decoded lines of one file in order, and how many could not be read."""
    lines = []
    bad = 0
    for text in _texts(path):
        try:
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


def last_incarnation(job_dir: Path, role: str) -> int:
    """How many times ``role`` has logged into this job so far; 0 for a new job."""
    path = metrics_path(job_dir)
    lines, _ = read_lines(path) if path.exists() else ([], 0)
    return max((line.get("incarnation", 0) for line in lines if line["role"] == role), default=0)


def _texts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from (line for line in file if line.strip())


def _first_time(path: Path) -> float:
    lines, _ = read_lines(path)
    return lines[0].get("time", 0.0) if lines else float("inf")

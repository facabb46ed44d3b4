"""What the driver prints when a job ends: before and after, and where everything is.

Invariant: the report is made from the job directory alone, so it can be printed again
later and by another process; a path is listed only if it exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from trinity_dask.monitor.history import load_metrics, stage_files
from trinity_dask.monitor.scores import bench_scores, headline_scores

if TYPE_CHECKING:
    import pandas as pd

PLACES = (
    ("resolved configuration", "config.yaml"),
    ("metrics (JSONL)", "monitor/metrics.jsonl"),
    ("TensorBoard", "monitor/tensorboard"),
    ("tables", "monitor/tables"),
    ("curves", "curves.png"),
    ("experiences (Arrow)", "buffer/experience/data"),
    ("logs", "log"),
)


@dataclass(frozen=True)
class Change:
    """First and last value of one metric in one stage, and the steps they are from."""

    stage: str
    metric: str
    first_step: int
    before: float
    last_step: int
    after: float


@dataclass(frozen=True)
class Report:
    """Changes in the order of the stages, and (what, path) of all that was written."""

    changes: tuple[Change, ...]
    places: tuple[tuple[str, str], ...]


def build_report(job_dir: str | Path) -> Report:
    """The report of a job directory (of one stage, or of all stages under it)."""
    changes = tuple(before_after(load_metrics(job_dir)))
    return Report(changes, tuple(find_places(Path(job_dir))))


def before_after(frame: pd.DataFrame) -> list[Change]:
    """Evaluation scores, sampled reward and supervised loss, stage by stage."""
    return [
        change
        for stage in frame["stage"].unique()
        for name in headline_scores(frame.columns)
        if (change := _change(frame[frame["stage"] == stage], stage, name)) is not None
    ]


def bench_table(job_dir: str | Path) -> Table | None:
    """One row per stage and benchmarked step, one column per score; None without any."""
    frame = load_metrics(job_dir)
    names = bench_scores(str(name) for name in frame.columns)
    if not names:
        return None
    table = Table(title="benchmark", title_justify="left")
    for column in ("stage", "step", *names):
        table.add_column(
            column.removeprefix("bench/"), justify="left" if column == "stage" else "right"
        )
    for _, row in frame[frame["role"] == "benchmark"].iterrows():
        scores = [f"{row[name]:.3f}" if row[name] == row[name] else "-" for name in names]
        table.add_row(str(row["stage"]) or "-", str(int(row["step"])), *scores)
    return table


def _change(frame: pd.DataFrame, stage: str, name: str) -> Change | None:
    values = frame[["step", name]].dropna().sort_values("step")
    if values.empty:
        return None
    first, last = values.iloc[0], values.iloc[-1]
    return Change(
        stage, name, int(first["step"]), float(first[name]), int(last["step"]), float(last[name])
    )


def find_places(job_dir: Path) -> list[tuple[str, str]]:
    """What a reader may want to open, in the job directory and in its stages."""
    stages = [path.parents[1] for _, path in stage_files(job_dir)]
    found = []
    for directory in dict.fromkeys([*stages, job_dir]):
        label = "" if directory == job_dir else f"{directory.name}: "
        for what, relative in PLACES:
            if (directory / relative).exists():
                found.append((label + what, str(directory / relative)))
        found += [(label + what, str(path)) for what, path in _models(directory)]
    return found


def _models(directory: Path) -> list[tuple[str, Path]]:
    """The newest checkpoint and the newest Hugging Face export below it."""
    numbered = [
        (int(suffix), path)
        for path in directory.glob("global_step_*")
        if (suffix := path.name.removeprefix("global_step_")).isdigit()
    ]
    steps = [path for _, path in sorted(numbered)]
    models = [path / "huggingface" for path in steps if (path / "huggingface").is_dir()]
    found = [("last checkpoint", steps[-1])] if steps else []
    return found + ([("model (Hugging Face)", models[-1])] if models else [])


def print_report(report: Report, console: Console | None = None) -> None:
    """The before/after table and the list of places."""
    console = console or Console(highlight=False)
    if report.changes:
        console.print(change_table(report.changes))
    for what, path in report.places:
        console.print(f"{what + ':':34s} {path}", markup=False, soft_wrap=True)


def change_table(changes: tuple[Change, ...]) -> Table:
    """One row per stage and metric."""
    table = Table(title="before / after", title_justify="left")
    for name in ("stage", "metric", "before", "after", "change", "steps"):
        table.add_column(name, justify="left" if name in ("stage", "metric") else "right")
    for change in changes:
        table.add_row(
            change.stage or "-",
            change.metric,
            f"{change.before:.3f}",
            f"{change.after:.3f}",
            f"{change.after - change.before:+.3f}",
            f"{change.first_step} → {change.last_step}",
        )
    return table

"""What the driver prints when a job ends: before and after, and where everything is.

Invariant: the report is made from the job directory alone, so it can be printed again
later and by another process; a path is listed only if it exists.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from trinity_dask.monitor.history import load_metrics, stage_files
from trinity_dask.monitor.scores import BENCHMARK_FILE, bench_scores, headline_scores

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
    """One row per stage and benchmarked step, one column per score; None without any.

    From the benchmarks' own files: each has the results of all calls with its settings, while
    a later call's metrics hide those of steps that an earlier one was ahead with.
    """
    rows = list(_bench_results(Path(job_dir)))
    names = bench_scores(sorted({name for _, _, metrics in rows for name in metrics}))
    if not names:
        return None
    table = Table(title="benchmark", title_justify="left")
    for column in ("stage", "step", *names):
        table.add_column(
            column.removeprefix("bench/"), justify="left" if column == "stage" else "right"
        )
    for stage, step, metrics in rows:
        values = (metrics.get(name) for name in names)
        scores = ["-" if v is None or v != v else f"{v:.3f}" for v in values]
        table.add_row(stage or "-", str(step), *scores)
    return table


def _bench_results(job_dir: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(stage, step, metrics) in the order of the stages, as far as it is known, and steps."""
    own = job_dir / BENCHMARK_FILE
    begun = [name for name, _ in stage_files(job_dir)]
    stages = {path.parent.name: path for path in sorted(job_dir.glob(f"*/{BENCHMARK_FILE}"))}
    order = sorted(stages, key=lambda name: begun.index(name) if name in begun else len(begun))
    files = [("", own)] if own.exists() else [(name, stages[name]) for name in order]
    for stage, path in files:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        for step in sorted(results, key=int):
            yield stage, int(step), results[step]


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

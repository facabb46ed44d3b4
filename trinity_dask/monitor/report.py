"""What shows whether the model got better: the report at the end of a job, and its curves.

Invariant: both are made from the job directory alone, so they can be made again later and by
another process; both show the same metrics, and bookkeeping (counts, times, versions,
spreads) is not among them. A path is listed only if it exists. Drawing uses no display and
no global matplotlib state, so it works in any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from trinity_dask.monitor.history import load_metrics, stage_files

if TYPE_CHECKING:
    import pandas as pd

# written by mode bench into a stage's directory: {"results": {step: {metric: value}}, ...}
BENCHMARK_FILE = "benchmark_meta.json"
REWARD = "rollout/reward/mean"  # the sampled reward of a batch
# what shows progress where no reward does: demonstrations, preference pairs, a teacher
TAUGHT = (
    "/sft_loss",
    "/dpo_loss",
    "actor/accuracy_mean",
    "advantage/kl/mean",
    "advantage/jsd/mean",
)
BOOKKEEPING = re.compile(
    r"/time/|/(failed_runs|cancelled_runs|finished_task_count|model_version|retries)$|/std(@\d+)?$"
)
PLACES = (
    ("resolved configuration", "config.yaml"),
    ("metrics (JSONL)", "monitor/metrics.jsonl"),
    ("TensorBoard", "monitor/tensorboard"),
    ("tables", "monitor/tables"),
    ("curves", "curves.png"),
    ("experiences (Arrow)", "buffer/experience/data"),
    ("logs", "log"),
)


def scores(names: Iterable[str], kind: str) -> list[str]:
    """The metrics of one kind, in the given order.

    ``eval`` and ``bench`` score answers; ``reward`` is the sampled one; ``loss`` are those of
    the algorithm, of which ``final_loss`` is the sum and only shown alone.
    """
    names = list(names)
    if kind == "reward":
        return [REWARD] if REWARD in names else []
    if kind == "loss":
        found = [name for name in names if name.endswith("loss")]
        return [name for name in found if not name.endswith("/final_loss")] or found
    return [name for name in names if name.startswith(f"{kind}/") and not BOOKKEEPING.search(name)]


# title, and named series indexed by step
Panel = tuple[str, list[tuple[str, Any]]]


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
    columns = list(frame.columns)
    taught = [name for name in columns if name.endswith(TAUGHT)]
    changes = []
    for stage in frame["stage"].unique():
        for name in [*scores(columns, "eval"), *scores(columns, "reward"), *taught]:
            values = frame.loc[frame["stage"] == stage, ["step", name]].dropna()
            if values.empty:
                continue
            values = values.sort_values("step")
            (first, before), (last, after) = values.iloc[0], values.iloc[-1]
            change = Change(stage, name, int(first), float(before), int(last), float(after))
            changes.append(change)
    return changes


def bench_table(job_dir: str | Path) -> Table | None:
    """One row per stage and benchmarked step, one column per score; None without any.

    From the benchmarks' own files: each has the results of all calls with its settings, while
    a later call's metrics hide those of steps that an earlier one was ahead with.
    """
    job = Path(job_dir)
    begun = [name for name, _ in stage_files(job)]
    stages = {path.parent.name: path for path in sorted(job.glob(f"*/{BENCHMARK_FILE}"))}
    # in the order of the stages, as far as it is known
    order = sorted(stages, key=lambda name: begun.index(name) if name in begun else len(begun))
    own = job / BENCHMARK_FILE
    rows: list[tuple[str, int, dict[str, Any]]] = []
    for stage, path in [("", own)] if own.exists() else [(name, stages[name]) for name in order]:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        rows += [(stage, int(step), results[step]) for step in sorted(results, key=int)]
    names = scores(sorted({name for _, _, metrics in rows for name in metrics}), "bench")
    if not names:
        return None
    table = Table(title="benchmark", title_justify="left")
    for column in ("stage", "step", *names):
        table.add_column(
            column.removeprefix("bench/"), justify="left" if column == "stage" else "right"
        )
    for stage, step, metrics in rows:
        values = (metrics.get(name) for name in names)
        cells = ["-" if v is None or v != v else f"{v:.3f}" for v in values]
        table.add_row(stage or "-", str(step), *cells)
    return table


def find_places(job_dir: Path) -> list[tuple[str, str]]:
    """What a reader may want to open, in the job directory and in its stages."""
    stages = [path.parents[1] for _, path in stage_files(job_dir)]
    found = []
    for directory in dict.fromkeys([*stages, job_dir]):
        label = "" if directory == job_dir else f"{directory.name}: "
        for what, relative in PLACES:
            if (directory / relative).exists():
                found.append((label + what, str(directory / relative)))
        numbered = [
            (int(suffix), path)
            for path in directory.glob("global_step_*")
            if (suffix := path.name.removeprefix("global_step_")).isdigit()
        ]
        steps = [path for _, path in sorted(numbered)]
        models = [path / "huggingface" for path in steps if (path / "huggingface").is_dir()]
        newest = (("last checkpoint", steps), ("model (Hugging Face)", models))
        found += [(label + what, str(paths[-1])) for what, paths in newest if paths]
    return found


def print_report(report: Report, console: Console | None = None) -> None:
    """The before/after table and the list of places."""
    console = console or Console(highlight=False)
    table = Table(title="before / after", title_justify="left")
    for name in ("stage", "metric", "before", "after", "change", "steps"):
        table.add_column(name, justify="left" if name in ("stage", "metric") else "right")
    for change in report.changes:
        table.add_row(
            change.stage or "-",
            change.metric,
            f"{change.before:.3f}",
            f"{change.after:.3f}",
            f"{change.after - change.before:+.3f}",
            f"{change.first_step} → {change.last_step}",
        )
    if report.changes:
        console.print(table)
    for what, path in report.places:
        console.print(f"{what + ':':34s} {path}", markup=False, soft_wrap=True)


def write_curves(job_dir: str | Path, path: str | Path | None = None) -> Path | None:
    """Draw ``<job>/curves.png`` (or ``path``): one row per stage, reward, eval and loss.

    Returns the path, or None when the job has logged nothing that could be drawn.
    """
    frame = load_metrics(job_dir)
    names = list(frame.columns)
    wanted = {
        "sampled reward": scores(names, "reward"),
        "evaluation": scores(names, "eval"),
        "loss": scores(names, "loss")[:4],
    }
    stages: list[tuple[str, list[Panel]]] = []
    for stage in frame["stage"].unique():
        own = frame[frame["stage"] == stage].set_index("step").sort_index()
        panels = [
            (title, [(n, own[n].dropna()) for n in chosen if own[n].notna().any()])
            for title, chosen in wanted.items()
        ]
        if any(series for _, series in panels):
            stages.append((stage, [panel for panel in panels if panel[1]]))
    if not stages:
        return None
    target = Path(path) if path else Path(job_dir) / "curves.png"
    _draw(stages).savefig(str(target), dpi=110)
    return target


def _draw(stages: list[tuple[str, list[Panel]]]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = max(len(panels) for _, panels in stages)
    figure = Figure(figsize=(4.6 * width, 3.2 * len(stages)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(stages), width, squeeze=False)
    for row, (stage, panels) in zip(axes, stages, strict=True):
        for axis, panel in zip(row, panels, strict=False):
            _draw_panel(axis, stage, panel)
        for axis in row[len(panels) :]:
            axis.set_visible(False)
    return figure


def _draw_panel(axis: Any, stage: str, panel: Panel) -> None:
    title, series = panel
    for name, column in series:
        axis.plot(column.index, column.to_numpy(), marker=".", linewidth=1.2, label=name)
    axis.set_title(f"{stage}: {title}" if stage else title, fontsize=10)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    low, high = axis.dataLim.intervaly
    if title != "loss" and low >= 0 and high <= 1:  # shares: comparable between panels
        axis.set_ylim(-0.02, 1.02)

"""Reward and evaluation curves of a job as one PNG.

Invariant: no display and no global matplotlib state is used, so it works in any thread
of any process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_dask.monitor.history import load_metrics
from trinity_dask.monitor.scores import eval_scores, losses, rewards

if TYPE_CHECKING:
    import pandas as pd


def write_curves(job_dir: str | Path, path: str | Path | None = None) -> Path | None:
    """Draw ``<job>/curves.png`` (or ``path``): one row per stage, reward, eval and loss.

    Returns the path, or None when the job has logged nothing that could be drawn.
    """
    frame = load_metrics(job_dir)
    stages = [(stage, _panels(frame[frame["stage"] == stage])) for stage in frame["stage"].unique()]
    stages = [(stage, panels) for stage, panels in stages if panels]
    if not stages:
        return None
    target = Path(path) if path else Path(job_dir) / "curves.png"
    _draw(stages).savefig(str(target), dpi=110)
    return target


Panel = tuple[str, list[tuple[str, Any]]]


def _panels(frame: pd.DataFrame) -> list[Panel]:
    """Title and named series (indexed by step) of each panel that has data."""
    names = list(frame.columns)
    wanted = {
        "sampled reward": rewards(names),
        "evaluation": eval_scores(names),
        "loss": losses(names)[:4],
    }
    panels = [(title, _series(frame, names)) for title, names in wanted.items()]
    return [(title, series) for title, series in panels if series]


def _series(frame: pd.DataFrame, names: list[str]) -> list[tuple[str, Any]]:
    columns = [(name, frame.set_index("step")[name].dropna().sort_index()) for name in names]
    return [(name, column) for name, column in columns if len(column)]


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

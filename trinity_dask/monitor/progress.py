"""The driver's view of a running job: a live display on a terminal, plain lines elsewhere.

Invariant: drawing reads the status dict and nothing else; a missing or null key shows as
a dash. In plain mode a line is printed when something changed that a reader of a log
wants to know, so an idle run prints nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trinity_dask.config.fields import choices_of
from trinity_dask.config.schema import MonitorConfig

MODES = choices_of(MonitorConfig, "progress")
STYLES = {"failed": "bold red", "interrupted": "yellow", "done": "bold green"}
Status = Mapping[str, Any]
RUNNERS_SHOWN = 8
# of a runner's state; what is not here was set by the workflow itself
RUNNER_FIELDS = frozenset(
    [
        "runner_id",
        "worker",
        "workflow_id",
        "model_version",
        "repeat_cnt",
        "begin_time",
        "terminate_time",
        "running_time",
        "abandoned_threads",
        "loop_lag_s",
    ]
)


class Progress:
    """Shows one status dict after another. Use it within ``contextlib.closing``.

    ``mode``: ``auto`` (live on a terminal, else plain), ``live``, ``plain``, ``off``.
    """

    def __init__(self, mode: str = "auto", stream: TextIO | None = None) -> None:
        if mode not in MODES:
            raise ValueError(f"monitor.progress must be one of {MODES} (got {mode!r})")
        self._console = Console(file=stream or sys.stdout, highlight=False)
        if mode == "auto":
            mode = "live" if self._console.is_terminal else "plain"
        self._mode = mode
        self._live: Live | None = None
        self._last_mark: tuple[Any, ...] | None = None
        self._dashboard: Any = None  # as it was last printed

    def update(self, status: Status) -> None:
        """Show ``status``; call it as often as there is news."""
        if self._mode == "live":
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=False)
                self._live.start()
            self._live.update(panel(status), refresh=True)
        elif self._mode == "plain":
            self._print(status)

    def close(self) -> None:
        """Leave the last picture on the screen and restore the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, status: Status) -> None:
        link = status.get("dashboard")
        if link and link != self._dashboard:
            self._dashboard = link
            self._console.print(f"dashboard: {link}", markup=False, soft_wrap=True)
        # `version` also counts changes of in-flight numbers: too many lines
        keys = ["state", "stage", "step", "message", "failures"]
        if status.get("mode") == "explore":  # no trainer here whose steps would be lines
            keys.append("explorer_step")
        mark = (*(repr(status.get(key)) for key in keys), repr(status.get("eval")))
        if mark != self._last_mark:
            self._last_mark = mark
            self._console.print(plain_line(status), markup=False, soft_wrap=True)
            self._console.file.flush()


def plain_line(status: Status) -> str:
    """The status on one line, leaving out what is not known yet."""
    parts = [f"[{duration(status.get('elapsed_s'))}]", stage_text(status)]
    if status.get("state") != "running":
        parts.append(str(status.get("state", "?")))
    parts.append(f"step {step_text(status)}")
    parts += [f"{name} {value}" for name, value in figures(status) if value != "-"]
    if status.get("failures"):
        parts.append("failures " + counts_text(status["failures"]))
    if status.get("message"):
        parts.append(str(status["message"]))
    return "  ".join(part for part in parts if part)


def panel(status: Status) -> Group:
    """The live picture: a title with a progress bar, the figures, the message."""
    state = str(status.get("state", "?"))
    title = Text.assemble(
        (f"{stage_text(status)} " if stage_text(status) else "", "bold"),
        (state, STYLES.get(state, "cyan")),
        f"  step {step_text(status)}  {duration(status.get('elapsed_s'))}",
    )
    total = status.get("total_steps") or None
    bar = ProgressBar(total=total, completed=status.get("step") or 0, width=60, pulse=not total)
    bar_line = Table.grid()  # a bare bar does not end its line
    bar_line.add_row(bar)
    grid = Table.grid(padding=(0, 2))
    names = ("accounts", "failures", "workers", "late_workers")
    counters = [(name, counts_text(status[name])) for name in names if status.get(name)]
    for name, value in [*figures(status), *counters]:
        grid.add_row(Text(name, style="dim"), Text(value))
    if status.get("dashboard"):
        grid.add_row(Text("dashboard", style="dim"), Text(str(status["dashboard"])))
    rows: list[Any] = [title, bar_line, grid]
    if status.get("runners"):
        rows.append(runner_table(status["runners"]))
    if status.get("message"):
        rows.append(Text(str(status["message"]), style=STYLES.get(state, "")))
    return Group(*rows)


def figures(status: Status) -> list[tuple[str, str]]:
    """Name and text of what says how the run is doing."""
    unknown = status.get("queue_batches") is None and status.get("queue_rows") is None
    batches, rows_queued = number(status.get("queue_batches")), number(status.get("queue_rows"))
    rows = [
        ("explorer step", number(status.get("explorer_step"))),
        ("model version", number(status.get("model_version"))),
        ("reward", number(status.get("reward"))),
    ]
    for name, value in (status.get("eval") or {}).items():
        rows.append((name if name.startswith("eval") else f"eval {name}", number(value)))
    rows += [
        ("tokens/s", number(status.get("tokens_per_s"))),
        ("in flight", number(status.get("in_flight"))),
        ("queue", "-" if unknown else f"{rows_queued} rows, batches {batches}"),
    ]
    return rows


def runner_table(runners: Sequence[Mapping[str, Any]]) -> Table:
    """What the runners do that have been at it longest: one line each."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    names = ("runner", "worker", "task", "version", "runs", "for", "state")
    for name in names:
        table.add_column(name, no_wrap=True)
    for state in runners[:RUNNERS_SHOWN]:
        own = {k: v for k, v in state.items() if k not in RUNNER_FIELDS}
        since = state.get("begin_time")
        table.add_row(
            number(state.get("runner_id")),
            str(state.get("worker") or "-"),
            str(state.get("workflow_id") or "-"),
            number(state.get("model_version")),
            number(state.get("repeat_cnt")),
            duration(None if since is None else max(time.time() - since, 0.0)),
            Text(counts_text(own), overflow="ellipsis"),
        )
    return table


def counts_text(counts: Any) -> str:
    """``{"a": 1, "b": 2}`` as ``a 1, b 2``."""
    if not isinstance(counts, Mapping):
        return str(counts)
    return ", ".join(f"{name} {number(value)}" for name, value in counts.items())


def stage_text(status: Status) -> str:
    """``grpo (2/2)``, or the mode of a job without stages."""
    name = status.get("stage") or status.get("mode") or ""
    total = status.get("n_stages") or 0
    return f"{name} ({(status.get('stage_index') or 0) + 1}/{total})" if total > 1 else str(name)


def step_text(status: Status) -> str:
    step = status.get("step")
    total = status.get("total_steps")
    return f"{number(step)}/{number(total)}" if total else number(step)


def number(value: Any) -> str:
    """A figure for people: ``-`` for unknown, thousands separated, four digits of a float."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """``75`` as ``1:15``, ``3700`` as ``1:01:40``."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

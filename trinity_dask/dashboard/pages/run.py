"""One stage of one run: state, links, tables and figures, each in a part with a name.

Invariant: a part shows its feed's last state whenever it was updated; a run without what a part
shows has no such part on its page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from bokeh.layouts import row
from bokeh.models import (
    Column,
    ColumnDataSource,
    DataTable,
    Div,
    PreText,
    TableColumn,
    UIElement,
)
from bokeh.models.widgets.tables import NumberFormatter

from trinity_dask.dashboard.feed import RunFeed
from trinity_dask.dashboard.pages.plots import Ages, Lines, Timeline
from trinity_dask.launcher.accounts import errors_of
from trinity_dask.monitor.curves import CURVES, Curve

ROW_PX, MAX_TABLE_PX = 26, 520
SINCE_START = "s since the start"
BAR = 30  # characters


class Part(Protocol):
    root: Any

    def update(self) -> None:
        """Show what the feed holds now."""


class Head:
    """State, progress, the last message, where the job is; and the links."""

    def __init__(self, feed: RunFeed, links: Mapping[str, str]) -> None:
        self._feed = feed
        self.text = PreText(name=f"{feed.number}/head", text="", sizing_mode="stretch_width")
        self.text.html_attributes = {"role": "status", "aria-live": "polite"}
        # nothing of the run is in this one: it is HTML
        links = Div(
            name=f"{feed.number}/links",
            text=" · ".join(
                f'<a href="{address.format(feed.number)}">{label}</a>'
                for label, address in links.items()
            ),
            disable_math=True,
        )
        self.root = Column(self.text, links, sizing_mode="stretch_width")

    def update(self) -> None:
        text = head_text(self._feed)
        if text != self.text.text:
            self.text.text = text


def head_text(feed: RunFeed) -> str:
    """Some lines of plain text."""
    status = feed.status
    stage, n_stages = status.get("stage"), status.get("n_stages") or 1
    where = f" · stage {feed.stage or stage} ({n_stages} in all)" if n_stages > 1 else ""
    lines = [f"state     {feed.state}{where} · mode {feed.facts.get('mode', '?')}"]
    step, total = status.get("step"), status.get("total_steps")
    if isinstance(step, int) and isinstance(total, int) and total > 0:
        done = min(step / total, 1.0)
        bar = "█" * round(done * BAR) + "░" * (BAR - round(done * BAR))
        lines.append(f"progress  {bar} {done:.0%}, train step {step:,} of {total:,}")
    elif step is not None:
        lines.append(f"progress  train step {step}")
    figures = [
        f"{label} {status[key]:,.4g}"
        for label, key in (
            ("explorer step", "explorer_step"),
            ("weights of version", "model_version"),
            ("reward", "reward"),
            ("tokens/s", "tokens_per_s"),
            ("in flight", "in_flight"),
            ("queued rows", "queue_rows"),
        )
        if isinstance(status.get(key), int | float)
    ]
    lines += [f"now       {' · '.join(figures)}"] if figures else []
    lines += [f"message   {status['message']}"] if status.get("message") else []
    lines.append(f"job       {feed.facts.get('job_dir', feed.run)}")
    return "\n".join(lines)


class Table:
    """Rows that are made anew whenever they have changed."""

    def __init__(
        self,
        name: str,
        title: str,
        columns: Mapping[str, TableColumn],
        rows: Callable[[], dict[str, list[Any]]],
    ) -> None:
        self._rows, self._shown = rows, {column: list[Any]() for column in columns}
        self.source = ColumnDataSource(dict(self._shown), name=name)
        heading = PreText(text=title, styles={"font-weight": "bold"})
        self._table = DataTable(
            name=f"{name}-table",
            source=self.source,
            columns=list(columns.values()),
            index_position=None,
            reorderable=False,
            height=2 * ROW_PX,
            sizing_mode="stretch_width",
            html_attributes={"aria-label": title},
        )
        self.root = Column(heading, self._table, visible=False, min_width=220)
        self.root.sizing_mode = "stretch_width"

    def update(self) -> None:
        rows = self._rows()
        if rows == self._shown:
            return
        self.source.data = rows
        # a table whose number of rows stays is drawn again only when its view has changed; in a
        # property that costs nothing: with a new model Bokeh looks at the whole page once more
        self._table.view.tags = [not any(self._table.view.tags)]
        n = len(next(iter(rows.values())))
        height = min((n + 2) * ROW_PX, MAX_TABLE_PX)
        if self._table.height != height:
            self._table.height = height
        self.root.visible = n > 0
        self._shown = rows


def accounts_table(feed: RunFeed) -> Table:
    def rows() -> dict[str, list[Any]]:
        accounts: Mapping[str, int] = feed.status.get("accounts") or {}
        names: list[str] = list(accounts)
        counts: list[int | None] = list(accounts.values())
        if feed.ended and accounts:
            wrong = errors_of(accounts)
            names += wrong or ["everything is accounted for"]
            counts += [None] * max(len(wrong), 1)
        return {"account": names, "count": counts}

    columns = {
        "account": TableColumn(field="account", title="account"),
        "count": TableColumn(field="count", title="runs or rows", formatter=_number("0,0")),
    }
    return Table(f"{feed.number}/accounts", "Accounts", columns, rows)


def failures_table(feed: RunFeed) -> Table:
    def rows() -> dict[str, list[Any]]:
        failures: Mapping[str, int] = feed.status.get("failures") or {}
        kinds = sorted(failures, key=lambda kind: -failures[kind])
        return {"kind": kinds, "runs": [failures[kind] for kind in kinds]}

    columns = {
        "kind": TableColumn(field="kind", title="error"),
        "runs": TableColumn(field="runs", title="failed runs", formatter=_number("0,0")),
    }
    return Table(f"{feed.number}/failures", "Failures by kind", columns, rows)


def engines_table(feed: RunFeed) -> Table:
    titles = {
        "engine": ("engine", None),
        "state": ("state", None),
        "version": ("version", None),
        "tokens_per_s": ("tokens/s", "0,0.0"),
        "busy": ("busy", "0%"),
        "restarts": ("restarts", "0"),
    }

    def rows() -> dict[str, list[Any]]:
        slots = sorted(feed.engines, key=lambda slot: (len(slot), slot))
        states = [feed.engines[slot] for slot in slots]
        found: dict[str, list[Any]] = {"engine": slots}
        found |= {key: [state.get(key) for state in states] for key in titles if key != "engine"}
        found["version"] = ["start model" if v is None else str(v) for v in found["version"]]
        return found

    columns = {
        key: TableColumn(
            field=key, title=title, **({} if form is None else {"formatter": _number(form)})
        )
        for key, (title, form) in titles.items()
    }
    return Table(
        f"{feed.number}/engines",
        "Engines",
        columns,
        rows,
    )


def waits_table(feed: RunFeed) -> Table:
    def rows() -> dict[str, list[Any]]:
        kinds = sorted(feed.waited, key=lambda kind: -feed.waited[kind][1])
        return {
            "who": [who for who, _ in kinds],
            "awaited": [awaited for _, awaited in kinds],
            "times": [feed.waited[kind][0] for kind in kinds],
            "seconds": [round(feed.waited[kind][1], 3) for kind in kinds],
        }

    columns = {
        "who": TableColumn(field="who", title="who"),
        "awaited": TableColumn(field="awaited", title="waited for", width=420),
        "times": TableColumn(field="times", title="times", formatter=_number("0,0")),
        "seconds": TableColumn(field="seconds", title="s in all", formatter=_number("0,0.0")),
    }
    return Table(f"{feed.number}/waits", "Waits, in all", columns, rows)


def _number(form: str) -> NumberFormatter:
    return NumberFormatter(format=form, nan_format="-", text_align="right")


def parts_of(feed: RunFeed, links: Mapping[str, str]) -> dict[str, Callable[[], Part]]:
    """How to make each part, by its name."""
    found: dict[str, Callable[[], Part]] = {
        "head": lambda: Head(feed, links),
        "accounts": lambda: accounts_table(feed),
        "engines": lambda: engines_table(feed),
        "waits": lambda: waits_table(feed),
        "failures": lambda: failures_table(feed),
    }
    after = [curve.name for curve in CURVES].index("gap") + 1  # what belongs to learning is first
    for curve in CURVES[:after]:
        found[curve.name] = partial(_curve, feed, curve)
    found["staleness"] = lambda: Ages(feed)
    found["sync"] = lambda: Timeline(feed)
    found["in-flight"] = lambda: _load(
        feed, "in-flight", "Sub-tasks in flight", "sub-tasks", {"sub-tasks": "in_flight"}
    )
    found["queue"] = lambda: _load(
        feed,
        "queue",
        "Committed and not yet trained",
        "rows, batches",
        {"rows": "queue_rows", "batches": "queue_batches"},
    )
    for curve in CURVES[after:]:
        found[curve.name] = partial(_curve, feed, curve)
    return found


def _curve(feed: RunFeed, curve: Curve) -> Lines:
    name, lines = f"{feed.number}/{curve.name}", feed.curves[curve.name]
    return Lines(name, curve.title, "step", curve.unit, lines, curve.logarithmic)


def _load(feed: RunFeed, name: str, title: str, unit: str, keys: Mapping[str, str]) -> Lines:
    lines = {label: feed.load[key] for label, key in keys.items()}
    return Lines(f"{feed.number}/{name}", title, SINCE_START, unit, lines)


TABLES = ("accounts", "engines", "waits", "failures")


class RunView:
    """The parts of one feed in a column; all of them, or those named."""

    def __init__(self, feed: RunFeed, links: Mapping[str, str], only: tuple[str, ...] = ()) -> None:
        self._feed, self._seen = feed, -1
        self._figures: Column | None = None
        makers = parts_of(feed, links)
        self.parts = {name: makers[name]() for name in only or makers}
        roots: dict[str, UIElement] = {name: part.root for name, part in self.parts.items()}
        if only:
            self.root = Column(*roots.values(), sizing_mode="stretch_both")
            return
        side = Column(*(roots[name] for name in TABLES), width=430, name=f"{feed.number}/side")
        self._figures = Column(
            name=f"{feed.number}/figures",
            sizing_mode="stretch_width",
            styles={
                "display": "grid",
                "grid-template-columns": "repeat(auto-fill, minmax(360px, 1fr))",
                "gap": "8px",
            },
        )
        body = row(side, self._figures, sizing_mode="stretch_width")
        self.root = Column(roots["head"], body, sizing_mode="stretch_width")

    def update(self) -> None:
        now = self._feed.version
        if self._seen != now:
            for part in self.parts.values():
                part.update()
            self._arrange()
            self._seen = now  # last: what fails is tried again

    def _arrange(self) -> None:
        """Only figures with data are in the page: an empty one has no ranges."""
        if self._figures is None:
            return
        beside = ("head", *TABLES)
        parts = [part.root for name, part in self.parts.items() if name not in beside]
        shown = [root for root in parts if root.visible]
        if shown != self._figures.children:
            self._figures.children = shown

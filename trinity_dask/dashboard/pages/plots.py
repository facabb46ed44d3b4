"""The figures of one feed: curves, load, ages of tokens, the timeline of waits and transfers.

Invariant: a figure sends a browser what is new, and all of it only when earlier points have
changed; one without data is not shown. Names that come from a run are drawn as they are, never as
formulas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bokeh.models import ColumnDataSource, FactorRange, HoverTool, Legend, Span
from bokeh.palettes import Category10
from bokeh.plotting import figure

from trinity_dask.dashboard.feed import MAX_SPANS, RunFeed, Series

COLOURS = Category10[10]
HEIGHT = 240  # pixels
RECENT_STEPS = 20
LATEST_ROWS = 8  # kinds of who waits
DASHES = ("solid", "dashed", "dotted", "dotdash")
_FORMULA = re.compile(r"\$\$|\\\(|\\\[")
MAX_LABEL = 60


def harmless(text: str) -> str:
    """``text`` on one line, cut, and without what Bokeh takes for the start of a formula."""
    line = _FORMULA.sub(lambda found: " ".join(found[0]), " ".join(text.split()))
    return line if len(line) <= MAX_LABEL else line[: MAX_LABEL - 1] + "…"


def base_figure(name: str, title: str, x: str, y: str, **more: Any) -> figure:
    """An empty figure that says to a screen reader what it shows."""
    made = figure(
        name=f"{name}-figure",
        title=title,
        x_axis_label=x,
        y_axis_label=y,
        height=HEIGHT,
        min_width=320,
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,box_zoom,reset,save",
        toolbar_location="above",
        visible=False,
        frame_align=False,  # or names on one axis would push all frames to the right
        html_attributes={"role": "figure", "aria-label": f"{title}: {y} over {x}"},
        **more,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.title.text_font_size = "11pt"
    return made


def _legend(**more: Any) -> Legend:
    """One that lets the lines under it be seen."""
    look = {"location": "top_left", "background_fill_alpha": 0.6, "border_line_alpha": 0.0}
    size = {"label_text_font_size": "8pt", "padding": 2, "spacing": 5, "glyph_height": 14}
    return Legend(**{**look, **size, **more})


class Lines:
    """Several series over one axis; ``find`` gives them by name, in their order."""

    def __init__(
        self,
        name: str,
        title: str,
        x: str,
        y: str,
        lines: Mapping[str, Series],
        log: bool = False,
    ) -> None:
        self._name, self._short = name, f"{name.partition('/')[2]}/"
        self.root = base_figure(name, title, x, y, y_axis_type="log" if log else "linear")
        self.root.add_layout(_legend(click_policy="hide", ncols=2))
        hover = [("line", "$name"), (x, "@x{0,0.[00]}"), (y, "@y{0,0.[00000]}")]
        self.root.add_tools(HoverTool(tooltips=hover))
        self._lines = lines
        self._sources: dict[str, ColumnDataSource] = {}
        self._sent: dict[str, tuple[int, int]] = {}  # epoch and number of points

    def update(self) -> None:
        for name, series in self._lines.items():
            if not series.x and name not in self._sources:
                continue
            if name not in self._sources:
                self._add(name)
            epoch, n = self._sent[name]
            if epoch == series.epoch and n < len(series.x):
                new = {"x": series.x[n:].tolist(), "y": series.y[n:].tolist()}
                self._sources[name].stream(new)
            elif epoch != series.epoch:
                self._sources[name].data = {"x": series.x.tolist(), "y": series.y.tolist()}
            self._sent[name] = (series.epoch, len(series.x))
        if self._sources and not self.root.visible:
            self.root.visible = True

    def _add(self, name: str) -> None:
        n = len(self._sources)
        label = harmless(name.removeprefix(self._short))
        source = ColumnDataSource({"x": [], "y": []}, name=f"{self._name}/{label}")
        look = {"color": COLOURS[n % len(COLOURS)], "line_dash": DASHES[n % len(DASHES)]}
        self.root.line("x", "y", source=source, name=label, legend_label=label, width=2, **look)
        self.root.scatter(
            "x", "y", source=source, name=label, legend_label=label, size=3, color=look["color"]
        )
        self._sources[name], self._sent[name] = source, (-1, 0)


class Ages:
    """How old the trained tokens were, with the bound drawn in."""

    def __init__(self, feed: RunFeed) -> None:
        self._feed, self._seen = feed, (-1, 0.0)
        self.root = base_figure(
            f"{feed.number}/staleness",
            "Age of trained tokens",
            "versions behind",
            "share of the tokens",
        )
        self._source = ColumnDataSource(
            {"age": [], "left": [], "right": [], "recent": [], "all": []},
            name=f"{feed.number}/staleness",
        )
        self.root.add_layout(_legend(location="top_right"))
        bars = {"source": self._source, "width": 0.38}
        self.root.vbar("left", top="recent", color=COLOURS[0], legend_label="last 20 steps", **bars)
        self.root.vbar("right", top="all", color=COLOURS[7], legend_label="whole run", **bars)
        hover = [("versions behind", "@age"), ("last 20 steps", "@recent{0.0%}")]
        self.root.add_tools(HoverTool(tooltips=[*hover, ("whole run", "@all{0.0%}")]))
        self.root.y_range.start = 0
        self._bound = Span(
            dimension="height", line_color="#b00020", line_width=2, line_dash="dashed"
        )
        self._bound.visible = False
        self.root.add_layout(self._bound)

    def update(self) -> None:
        feed = self._feed
        last = feed.ages[-1][0] if feed.ages else -1
        now = (last, sum(feed.all_ages.values()))
        if now == self._seen or not feed.ages:
            return
        recent: dict[int, float] = {}
        for _, counted in list(feed.ages)[-RECENT_STEPS:]:
            for age, tokens in counted.items():
                recent[age] = recent.get(age, 0.0) + tokens
        ages = sorted(feed.all_ages)
        n_recent, n_all = max(sum(recent.values()), 1.0), max(sum(feed.all_ages.values()), 1.0)
        self._source.data = {
            "age": ages,
            "left": [age - 0.2 for age in ages],
            "right": [age + 0.2 for age in ages],
            "recent": [recent.get(age, 0.0) / n_recent for age in ages],
            "all": [feed.all_ages[age] / n_all for age in ages],
        }
        bound = feed.facts.get("bound")
        said = "no bound is set"
        if isinstance(bound, int | float):
            self._bound.location, self._bound.visible = bound + 0.5, True
            self.root.x_range.end = max(bound, *ages) + 1.0
            self.root.x_range.start = -0.6
            said = f"dashed: the bound, {bound:g}"
        self.root.title.text = f"Age of trained tokens ({said})"
        self.root.visible = True
        self._seen = now


class Timeline:
    """Who waited for whom, and when weights moved."""

    COLUMNS = ("who", "left", "right", "colour", "kind", "detail", "seconds", "mb", "floor")

    def __init__(self, feed: RunFeed) -> None:
        self._feed, self._seen = feed, 0
        self.root = base_figure(
            f"{feed.number}/sync",
            "Who waited for whom; weights on their way",
            "s since the start",
            "who",
            y_range=FactorRange(),
        )
        self._source = ColumnDataSource({c: [] for c in self.COLUMNS}, name=f"{feed.number}/sync")
        self.root.add_layout(_legend())
        self.root.hbar(
            "who",
            left="left",
            right="right",
            height=0.6,
            color="colour",
            source=self._source,
            legend_group="kind",
        )
        hover = [("what", "@detail"), ("seconds", "@seconds{0.000}"), ("MB", "@mb{0,0.0}")]
        self.root.add_tools(HoverTool(tooltips=[*hover, ("share of the bare way", "@floor{0%}")]))

    def update(self) -> None:
        feed = self._feed
        if feed.n_spans == self._seen:
            return
        fresh = feed.n_spans - self._seen
        again = fresh < 0 or not self._seen
        spans = list(feed.spans) if again else list(feed.spans)[-fresh:]
        new = {column: [] for column in self.COLUMNS} if not spans else _columns(feed, spans)
        for who in dict.fromkeys(new["who"]):
            factors = list(self.root.y_range.factors)
            if who not in factors and len(factors) < LATEST_ROWS:
                self.root.y_range.factors = [*factors, who]
        if again:
            self._source.data = new
        else:
            self._source.stream(new, rollover=MAX_SPANS)
        self.root.visible = bool(feed.spans)
        self._seen = feed.n_spans


def _columns(feed: RunFeed, spans: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Of the timeline and of its table."""
    moved = [span["what"] == "transfer" for span in spans]
    return {
        "who": [_row(span) for span in spans],
        "left": [span["start"] - feed.started for span in spans],
        "right": [span["start"] - feed.started + span["seconds"] for span in spans],
        "colour": [COLOURS[2] if is_moved else COLOURS[1] for is_moved in moved],
        "kind": ["weights" if is_moved else "waits" for is_moved in moved],
        "detail": [_detail(span) for span in spans],
        "seconds": [span["seconds"] for span in spans],
        "mb": [(span["bytes"] or 0) / 1e6 if span["bytes"] else None for span in spans],
        "floor": [span["floor_share"] for span in spans],
    }


def _row(span: Mapping[str, Any]) -> str:
    """Whose bar it is."""
    who = harmless(span["whose"])
    return f"weights to {who}" if span["what"] == "transfer" else who


def _detail(span: Mapping[str, Any]) -> str:
    if span["what"] == "transfer":
        return f"version {span['version']} to {harmless(span['who'])}"
    return f"{harmless(span['who'])} waited for {harmless(span['awaited'])}"

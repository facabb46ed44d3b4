"""The pages: ``/trinity`` with a tab for each stage of each run, and every part of it alone.

Invariant: a page costs nothing while nothing happens; only the tab that is looked at is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bokeh.document import Document
from bokeh.models import Column, Paragraph, TabPanel, Tabs
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from trinity_dask.dashboard.feed import Feeds, RunFeed
from trinity_dask.dashboard.pages.plots import harmless
from trinity_dask.dashboard.pages.run import RunView, parts_of
from trinity_dask.dashboard.plugin import PAGE, feeds_of

PERIOD_MS = 500
NOTHING = (
    "No run has told anything yet. A run shows up here when it has joined this scheduler, and "
    "stays for a while after its end."
)


class Site:
    """One open page: its tabs follow the feeds."""

    def __init__(self, feeds: Feeds, only: tuple[str, ...] = ()) -> None:
        self._feeds, self._only, self._seen = feeds, only, (-1, -1)
        self._shown: list[RunFeed] = []
        self._frames: dict[RunFeed, Column] = {}
        self._views: dict[RunFeed, RunView] = {}
        mode = "stretch_both" if only else "stretch_width"
        self.tabs = Tabs(tabs=[], name="runs", sizing_mode=mode, visible=False)
        self.empty = Paragraph(text=NOTHING, name="nothing")
        self.root = Column(self.empty, self.tabs, sizing_mode=mode)

    def update(self) -> None:
        """Show what is new; nothing is done while nothing is."""
        now = (self._feeds.version, self.tabs.active)
        if now == self._seen:
            return
        self._follow()
        if self._shown:
            self._view(self._shown[min(self.tabs.active, len(self._shown) - 1)]).update()
        self._seen = (now[0], self.tabs.active)

    def _follow(self) -> None:
        """The newest first; what is looked at stays, unless it has ended and a new one begins."""
        feeds = sorted(self._feeds, key=lambda feed: -feed.number)
        titles = [harmless(f"{feed.title} ({feed.state})") for feed in feeds]
        if feeds == self._shown and titles == [panel.title for panel in self.tabs.tabs]:
            return
        looked_at = self._shown[self.tabs.active] if self._shown else None
        kept = looked_at if looked_at in feeds else None
        if kept is not None and kept.ended and feeds[0] not in self._shown:
            kept = None
        self._frames = {feed: self._frames.get(feed) or self._frame() for feed in feeds}
        self._views = {feed: view for feed, view in self._views.items() if feed in feeds}
        self._shown = feeds
        # new panels: a browser does not draw the title of one again
        self.tabs.tabs = [
            TabPanel(child=self._frames[feed], title=title)
            for feed, title in zip(feeds, titles, strict=True)
        ]
        self.tabs.active = 0 if kept is None else feeds.index(kept)
        self.tabs.visible, self.empty.visible = bool(feeds), not feeds

    def _frame(self) -> Column:
        return Column(sizing_mode="stretch_both" if self._only else "stretch_width")

    def _view(self, feed: RunFeed) -> RunView:
        """Made when it is first looked at."""
        if feed not in self._views:
            view = self._views[feed] = RunView(feed, self._feeds.links, self._only)
            self._frames[feed].children = [view.root]
        return self._views[feed]


def page(
    server: Any,
    extra: dict[str, Any],
    doc: Document,
    only: tuple[str, ...] = (),
    find: Callable[[Any], Feeds] = feeds_of,
) -> None:
    """Fill ``doc``; ``find(server)`` gives the feeds."""
    site = Site(find(server), only)
    site.update()
    doc.title = "Dask: Trinity"
    doc.add_root(site.root)
    doc.add_periodic_callback(site.update, PERIOD_MS)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


def _titles() -> dict[str, str]:
    """The parts that have a page of their own: their names, and how a list calls them."""
    names = [name for name in parts_of(RunFeed("", "", 0), {}) if name != "head"]
    return {name: f"Individual Trinity {name.replace('-', ' ').title()}" for name in names}


PARTS = _titles()
INDIVIDUAL = {title: f"/individual-{PAGE}-{name}" for name, title in PARTS.items()}
PAGES: dict[str, Callable[..., None]] = {
    f"/{PAGE}": page,
    **{f"/individual-{PAGE}-{name}": partial(page, only=(name,)) for name in PARTS},
}

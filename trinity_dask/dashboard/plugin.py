"""The scheduler's end: events of a run go into its feed, and the page is put into its dashboard.

Invariant: a scheduler has one set of feeds and one set of pages, however many runs join it and
leave; nothing here can fail a run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distributed.diagnostics.plugin import SchedulerPlugin

from trinity_dask.dashboard.feed import Feeds
from trinity_dask.monitor.events import TOPIC

if TYPE_CHECKING:
    from distributed import Client, Scheduler

log = logging.getLogger("trinity_dask.dashboard")

NAME = "trinity-dashboard"
PAGE = "trinity"
ROUTES = ["trinity_dask.dashboard.routes", "trinity_dask.view.routes"]  # modules


def feeds_of(scheduler: Any) -> Feeds:
    """The feeds of a scheduler; they outlive the plugin that fills them."""
    return scheduler.extensions.setdefault(NAME, Feeds())


class DashboardPlugin(SchedulerPlugin):
    """``origins`` are those (``host:port``) whose pages may open the page's websocket, beside the
    page itself."""

    name = NAME
    idempotent = True

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self._origins = list(origins)
        self._workers: dict[str, str] = {}  # run -> its control worker

    async def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._feeds = feeds_of(scheduler)
        try:
            from trinity_dask.dashboard.mount import mount

            mount(scheduler, self._origins)
        except Exception as error:  # a scheduler without bokeh, or of another version
            log.warning("the page /trinity cannot be shown: %s: %s", type(error).__name__, error)

    async def close(self) -> None:
        from trinity_dask.view.routes import close

        close(self._scheduler)

    def log_event(self, topic: str, msg: Any) -> None:
        if topic != TOPIC:
            return
        try:
            feed = self._feeds.apply(msg)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            log.info("an event that cannot be read is left out: %r", error)
            return
        if worker := msg.get("worker"):
            self._workers[feed.run] = str(worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        for run in [run for run, address in self._workers.items() if address == worker]:
            del self._workers[run]
            self._feeds.lost(run)


def join(client: Client, origins: Sequence[str] = ()) -> bool:
    """Put the page into the dashboard of the client's scheduler, unless it is there already.
    False: the scheduler has no trinity_dask, and stays without."""
    try:
        client.register_plugin(DashboardPlugin(origins))
        return True
    except Exception as error:  # whatever a foreign scheduler says: the run needs no page
        log.warning(
            "the scheduler at %s cannot show the page /trinity (%s: %s); the run goes on without",
            client.scheduler.address if client.scheduler is not None else "?",
            type(error).__name__,
            error,
        )
        return False


def page_of(link: str) -> str:
    """The address of the page, by that of a dashboard."""
    return f"{link.removesuffix('/').removesuffix('/status')}/{PAGE}"

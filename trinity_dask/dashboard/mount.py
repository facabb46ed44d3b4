"""The pages and their addresses in the web server of a Dask scheduler.

Invariant: mounting twice changes nothing. The pages stand behind the scheduler's own prefix, and
every link in them is relative, so that they work behind tunnels and proxies; a foreign page opens
none of their websockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask
from bokeh.server.tornado import BokehTornado
from distributed.dashboard.core import BokehApplication
from distributed.dashboard.scheduler import template_variables
from distributed.http.scheduler.info import IndividualPlots
from distributed.http.utils import get_handlers

from trinity_dask.cluster.specs import DASHBOARD_ORIGINS
from trinity_dask.dashboard.pages.site import INDIVIDUAL, PAGES
from trinity_dask.dashboard.plugin import PAGE, ROUTES


class Plots(IndividualPlots):
    """The list that JupyterLab's extension reads, with ours in it."""

    def write(self, chunk: Any) -> None:
        super().write({**chunk, **INDIVIDUAL} if isinstance(chunk, dict) else chunk)


def mount(scheduler: Any, origins: Sequence[str] = ()) -> None:
    """Add ``/trinity`` and its parts to the dashboard of ``scheduler``, if it has one.

    ``origins``: hosts, as ``host:port``, whose pages may open the pages' websockets; the page's
    own host always may.
    """
    application = scheduler.http_application
    pages = [app for app in application.applications if isinstance(app, BokehTornado)]
    if not pages or any(path.endswith(f"/{PAGE}") for app in pages for path in app.app_paths):
        return
    prefix = pages[0].prefix
    routes = get_handlers(scheduler, ROUTES, prefix=prefix)
    application.add_handlers(
        ".*$", [*routes, (rf"{prefix}/individual-plots.json", Plots, {"dask_server": scheduler})]
    )
    shared = template_variables(scheduler)  # the one that every page's navigation is made from
    if PAGE not in shared["pages"]:
        shared["pages"].insert(1, PAGE)
        plots = [{"url": url.strip("/"), "name": name} for name, url in INDIVIDUAL.items()]
        shared["plots"] = sorted([*shared["plots"], *plots], key=lambda plot: plot["name"])
    with dask.config.set({DASHBOARD_ORIGINS: list(origins)}):
        app = BokehApplication(PAGES, scheduler, prefix=prefix, template_variables=shared)
    application.add_application(app)
    app.initialize(scheduler.loop)
    app.start()

"""Runs that only tell: to a scheduler with the page, as a control worker does; without workers.

Invariant: what is told is told by the product's own events.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster

from trinity_dask.dashboard import plugin
from trinity_dask.monitor.events import TOPIC, EventSink, RunEvents


class Teller(RunEvents):
    """Tells by a client what a control worker tells."""

    def __init__(self, client: Client, run: str, directory: Path, stage: str = "", **facts: Any):
        super().__init__(run)
        self._client = client
        known = {"name": run, "mode": "both", "bound": 2, "bound_key": "synchronizer.max_staleness"}
        self.begin(stage, directory, "secret: '***'", began=time.time(), **(known | facts))

    def _send(self, event: dict[str, Any]) -> None:
        self._client.log_event(TOPIC, event)

    def step(self, step: int, **metrics: float) -> None:
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        EventSink(self, "trainer", 1).log(time.time(), step, named)


def served(**options: Any) -> tuple[LocalCluster, Client]:
    cluster = LocalCluster(
        n_workers=0, processes=False, dashboard_address="127.0.0.1:0", protocol="tcp://", **options
    )
    client = Client(cluster, set_as_default=False)
    plugin.join(client)
    return cluster, client


def port_of(client: Client) -> int:
    return int(client.scheduler_info()["services"]["dashboard"])


def url(client: Client, page: str = "trinity") -> str:
    return f"http://127.0.0.1:{port_of(client)}/{page}"

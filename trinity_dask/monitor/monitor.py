"""The one object that explorer and trainer give their metrics to.

Invariant: no method raises and none waits for a sink (``close`` waits up to its
deadline). A sink that fails is named once in the log, with the error, and is not used
again; the other sinks go on.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trinity_dask.config.schema import MonitorConfig
from trinity_dask.config.secrets import shown, shown_text
from trinity_dask.files import create_durably
from trinity_dask.monitor import trackers  # noqa: F401  (registers its sinks)
from trinity_dask.monitor.history import as_floats, metrics_path, read_lines
from trinity_dask.monitor.sinks import SINKS, BackgroundSink, Sink, SinkContext

logger = logging.getLogger("trinity_dask.monitor")


class Monitor:
    """Metrics of one role (``explorer``, ``trainer``) of one job.

    ``config_dict`` is the resolved configuration as plain containers; trackers show it, without
    its secrets.
    """

    def __init__(
        self,
        cfg: MonitorConfig,
        job_dir: str,
        role: str,
        run_name: str = "",
        config_dict: dict[str, Any] | None = None,
    ) -> None:
        self._cfg = cfg
        self._job_dir = Path(job_dir)
        self._role = role
        self._rejected: set[str] = set()
        self._sinks: dict[str, Sink | BackgroundSink] = {}
        self._context = self._guard("monitor", self._make_context, run_name, config_dict or {})
        for name in cfg.sinks:
            self._guard(name, self._open_sink, name)

    @property
    def active_sinks(self) -> list[str]:
        """Names of the sinks that still work."""
        return [name for name, sink in self._sinks.items() if not getattr(sink, "dead", False)]

    @property
    def incarnation(self) -> int:
        """How many times this role was started in this job, with this one."""
        return 1 if self._context is None else self._context.incarnation

    def add_sink(self, name: str, sink: Sink) -> None:
        """One beside those of the configuration."""
        self._sinks[name] = sink

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record metrics of a step. Values that are no numbers are named once and left out."""
        values, rejected = as_floats(metrics)
        new = set(rejected) - self._rejected
        if new:
            self._rejected |= new
            logger.warning("metrics left out, not numbers or reserved names: %s", sorted(new))
        if not values:
            return
        now = time.time()
        for name, sink in list(self._sinks.items()):
            self._guard(name, sink.log, now, int(step), values)

    def log_table(self, name: str, rows: list[dict[str, Any]], step: int) -> None:
        """Record a table (samples, for instance) with the sinks that can hold one."""
        for sink_name, sink in list(self._sinks.items()):
            self._guard(sink_name, sink.log_table, name, list(rows), int(step))

    def close(self) -> None:
        """Flush and close every sink, each within its deadline. May be called twice.

        Waits for slow sinks: call it from a thread, not on an event loop.
        """
        for name, sink in list(self._sinks.items()):
            self._guard(name, sink.close)
            dropped = getattr(sink, "dropped", 0)
            if dropped:
                logger.warning("sink %s could not keep up: %d records dropped", name, dropped)
        self._sinks.clear()

    def _make_context(self, run_name: str, config: dict[str, Any]) -> SinkContext:
        path = metrics_path(self._job_dir)
        lines, _ = read_lines(path) if path.exists() else ([], 0)
        before = [line.get("incarnation", 0) for line in lines if line["role"] == self._role]
        return SinkContext(
            job_dir=self._job_dir,
            role=self._role,
            run_name=run_name or self._job_dir.name,
            run_id=run_id(self._job_dir),
            incarnation=max(before, default=0) + 1,
            config=shown(config),
        )

    def _open_sink(self, name: str) -> None:
        if self._context is None:
            return
        if name not in SINKS:
            raise ValueError(f"unknown sink {name!r}; there are {sorted(SINKS)}")
        factory = SINKS[name]
        args = dict(self._cfg.sink_args.get(name) or {})
        context = SinkContext(**{**vars(self._context), "args": args})
        if getattr(factory, "blocking", True):
            self._sinks[name] = BackgroundSink(
                name, lambda: factory(context), lambda error: self._disable(name, error)
            )
        else:
            self._sinks[name] = factory(context)

    def _guard(self, sink_name: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:  # a broken sink is reported, and costs only itself
            self._disable(sink_name, error)
            return None

    def _disable(self, name: str, error: Exception) -> None:
        logger.warning(
            "metrics sink %s failed and is off for the rest of this run: %s: %s",
            name,
            type(error).__name__,
            shown_text(str(error)),
        )
        # last, so that close() waits for the warning of a sink that is just failing
        self._sinks.pop(name, None)


def run_id(job_dir: Path) -> str:
    """The id under which trackers know this job: made once, kept in the job directory.

    A resumed job continues its tracker runs; a copied or restarted one gets new ones.
    """
    path = job_dir / "monitor" / "run_id"
    create_durably(path, uuid.uuid4().hex[:12].encode())  # unless another role was first
    text = path.read_text().strip()
    if not text:  # a process of an earlier version was killed between create and write
        text = uuid.uuid4().hex[:12]
        path.write_text(text)
    return text

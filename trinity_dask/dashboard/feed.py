"""What the pages show, kept in the process that serves them: one feed for each stage of each run.

Invariant: a feed is made of events alone and asks nobody; what it holds is bounded by the constants
below, however long a run is and however many there are. Its ``version`` grows with every event, so
a page that has seen it has nothing to do. Plain data: no Dask, no Bokeh, no file.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from trinity_dask.monitor.curves import AGES, CURVES, curve_of
from trinity_dask.monitor.events import ENGINES, METRICS, SPAN, STAGE, STATUS, Event

MAX_FEEDS = 24  # of all runs; ended ones go first
MAX_POINTS = 2000  # of a series; beyond it every other one goes, so the whole run stays
MAX_SERIES = 8  # of a curve
MAX_AGES = 64
MAX_STEPS = 200  # whose ages are kept
MAX_SPANS = 500
MAX_WAITS = 32  # kinds
MAX_ENGINES = 512
MAX_TEXT = 300
FINAL_STATES = ("done", "failed", "interrupted")
LOAD = ("in_flight", "queue_rows", "queue_batches")


class Series:
    """Points of one line in order, logged by ``role``. ``epoch`` changes whenever earlier points
    do: as long as it stays, what a reader has not seen are the last points."""

    def __init__(self, role: str = "") -> None:
        self.role = role
        self.x, self.y = array("d"), array("d")
        self.epoch = 0

    def add(self, x: float, y: float) -> None:
        if self.x and x < self.x[-1]:  # an evaluation that took longer than a later one
            place = bisect_right(self.x, x)
            self.x.insert(place, x)
            self.y.insert(place, y)
            self.epoch += 1
        else:
            self.x.append(x)
            self.y.append(y)
        if len(self.x) > MAX_POINTS:
            self._thin()

    def cut(self, last: float) -> None:
        """What comes after ``last`` never happened."""
        if any(x > last for x in self.x):
            kept = [(x, y) for x, y in zip(self.x, self.y, strict=True) if x <= last]
            self._replace([x for x, _ in kept], [y for _, y in kept])

    def _thin(self) -> None:
        """Leave about half of the points, as evenly as they lie, with the first and the last."""
        gap = 2.0 * (self.x[-1] - self.x[0]) / MAX_POINTS
        kept = [0]
        for i in range(1, len(self.x) - 1):
            if self.x[i] - self.x[kept[-1]] >= gap:
                kept.append(i)
        kept = [*kept[: MAX_POINTS // 2], len(self.x) - 1]
        self._replace([self.x[i] for i in kept], [self.y[i] for i in kept])

    def _replace(self, x: Iterable[float], y: Iterable[float]) -> None:
        self.x, self.y = array("d", x), array("d", y)
        self.epoch += 1


class RunFeed:
    """One stage of one run. ``number`` names it in URLs."""

    def __init__(self, run: str, stage: str, number: int) -> None:
        self.run, self.stage, self.number = run, stage, number
        self.version = 0
        self.facts: dict[str, Any] = {}
        self.config = ""
        self.status: dict[str, Any] = {}
        self.curves: dict[str, dict[str, Series]] = {curve.name: {} for curve in CURVES}
        self.load = {name: Series() for name in LOAD}
        self.ages: deque[tuple[int, dict[int, float]]] = deque(maxlen=MAX_STEPS)
        self.all_ages: dict[int, float] = {}
        self.spans: deque[dict[str, Any]] = deque(maxlen=MAX_SPANS)
        self.n_spans = 0
        self.waited: dict[tuple[str, str], tuple[int, float]] = {}  # who, what -> times, seconds
        self.engines: dict[str, dict[str, Any]] = {}
        self.started = 0.0  # Unix time in seconds of the first event
        self.heard = 0.0  # and of the last one
        self.over = False  # another stage of the run goes on
        self.lost = False  # its control worker is gone
        self._incarnations: dict[str, int] = {}

    @property
    def title(self) -> str:
        name = str(self.facts.get("name") or self.run)
        return f"{name} · {self.stage}" if self.stage else name

    @property
    def state(self) -> str:
        """Of the run; of a stage that is over ``done``."""
        if self.over and self.status.get("state") not in FINAL_STATES:
            return "done"
        state = str(self.status.get("state", "starting"))
        return "lost" if self.lost and state not in FINAL_STATES else state

    @property
    def ended(self) -> bool:
        return self.state in (*FINAL_STATES, "lost")

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take in one event; what a newer version tells and this one does not know is ignored.

        Raises:
            KeyError, TypeError, ValueError: it is no event of its kind.
        """
        now = float(event["time"])
        self.heard, self.lost = max(self.heard, now), False
        if now and not self.started:
            self.started = now
        kind = event["kind"]
        if kind == STAGE:
            self._stage(event)
        elif kind == "config":
            self.config = str(event["config"])
        elif kind == METRICS:
            self._metrics(str(event["role"]), int(event["incarnation"]), event["points"])
        elif kind == STATUS:
            self._status(now, event["values"])
        elif kind == ENGINES:
            self._engines(event["engines"])
        elif kind == SPAN:
            self._span(event["span"])
        self.version += 1

    def _stage(self, event: Mapping[str, Any]) -> None:
        """It begins; what there was before is told after it, if this is the start of a telling."""
        if event.get("anew"):
            self._clear()
        began = min(float(event["began"]), float(event["time"]))
        self.started = min(self.started, began) if self.started else began
        self.over = False
        known = ("name", "mode", "job_dir", "bound", "bound_key")
        self.facts |= {key: event.get(key) for key in known}

    def _clear(self) -> None:
        for lines in (*self.curves.values(), self.load):
            for series in lines.values():
                series.cut(-math.inf)
        for held in (
            *(self.ages, self.all_ages, self.spans, self.waited, self.engines),
            self._incarnations,
        ):
            held.clear()
        self.n_spans, self.started = 0, 0.0

    def _metrics(self, role: str, incarnation: int, points: Sequence[Any]) -> None:
        if points and incarnation > self._incarnations.get(role, 0):
            self._incarnations[role] = incarnation
            self._rewind(role, float(points[0][0]))
        for step, values in points:
            ages: dict[int, float] = {}
            for metric, value in values.items():
                if metric.startswith(AGES):
                    ages[int(metric.removeprefix(AGES))] = float(value)
                elif (curve := curve_of(metric)) is not None:
                    lines = self.curves[curve.name]
                    if metric in lines or len(lines) < MAX_SERIES:
                        lines.setdefault(metric, Series(role)).add(float(step), value)
            if ages:
                self.ages.append((int(step), ages))
                for age, tokens in ages.items():
                    if age in self.all_ages or len(self.all_ages) < MAX_AGES:
                        self.all_ages[age] = self.all_ages.get(age, 0.0) + tokens

    def _rewind(self, role: str, step: float) -> None:
        """A resumed run stands at ``step``: what its predecessor did later never happened."""
        for lines in self.curves.values():
            for series in lines.values():
                if series.role == role:
                    series.cut(step - 1)

    def _status(self, now: float, values: Mapping[str, Any]) -> None:
        self.status |= values
        for name, series in self.load.items():
            value = self.status.get(name)
            if isinstance(value, int | float):
                series.add(now - self.started, float(value))

    def _engines(self, engines: Mapping[str, Any]) -> None:
        for slot, state in engines.items():
            if state.get("state") == "gone":
                self.engines.pop(slot, None)
            elif slot in self.engines or len(self.engines) < MAX_ENGINES:
                self.engines[slot] = dict(state)

    def _span(self, span: Mapping[str, Any]) -> None:
        found = {key: span.get(key) for key in ("what", "version", "bytes", "floor_share")}
        texts = {key: str(span.get(key) or "")[:MAX_TEXT] for key in ("who", "awaited")}
        times = {key: float(span[key]) for key in ("start", "seconds")}
        span = {**found, **texts, **times, "whose": _whose(texts["who"])}
        self.spans.append(span)
        self.n_spans += 1
        kind = (span["whose"], _NUMBER.sub("…", texts["awaited"]))
        if found["what"] == "wait" and (kind in self.waited or len(self.waited) < MAX_WAITS):
            times_so_far, seconds = self.waited.get(kind, (0, 0.0))
            self.waited[kind] = (times_so_far + 1, seconds + times["seconds"])


_EXPLORER = re.compile(r"^explorer '(.*)'")
_NUMBER = re.compile(r"\d+")


def _whose(who: str) -> str:
    """A side by its name: without the step at which it was, which changes."""
    found = _EXPLORER.search(who)
    return found[1] if found else who.partition(" at step")[0]


# where the pages of a scheduler lead to; {} is the number of the feed
LINKS = {
    "rollouts": "trinity/rollouts#run={}",
    "configuration": "trinity/config/{}",
    "logs": "trinity/logs/{}",
    "workers": "info/main/workers.html",
    "all runs as JSON": "trinity/api/runs",
}


def root_of(feed: RunFeed) -> Optional[Path]:
    """The directory of a feed's job: that of a stage lies in it. None: it has told of none."""
    if not feed.facts.get("job_dir"):
        return None
    job_dir = Path(str(feed.facts["job_dir"]))
    return job_dir.parent if feed.stage and job_dir.name == feed.stage else job_dir


class Feeds:
    """The feeds of all runs that were heard of, the oldest ended one leaving first. ``links`` are
    relative addresses by what is said of them; neither holds anything that a run has told."""

    def __init__(self, links: Mapping[str, str] = LINKS) -> None:
        self.links = dict(links)
        self.version = 0
        self._feeds: dict[tuple[str, str], RunFeed] = {}
        self._numbers = 0

    def __iter__(self) -> Iterator[RunFeed]:
        return iter(list(self._feeds.values()))

    def __len__(self) -> int:
        return len(self._feeds)

    def get(self, number: int) -> Optional[RunFeed]:
        return next((feed for feed in self if feed.number == number), None)

    def apply(self, event: Mapping[str, Any]) -> RunFeed:
        """Give an event to its feed, which is made when it is the first. Raises as
        :meth:`RunFeed.apply`."""
        run, stage = str(event["run"])[:MAX_TEXT], str(event["stage"])[:MAX_TEXT]
        feed = self._feeds.get((run, stage))
        if feed is None:
            feed = self._new(run, stage)
        feed.apply(event)
        if event["kind"] == STAGE:
            self._begun(feed)
        self.version += 1
        return feed

    def _new(self, run: str, stage: str) -> RunFeed:
        feed = self._feeds[run, stage] = RunFeed(run, stage, self._numbers)
        self._numbers += 1
        while len(self._feeds) > MAX_FEEDS:
            others = [other for other in self if other is not feed]
            oldest = min(others, key=lambda other: (not other.ended, other.heard))
            del self._feeds[oldest.run, oldest.stage]
        return feed

    def _begun(self, feed: RunFeed) -> None:
        """The run's other stages are over; what it told before its first stage is that one's."""
        for other in self:
            if other.run == feed.run and other is not feed:
                if not other.stage:
                    del self._feeds[other.run, other.stage]
                    feed.status = {**other.status, **feed.status}
                else:
                    other.over = True
                    other.version += 1

    def lost(self, run: str) -> None:
        """The control worker of ``run`` is gone; it is back with the next event."""
        for feed in self:
            if feed.run == run and not feed.ended:
                feed.lost = True
                feed.version += 1
                self.version += 1


def summary(feeds: Feeds) -> list[Event]:
    """What is known of each run, without its curves."""
    return [
        {
            "number": feed.number,
            "run": feed.run,
            "stage": feed.stage,
            "state": feed.state,
            "version": feed.version,
            "facts": feed.facts,
            "status": feed.status,
            "engines": feed.engines,
        }
        for feed in feeds
    ]

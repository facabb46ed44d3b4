"""What the feeds hold of what runs tell: all of it, bounded, and nothing twice."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from trinity_dask.dashboard import feed as feeds_module
from trinity_dask.dashboard.feed import MAX_FEEDS, MAX_POINTS, MAX_SPANS, Feeds, RunFeed, Series
from trinity_dask.monitor import events as events_module
from trinity_dask.monitor.curves import AGES, CURVES, curve_of
from trinity_dask.monitor.events import EventSink, RunEvents, events_path, past_events, plain
from trinity_dask.monitor.history import encode_line, metrics_path


class Told(RunEvents):
    """The real one, whose events go where the test can see them, as msgpack carries them."""

    def __init__(self, run_id: str, feeds: Feeds) -> None:
        super().__init__(run_id)
        self.feeds, self.sent = feeds, list[dict[str, Any]]()

    def _send(self, event: dict[str, Any]) -> None:
        self.sent.append(msgpack.unpackb(msgpack.packb(event), strict_map_key=False))
        self.feeds.apply(self.sent[-1])


def told(
    directory: Path, run: str = "run", stage: str = "grpo", feeds: Feeds | None = None
) -> Told:
    found = Told(run, Feeds() if feeds is None else feeds)
    found.begin(
        stage,
        directory,
        "name: x",
        began=time.time(),
        name="job",
        mode="both",
        bound=2,
        bound_key="",
    )
    return found


def only(feeds: Feeds) -> RunFeed:
    (feed,) = feeds
    return feed


def lines_of(feed: RunFeed) -> dict[str, list[tuple[float, float]]]:
    return {
        metric: list(zip(series.x, series.y, strict=True))
        for lines in feed.curves.values()
        for metric, series in lines.items()
    }


def test_what_a_run_tells_is_in_its_feed(tmp_path: Path) -> None:
    run = told(tmp_path)
    sink = EventSink(run, "trainer", 1)
    for step in (1, 2):
        metrics = {"actor/pg_loss": 0.5 * step, "sample/reward/mean": 0.1, "perf/tflops": 1.0}
        sink.log(time.time(), step, {**metrics, f"{AGES}0": 90.0, f"{AGES}2": 10.0})
    run.status({"state": "running", "step": 2, "in_flight": 3, "runners": ["not shown"]})
    run.engines({"engine-0": {"state": "serving", "version": np.int64(2), "busy": np.float32(0.5)}})
    run.span({"what": "wait", "start": 1.0, "seconds": 2.0, "who": "trainer", "awaited": "rows"})
    feed = only(run.feeds)
    assert lines_of(feed) == {
        "actor/pg_loss": [(1, 0.5), (2, 1.0)],
        "sample/reward/mean": [(1, 0.1), (2, 0.1)],
    }
    assert feed.all_ages == {0: 180.0, 2: 20.0}
    assert feed.status == {"state": "running", "step": 2, "in_flight": 3}
    assert feed.load["in_flight"].y.tolist() == [3.0]
    assert feed.engines == {"engine-0": {"state": "serving", "version": 2.0, "busy": 0.5}}
    assert [span["seconds"] for span in feed.spans] == [2.0]
    assert (feed.title, feed.state, feed.config) == ("job · grpo", "running", "name: x")


def test_what_has_not_changed_is_not_told_again(tmp_path: Path) -> None:
    run = told(tmp_path)
    status = {"state": "running", "step": 1, "accounts": {"scheduled": 8}}
    run.status(status)
    before = len(run.sent)
    run.status({**status, "elapsed_s": 5.0})
    assert len(run.sent) == before
    run.status({**status, "step": 2})
    assert run.sent[-1]["values"] == {"step": 2}


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (np.float32(1.5), 1.5),
        (math.nan, None),
        (math.inf, None),
        (np.int64(3), 3.0),
        ({"a": (1, np.float64(2.0))}, {"a": [1, 2.0]}),
        ("x" * 5000, "x" * 1999 + "…"),
        (Path("/a"), "/a"),
    ],
)
def test_only_plain_values_are_told(value: Any, wanted: Any) -> None:
    assert plain(value) == wanted
    json.dumps(plain(value), allow_nan=False)
    msgpack.packb(plain(value))


def test_a_long_run_keeps_its_shape_in_bounded_memory(tmp_path: Path) -> None:
    """Ten times as long, and no larger: neither points, nor ages, waits, lines or engines."""
    run = told(tmp_path)
    feed = only(run.feeds)

    def size() -> int:
        points = sum(len(s.x) for lines in feed.curves.values() for s in lines.values())
        points += sum(len(series.x) for series in feed.load.values())
        return points + len(feed.ages) + len(feed.all_ages) + len(feed.spans) + len(feed.engines)

    most = (
        MAX_POINTS * (feeds_module.MAX_SERIES * len(CURVES) + len(feeds_module.LOAD))
        + feeds_module.MAX_STEPS
        + feeds_module.MAX_AGES
        + MAX_SPANS
        + feeds_module.MAX_ENGINES
    )
    for step in range(5 * MAX_POINTS):
        values = {"actor/pg_loss": float(step), f"{AGES}{step}": 1.0, f"eval/{step}/reward": 1.0}
        feed.apply(
            {
                "kind": "metrics",
                "time": 1.0,
                "role": "t",
                "incarnation": 0,
                "points": [[step, values]],
            }
        )
        feed.apply({"kind": "status", "time": 1.0, "values": {"in_flight": step}})
        span = {"what": "wait", "start": 0.0, "seconds": 1.0, "who": "w", "awaited": "x"}
        feed.apply({"kind": "span", "time": 1.0, "span": span})
        feed.apply({"kind": "engines", "time": 1.0, "engines": {f"e{step}": {"state": "serving"}}})
    assert size() <= most
    series = feed.curves["loss"]["actor/pg_loss"]
    assert (series.x[0], series.x[-1]) == (0.0, 5 * MAX_POINTS - 1)  # from the first to the last
    assert MAX_POINTS / 2 <= len(series.x) <= MAX_POINTS
    assert len(feed.spans) == MAX_SPANS
    assert len(feed.curves["eval"]) == feeds_module.MAX_SERIES


def test_a_scheduler_with_many_runs_forgets_the_oldest_that_have_ended(tmp_path: Path) -> None:
    feeds = Feeds()
    live = told(tmp_path, "live", feeds=feeds)
    live.status({"state": "running"})
    for number in range(2 * MAX_FEEDS):
        run = told(tmp_path, f"run-{number}", feeds=feeds)
        run.status({"state": "done"})
    names = [feed.run for feed in feeds]
    assert len(names) == MAX_FEEDS
    assert "live" in names
    assert f"run-{2 * MAX_FEEDS - 1}" in names
    assert "run-0" not in names


def test_stages_are_told_apart_and_earlier_ones_are_over(tmp_path: Path) -> None:
    feeds = Feeds()
    run = Told("run", feeds)
    run.status({"state": "starting", "message": "preparing data"})
    assert [feed.stage for feed in feeds] == [""]
    run.begin("sft", tmp_path / "sft", "", began=time.time())
    run.status({"state": "running", "message": ""})
    run.begin("grpo", tmp_path / "grpo", "", began=time.time())
    assert [(feed.stage, feed.state) for feed in feeds] == [("sft", "done"), ("grpo", "starting")]


def test_a_resumed_run_goes_on_where_its_predecessor_stood(tmp_path: Path) -> None:
    """Its directory gives the page what the scheduler never heard; what the dead run did after the
    checkpoint never happened."""
    path = metrics_path(tmp_path)
    path.parent.mkdir(parents=True)
    text = "".join(
        encode_line(1.0, "trainer", step, 1, {"actor/pg_loss": float(step), f"{AGES}0": 5.0})
        for step in range(1, 8)
    )
    path.write_text(text + '{"half a li')
    first = told(tmp_path)
    first.span({"what": "wait", "start": 1.0, "seconds": 2.0, "who": "a", "awaited": "b"})
    first.status({"state": "running", "step": 7})
    again = told(tmp_path)
    again.earlier(past_events(tmp_path, 1000))
    feed = only(again.feeds)
    assert lines_of(feed)["actor/pg_loss"] == [(s, s) for s in range(1, 8)]
    assert len(feed.spans) == 1
    assert feed.status["step"] == 7
    assert feed.state == "starting"  # not how the dead one stood
    EventSink(again, "trainer", 2).log(2.0, 6, {"actor/pg_loss": -6.0})
    assert lines_of(feed)["actor/pg_loss"] == [*((s, s) for s in range(1, 6)), (6, -6.0)]


def test_a_run_that_begins_again_on_one_scheduler_tells_nothing_twice(tmp_path: Path) -> None:
    """The launcher of a lost control worker: the same run, the same feed."""
    run = told(tmp_path)
    path = metrics_path(tmp_path)
    for step in (1, 2):
        EventSink(run, "trainer", 1).log(1.0, step, {"actor/pg_loss": 1.0, f"{AGES}1": 4.0})
        with path.open("a") as file:
            file.write(
                encode_line(1.0, "trainer", step, 1, {"actor/pg_loss": 1.0, f"{AGES}1": 4.0})
            )
    run.span({"what": "wait", "start": 1.0, "seconds": 2.0, "who": "a", "awaited": "b"})
    again = told(tmp_path, feeds=run.feeds)
    again.earlier(past_events(tmp_path, 1000))
    feed = only(run.feeds)
    assert lines_of(feed)["actor/pg_loss"] == [(1, 1.0), (2, 1.0)]
    assert feed.all_ages == {1: 8.0}
    assert len(feed.spans) == 1


def test_the_file_of_events_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_BYTES", 4000)
    run = told(tmp_path)
    for number in range(500):
        span = {"what": "wait", "start": 1.0, "seconds": float(number), "who": "a", "awaited": "b"}
        run.span(span)
    files = sorted(events_path(tmp_path).parent.iterdir())
    assert len(files) == 2
    assert sum(file.stat().st_size for file in files) < 2 * 4000 + 1000
    kept = [event["span"]["seconds"] for event in past_events(tmp_path, 10_000)]
    assert kept == [float(n) for n in range(500 - len(kept), 500)]  # the newest, in their order


def test_a_directory_that_cannot_be_written_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "monitor").write_text("a file where the directory should be")
    run = told(tmp_path)
    run.span({"what": "wait", "start": 1.0, "seconds": 2.0, "who": "a", "awaited": "b"})
    assert len(only(run.feeds).spans) == 1


def test_points_of_a_series_are_thinned_evenly() -> None:
    series = Series()
    for x in range(4 * MAX_POINTS + 1):
        series.add(x, 0.0)
    gaps = {b - a for a, b in zip(series.x, series.x[1:], strict=False)}
    assert len(series.x) <= MAX_POINTS
    assert series.x[0] == 0
    assert max(gaps) <= 4 * 4 * MAX_POINTS / len(series.x)  # not one of them is a hole
    assert series.epoch > 0


@pytest.mark.parametrize(
    ("metric", "curve"),
    [
        ("rollout/reward/mean", "reward"),
        ("eval/heldout/reward/mean@1", "eval"),
        ("eval/heldout/reward/std@4", None),
        ("eval/heldout/time/run_execution", None),
        ("actor/pg_loss", "loss"),
        ("actor/kl_loss", "kl"),
        ("actor/ppo_kl", "kl"),
        ("actor/entropy", "entropy"),
        ("correction/gap", "gap"),
        ("update/ratio_p99", "ratio"),
        ("time/sync_wait", "time"),
        ("perf/tflops/actor", None),
    ],
)
def test_each_metric_is_on_its_curve(metric: str, curve: str | None) -> None:
    found = curve_of(metric)
    assert (None if found is None else found.name) == curve


def test_a_lost_control_worker_is_seen_and_its_return_too(tmp_path: Path) -> None:
    run = told(tmp_path)
    run.status({"state": "running"})
    run.feeds.lost("run")
    assert only(run.feeds).state == "lost"
    run.status({"step": 1})
    assert only(run.feeds).state == "running"


def test_what_comes_late_is_put_in_its_place() -> None:
    series = Series()
    for x in (0.0, 4.0, 2.0, 6.0, 2.0):
        series.add(x, 10 * x)
    assert series.x.tolist() == [0.0, 2.0, 2.0, 4.0, 6.0]
    assert series.y.tolist() == [0.0, 20.0, 20.0, 40.0, 60.0]
    assert series.epoch == 2  # a page that has drawn it draws all of it once more


def test_waits_are_summed_by_who_and_for_what(tmp_path: Path) -> None:
    run = told(tmp_path)
    for step in (1, 2, 30):
        who = f"explorer 'main' at step {step}"
        wait = {"what": "wait", "start": 1.0, "who": who, "awaited": f"batch {step}"}
        run.span({**wait, "seconds": 0.5})
    run.span({"what": "wait", "start": 1.0, "seconds": 2.0, "who": "trainer", "awaited": "rows"})
    run.span({"what": "transfer", "start": 1.0, "seconds": 9.0, "who": "explorer 'main'"})
    feed = only(run.feeds)
    assert feed.waited == {("main", "batch …"): (3, 1.5), ("trainer", "rows"): (1, 2.0)}
    for number in range(100):
        run.span({"what": "wait", "start": 1.0, "seconds": 1.0, "who": "x" * number, "awaited": ""})
    assert len(feed.waited) == feeds_module.MAX_WAITS

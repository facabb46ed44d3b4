"""Sinks write what they are given, and none of them can hurt a run."""

import json
import logging
import threading
import time

import pytest

from trinity_dask.config.schema import MonitorConfig
from trinity_dask.monitor import SINKS, Monitor, load_metrics
from trinity_dask.monitor.sinks import BackgroundSink, headline, register_sink

DEADLINE_S = 60.0


class BrokenSink:
    """Fails at a chosen point; counts what it was asked to do."""

    calls = 0

    def __init__(self, context):
        self.point = context.args["point"]
        self._maybe_fail("open")

    def _maybe_fail(self, point):
        type(self).calls += 1
        if point == self.point:
            raise ConnectionError(f"no route at {point}")

    def log(self, time_s, step, metrics):
        self._maybe_fail("log")

    def log_table(self, name, rows, step):
        self._maybe_fail("table")

    def close(self):
        self._maybe_fail("close")


class BrokenInline(BrokenSink):
    blocking = False


class BrokenThreaded(BrokenSink):
    blocking = True


@pytest.fixture
def broken():
    """The failing sinks, registered for one test."""
    for kind in (BrokenInline, BrokenThreaded):
        kind.calls = 0
        register_sink(kind.__name__)(kind)
    yield
    for kind in (BrokenInline, BrokenThreaded):
        del SINKS[kind.__name__]


@pytest.mark.parametrize("point", ["open", "log", "table", "close"])
@pytest.mark.parametrize("sink", ["BrokenInline", "BrokenThreaded"])
def test_a_failing_sink_warns_once_and_the_others_go_on(tmp_path, caplog, broken, sink, point):
    cfg = MonitorConfig(sinks=[sink, "jsonl"], sink_args={sink: {"point": point}})
    with caplog.at_level(logging.WARNING, logger="trinity_dask.monitor"):
        monitor = Monitor(cfg, str(tmp_path), "trainer")
        for step in range(5):
            monitor.log(step, {"loss": 1.0})
            monitor.log_table("samples", [{"text": "a"}], step)
        assert "jsonl" in monitor.active_sinks
        monitor.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert f"{sink} failed" in warnings[0]
    assert "no route" in warnings[0]
    assert len(load_metrics(tmp_path)) == 5


def test_an_unknown_sink_is_named_and_costs_nothing(tmp_path, caplog):
    monitor = Monitor(MonitorConfig(sinks=["tensorbord", "jsonl"]), str(tmp_path), "trainer")
    monitor.log(1, {"loss": 1.0})
    monitor.close()
    assert "unknown sink 'tensorbord'" in caplog.text
    assert len(load_metrics(tmp_path)) == 1


def test_a_job_directory_that_cannot_be_written_stops_nothing(tmp_path, caplog):
    (tmp_path / "job").write_text("a file where the directory should be")
    monitor = Monitor(MonitorConfig(), str(tmp_path / "job"), "trainer")
    monitor.log(1, {"loss": 1.0})
    monitor.close()
    assert "is off" in caplog.text


def test_a_hanging_sink_holds_up_neither_log_nor_close():
    hang = threading.Event()

    class Hanging:
        blocking = True

        def log(self, time_s, step, metrics):
            hang.wait(DEADLINE_S)

        def close(self):
            pass

    sink = BackgroundSink("hanging", Hanging, lambda error: None)
    started = time.monotonic()
    for step in range(20_000):
        sink.log(0.0, step, {"a": 1.0})
    assert sink.dropped > 0
    with pytest.raises(TimeoutError, match="queue stayed full"):
        sink.close(timeout_s=0.2)
    assert time.monotonic() - started < DEADLINE_S / 2
    hang.set()
    sink.close(timeout_s=DEADLINE_S)


def test_metrics_that_are_no_numbers_are_named_once(tmp_path, caplog):
    monitor = Monitor(MonitorConfig(sinks=["jsonl"]), str(tmp_path), "trainer")
    for step in range(3):
        monitor.log(step, {"note": "text", "loss": 1.0})
    assert caplog.text.count("note") == 1
    assert load_metrics(tmp_path)["loss"].tolist() == [1.0] * 3


def test_tables_are_rows_with_their_step(tmp_path):
    monitor = Monitor(MonitorConfig(sinks=["jsonl"]), str(tmp_path), "explorer")
    monitor.log_table("eval/samples", [{"text": "a", "reward": 1.0}, {"text": "b"}], step=4)
    lines = (tmp_path / "monitor/tables/eval_samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 4, "text": "a", "reward": 1.0},
        {"step": 4, "text": "b"},
    ]


def test_the_console_line_leads_with_what_people_look_at():
    text = headline({"time/x": 1.0, "rollout/reward/mean": 0.25, "trainer/grad_norm": 2.0})
    assert text == "rollout/reward/mean 0.25, trainer/grad_norm 2 (+1 more)"

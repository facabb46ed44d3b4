"""The page of a job that has ended, or runs elsewhere, made from its directory."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets

from trinity_dask.config.schema import MonitorConfig
from trinity_dask.dashboard import offline
from trinity_dask.dashboard.feed import Feeds, RunFeed
from trinity_dask.dashboard.offline import JobReader, application
from trinity_dask.dashboard.routes import log_files
from trinity_dask.monitor import events as events_module
from trinity_dask.monitor.curves import AGES
from trinity_dask.monitor.events import RunEvents, events_path
from trinity_dask.monitor.history import metrics_path
from trinity_dask.monitor.monitor import Monitor


class Job:
    """A stage that writes as a real one does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events = RunEvents("run-1")
        self.events.begin("", directory, "", began=time.time(), name="job", mode="both", bound=1)
        self.monitor = Monitor(MonitorConfig(sinks=["jsonl"]), str(directory), "trainer")

    def step(self, step: int) -> None:
        values = {"actor/pg_loss": 1.0 / step, "perf/unseen": 1.0, f"{AGES}{step % 2}": 8.0}
        self.monitor.log(step, values)
        span = {"what": "wait", "start": time.time(), "seconds": 0.5, "who": "a", "awaited": "b"}
        self.events.span(span)
        self.events.status({"state": "running", "step": step, "accounts": {"scheduled": step}})

    def end(self) -> None:
        self.events.end({"engine-0": {"state": "serving", "version": 3}})
        self.events.status({"state": "done"})
        self.monitor.close()


def read(directory: Path, limit: int = 1 << 20) -> tuple[Feeds, JobReader]:
    feeds = Feeds()
    reader = JobReader(directory, feeds)
    while reader.look(limit):
        pass
    return feeds, reader


def loss(feed: RunFeed) -> list[tuple[float, float]]:
    series = feed.curves["loss"]["actor/pg_loss"]
    return list(zip(series.x, series.y, strict=True))


@pytest.mark.parametrize("limit", [1 << 20, 700])
def test_an_ended_job_is_shown_as_it_was(tmp_path: Path, limit: int) -> None:
    """Whether it is read at once or in many small looks."""
    job = Job(tmp_path)
    for step in range(1, 31):
        job.step(step)
    job.end()
    (tmp_path / "config.yaml").write_text("name: job\n")
    (feed,) = read(tmp_path, limit)[0]
    assert loss(feed) == [(step, 1.0 / step) for step in range(1, 31)]
    assert feed.all_ages == {0: 120.0, 1: 120.0}
    assert (feed.state, feed.status["step"], feed.status["accounts"]) == (
        "done",
        30,
        {"scheduled": 30},
    )
    assert len(feed.spans) == 30
    assert feed.engines["engine-0"]["version"] == 3
    assert (feed.facts["bound"], feed.facts["mode"]) == (1, "both")
    assert feed.config == "name: job\n"
    assert feed.title == "job"


def test_what_a_run_appends_is_seen_at_the_next_look(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step(1)
    feeds, reader = read(tmp_path)
    (feed,) = feeds
    job.step(2)
    with metrics_path(tmp_path).open("a") as file:
        file.write('{"half": ')
    assert reader.look() > 0
    assert loss(feed) == [(1, 1.0), (2, 0.5)]
    version = feed.version
    reader.look()
    assert feed.version == version


def test_a_resumed_job_loses_what_never_happened(tmp_path: Path) -> None:
    first = Job(tmp_path)
    for step in range(1, 6):
        first.step(step)
    first.monitor.close()
    second = Job(tmp_path)
    second.step(4)
    (feed,) = read(tmp_path)[0]
    assert [x for x, _ in loss(feed)] == [1, 2, 3, 4]
    assert len(feed.spans) == 6


def test_events_are_read_on_when_their_file_has_become_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "MAX_BYTES", 3000)
    job = Job(tmp_path)
    feeds, reader = read(tmp_path)
    (feed,) = feeds
    for step in range(1, 101):
        job.step(step)
        reader.look()
    assert events_path(tmp_path).with_suffix(".old.jsonl").exists()
    assert feed.n_spans == 100


def test_stages_and_several_jobs_have_a_feed_each(tmp_path: Path) -> None:
    for stage in ("sft", "grpo"):
        Job(tmp_path / "two" / stage).step(1)
    Job(tmp_path / "one").step(1)
    feeds, _ = read(tmp_path / "two")
    JobReader(tmp_path / "one", feeds).look()
    assert [feed.title for feed in feeds] == ["job · sft", "job · grpo", "job"]


def test_a_job_from_before_there_were_events_shows_its_curves(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step(1)
    events_path(tmp_path).unlink()
    (feed,) = read(tmp_path)[0]
    assert loss(feed) == [(1, 1.0)]


def test_a_directory_that_holds_no_job_has_no_feed(tmp_path: Path) -> None:
    assert list(read(tmp_path)[0]) == []
    assert list(read(tmp_path / "not there")[0]) == []


def test_the_pages_are_served_and_follow_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "LOOK_MS", 20)
    job = Job(tmp_path)
    job.step(1)

    async def go() -> list[dict[str, Any]]:
        app = application([tmp_path], prefix="job")
        sockets = bind_sockets(0, "127.0.0.1")
        server = HTTPServer(app)
        server.add_sockets(sockets)
        app.initialize(IOLoop.current())
        app.start()
        client, address = AsyncHTTPClient(), f"http://127.0.0.1:{sockets[0].getsockname()[1]}/job"
        try:
            log = tmp_path / "log" / "control-0.log"
            log.parent.mkdir()
            log.write_text("x" * 70_000 + "\n" + "<b>the last line</b>\n")
            (tmp_path / "log" / "secret.txt").write_text("no log")
            found = await client.fetch(f"{address}/trinity/logs/0/control-0")
            assert found.body.decode() == "==> control-0.log <==\n<b>the last line</b>\n"
            assert found.headers["Content-Type"].startswith("text/plain")
            assert found.headers["X-Content-Type-Options"] == "nosniff"
            assert b"no log" not in (await client.fetch(f"{address}/trinity/logs/0")).body
            for path in ("logs/0/secret", "logs/0/..%2fconfig", "logs/7", "config/7"):
                answer = await client.fetch(f"{address}/trinity/{path}", raise_error=False)
                assert answer.code == 404
            for path in ("trinity", "individual-trinity-loss", "statics/css/base.css"):
                assert (await client.fetch(f"{address}/{path}")).code == 200
            job.events.status({"state": "done", "step": 2})  # told at once: its state is news
            async with asyncio.timeout(60):
                while True:
                    runs = json.loads((await client.fetch(f"{address}/trinity/api/runs")).body)
                    if runs[0]["state"] == "done":
                        return runs
                    await asyncio.sleep(0.02)
        finally:
            app.stop()
            server.stop()

    (run,) = asyncio.run(go())
    assert run["status"]["step"] == 2


@pytest.mark.parametrize(
    ("stage", "directory", "wanted"),
    [
        ("", "job", ["job.log"]),
        ("grpo", "job/grpo", ["job.log"]),
        ("", "job/other", []),  # nothing says that what lies above belongs to it
        ("grpo", "job/other", []),
        ("", None, []),
    ],
)
def test_only_logs_of_the_job_are_shown(
    tmp_path: Path, stage: str, directory: str | None, wanted: list[str]
) -> None:
    (tmp_path / "job" / "log").mkdir(parents=True)
    (tmp_path / "job" / "log" / "job.log").write_text("")
    feed = RunFeed("run", stage, 0)
    feed.facts["job_dir"] = directory and str(tmp_path / directory)
    assert [file.name for file in log_files(feed)] == wanted

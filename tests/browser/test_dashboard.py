"""The page ``/trinity`` in a browser: what a run tells is seen while it runs, from wherever.

Runs that only tell (through the scheduler, as a run does) cost no worker; one is real.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from telling import Teller, port_of, served, url
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect
from ways import _done, on_a_loop, proxy, tunnel

from trinity_dask import Run, load_config
from trinity_dask.cli import main
from trinity_dask.config.schema import MonitorConfig
from trinity_dask.dashboard import plugin
from trinity_dask.monitor.events import RunEvents
from trinity_dask.monitor.monitor import Monitor

WAIT_S, RUN_S = 120.0, 600.0  # for what is told already; for a run to get there
# the data of a model of the page by its name, or null
DATA = """(name) => {
  const found = Bokeh.documents.map((doc) => doc.get_model_by_name(name)).find((m) => m);
  if (!found) return null;
  if (found.text !== undefined) return found.text;
  const data = found.data instanceof Map ? Object.fromEntries(found.data) : found.data;
  return Object.fromEntries(Object.entries(data).map(([k, v]) => [k, Array.from(v)]));
}"""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    cluster, client = served()
    yield client
    client.close()
    cluster.close()


def number_of(address: str, run: str) -> int:
    """The number of a run on the page at ``address``."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{address}/api/runs", timeout=30) as answer:
            numbers = [known["number"] for known in json.load(answer) if known["run"] == run]
        if numbers:
            return int(max(numbers))
        time.sleep(0.05)
    raise AssertionError(f"nothing is known of run {run}")


def data(page: Any, name: str, ready: Callable[[Any], bool], wait_s: float = WAIT_S) -> Any:
    """The data of a model, once they are there and ``ready``."""
    deadline, found = time.monotonic() + wait_s, None
    while time.monotonic() < deadline:
        found = page.evaluate(f"(name) => window.Bokeh ? ({DATA})(name) : null", name)
        if found is not None and ready(found):
            return found
        page.wait_for_timeout(50)
    raise AssertionError(f"{name} is not as expected: {found}")


def sees_points(page: Any, address: str, teller: Teller) -> None:
    """The page at ``address`` shows a step that is told while it is open."""
    teller.step(1, actor__pg_loss=0.5)
    page.goto(address)
    name = f"{number_of(address, teller.run_id)}/loss/actor/pg_loss"
    data(page, name, lambda found: found["x"] == [1])
    teller.step(2, actor__pg_loss=0.25)
    assert data(page, name, lambda found: found["x"] == [1, 2])["y"] == [0.5, 0.25]


@pytest.mark.timeout(1800)
def test_a_real_run_is_seen_while_it_runs_and_as_it_ended(page: Any, tmp_path: Path) -> None:
    """A run that would go on for long: it is stopped when the page has shown ten of its steps."""
    words = ["+experiment=sort_digits_tiny", "engine=torch", f"checkpoint_root_dir={tmp_path}"]
    long = [f"stages.1.{part}.total_steps=100000" for part in ("trainer", "buffer")]
    short = ["stages.0.trainer.total_steps=3", "monitor.sinks=[jsonl]", "monitor.curves=false"]
    with Run(load_config(*words, *long, *short)) as run:
        while run.page_link is None and run.state in ("starting", "running"):
            run.wait_for_change(run.status["version"], 1.0)
        address = run.page_link
        assert address is not None, run.status
        page.goto(address)
        while run.status.get("stage") != "grpo":
            status = run.wait_for_change(run.status["version"], 5.0)
            assert status["state"] in ("starting", "running"), status
        number = number_of(address, run.run_id)
        reward = f"{number}/reward/rollout/reward/mean"
        live = data(page, reward, lambda found: len(found["x"]) >= 10, RUN_S)
        assert run.state == "running"
        run.stop("it was seen")
        status = run.wait(timeout=RUN_S)
        assert status["state"] == "interrupted"
        head = data(page, f"{number}/head", lambda text: "interrupted" in text)
        assert f"train step {status['step']} of 100,000" in head
        logged = run.metrics.set_index(["stage", "role", "step"])["rollout/reward/mean"].dropna()
        wanted = logged.loc["grpo", "explorer"]
        whole = data(page, reward, lambda found: len(found["x"]) == len(wanted))
        assert (whole["x"], whole["y"]) == (wanted.index.to_list(), wanted.to_list())
        assert whole["y"][: len(live["y"])] == live["y"]
        counts = status["accounts"]
        shown = data(page, f"{number}/accounts", lambda found: len(found["account"]) > len(counts))
        said = dict(zip(shown["account"], shown["count"], strict=True))
        assert {name: said[name] for name in counts} == counts
        assert "everything is accounted for" in said
        version = str(status["model_version"])
        engines = data(page, f"{number}/engines", lambda found: found["version"] == [version])
        assert (engines["engine"], engines["state"]) == (["engine-0"], ["serving"])
        spans = data(page, f"{number}/sync", lambda found: "weights" in found["kind"])
        assert {"weights to explorer"} <= set(spans["who"])
        moved = [i for i, kind in enumerate(spans["kind"]) if kind == "weights"]
        assert all(spans["mb"][i] > 0 and spans["floor"][i] > 0 for i in moved)
        waits = data(page, f"{number}/waits", lambda found: found["who"] != [])
        assert "trainer" in waits["who"]
        ages = data(page, f"{number}/staleness", lambda found: found["age"] != [])
        assert sum(ages["all"]) == pytest.approx(1.0)


def test_a_finished_run_is_opened_from_its_directory(page: Any, tmp_path: Path) -> None:
    """By the command, in a process of its own; and it follows what is appended."""
    events = RunEvents("run")
    events.begin("", tmp_path, "name: job", began=time.time(), name="job", mode="both")
    monitor = Monitor(MonitorConfig(sinks=["jsonl"]), str(tmp_path), "trainer")
    for step in (1, 2, 3):
        monitor.log(step, {"actor/pg_loss": 1.0 / step})
    counts = {"scheduled": 8, "succeeded": 8}
    events.status({"state": "done", "step": 3, "total_steps": 3, "accounts": counts})
    words = ["view", str(tmp_path), "--no-browser"]
    command = [sys.executable, "-m", "trinity_dask", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            page.goto(process.stdout.readline().split()[1])
            name = "0/loss/actor/pg_loss"
            assert data(page, name, lambda found: found["x"] == [1, 2, 3])["y"][0] == 1.0
            shown = data(page, "0/accounts", lambda found: len(found["account"]) == 3)
            assert shown["account"] == ["scheduled", "succeeded", "everything is accounted for"]
            assert "train step 3 of 3" in data(page, "0/head", lambda text: "done" in text)
            monitor.log(4, {"actor/pg_loss": 0.25})
            data(page, name, lambda found: found["x"] == [1, 2, 3, 4])
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 130


def test_view_refuses_what_is_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path), "--no-browser"]) == 1
    assert f"{tmp_path} is no job's directory" in capsys.readouterr().err


def test_a_point_is_seen_soon_after_it_is_told(page: Any, client: Client, tmp_path: Path) -> None:
    teller = Teller(client, "soon", tmp_path)
    sees_points(page, url(client), teller)
    name = f"{number_of(url(client), 'soon')}/loss/actor/pg_loss"
    begun = time.monotonic()
    teller.step(3, actor__pg_loss=0.1)
    data(page, name, lambda found: found["x"][-1] == 3)
    assert time.monotonic() - begun < 10.0  # 0.5 s on an idle machine; see benchmarks/dashboard.py


def test_the_page_works_through_a_tunnel(page: Any, client: Client, tmp_path: Path) -> None:
    with tunnel(port_of(client)) as port:
        address = f"http://127.0.0.1:{port}/trinity"
        sees_points(page, address, Teller(client, "tunnel", tmp_path))


def test_the_page_works_behind_a_proxy(page: Any, client: Client, tmp_path: Path) -> None:
    prefix = f"user/joe/proxy/{port_of(client)}"
    with proxy(port_of(client), prefix) as port:
        address = f"http://127.0.0.1:{port}/{prefix}/trinity"
        sees_points(page, address, Teller(client, "proxy", tmp_path))
        page.get_by_text("configuration", exact=True).click()
        page.wait_for_url(f"http://127.0.0.1:{port}/{prefix}/trinity/config/*")
        assert page.inner_text("body") == "secret: '***'"


def test_the_page_works_under_the_scheduler_s_own_prefix(page: Any, tmp_path: Path) -> None:
    cluster, client = served(scheduler_kwargs={"http_prefix": "dask/here"})
    try:
        address = url(client, "dask/here/trinity")
        sees_points(page, address, Teller(client, "prefix", tmp_path))
        page.goto(address.replace("trinity", "status"))
        assert page.get_by_role("link", name="Trinity", exact=True).count() == 1
    finally:
        client.close()
        cluster.close()


def test_every_part_is_offered_to_jupyterlab(page: Any, client: Client, tmp_path: Path) -> None:
    Teller(client, "parts", tmp_path).step(1, actor__pg_loss=0.5)
    plugin.join(client)  # another run joins: nothing is there twice
    with urllib.request.urlopen(url(client, "individual-plots.json"), timeout=30) as answer:
        plots = json.load(answer)
    ours = {name: path for name, path in plots.items() if "Trinity" in name}
    assert {"Individual Trinity Reward", "Individual Trinity Accounts"} <= ours.keys()
    assert len(plots) > len(ours)
    for path in ours.values():
        with urllib.request.urlopen(url(client, path.strip("/")), timeout=30) as answer:
            assert answer.status == 200
    page.goto(url(client, "individual-trinity-loss"))
    number = number_of(url(client), "parts")
    data(page, f"{number}/loss/actor/pg_loss", lambda found: found["y"] == [0.5])


NASTY = [
    "<img src=x onerror=\"window.hacked='img'\">",
    "<script>window.hacked='script'</script>",
    "$$\\href{javascript:window.hacked='tex'}{x}$$",
    "\\(x\\) {{ hacked }} <%= window.hacked='template' %> @x{safe}",
    "\u202e right to left \x00 \x1b[31m",
]


@pytest.mark.parametrize("text", NASTY)
def test_hostile_texts_stay_texts(page: Any, client: Client, tmp_path: Path, text: str) -> None:
    teller = Teller(client, f"nasty{text}", tmp_path / "x", stage=text, name=text, mode=text)
    teller.step(1, **{f"eval__{text}__reward": 0.5, "actor__pg_loss": 1.0})
    status = {"state": text, "message": text, "n_stages": 2, "failures": {text: 3}}
    teller.status({**status, "accounts": {text: 1}})
    teller.engines({text: {"state": text, "version": 1}})
    span = {"what": "wait", "start": time.time(), "seconds": 1.0, "who": text, "awaited": text}
    teller.span(span)
    page.goto(url(client))
    number = number_of(url(client), teller.run_id)
    data(page, f"{number}/failures", lambda found: found["runs"] == [3])
    assert text in data(page, f"{number}/head", lambda said: True) or "\x00" in text
    frame = page.locator(".bk-CanvasPanel, .bk-Canvas").first
    frame.hover(timeout=1000 * WAIT_S)
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None


def test_a_foreign_page_opens_no_websocket(client: Client) -> None:
    async def connect(origin: str) -> int:
        address = f"ws://127.0.0.1:{port_of(client)}/trinity/ws"
        try:
            connection = await websocket_connect(HTTPRequest(address, headers={"Origin": origin}))
            connection.close()
            return 101
        except HTTPClientError as error:
            return error.code

    with on_a_loop() as loop:
        assert _done(loop, connect("http://evil.example")) == 403
        # with the right origin it fails later, for want of a token
        assert _done(loop, connect(f"http://127.0.0.1:{port_of(client)}")) != 403


def test_an_empty_scheduler_says_so(page: Any) -> None:
    cluster, client = served()
    try:
        page.goto(url(client))
        data(page, "nothing", lambda text: "No run has told anything yet" in text)
    finally:
        client.close()
        cluster.close()

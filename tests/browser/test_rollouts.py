"""The rollout viewer in a browser: every row found, opened, compared; and whatever a model wrote
stays text.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
import unicodedata
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from distributed import Client
from records_support import a_batch, a_job, commit, failed, trained
from telling import Teller, port_of, served, url
from ways import proxy, tunnel

from trinity_dask.config import save
from trinity_dask.config.schema import Config
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import to_table
from trinity_dask.records.layout import FAILED, FAILED_SCHEMA
from trinity_dask.records.writer import Recorder, entries

ROOT = Path(__file__).parents[2]
SHOWN = "[data-shown='{}']"
WAIT_S = 120.0
# nothing reaches out of where a row is shown
WITHIN = """() => { const place = document.getElementById("panes");
  return place.scrollWidth <= place.clientWidth && document.body.scrollWidth <= innerWidth; }"""
# texts that run, that hide, or that break what shows them, where it is careless
NASTY = [
    "<img src=x onerror=\"window.hacked='img'\">",
    "<script>window.hacked='script'</script>",
    "</div></body><svg onload=\"window.hacked='svg'\">",
    "<iframe srcdoc=\"<script>parent.hacked='iframe'</script>\"></iframe>",
    "<a href=\"javascript:window.hacked='link'\">click</a>",
    "<style>*{display:none}</style><link rel=stylesheet href=http://evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=http://evil.example'>",
    "<base href=http://evil.example/>",
    "' onmouseover='window.hacked=1' \" onmouseover=\"window.hacked=1",
    "$$\\href{javascript:window.hacked='tex'}{x}$$ \\(x\\) ${hacked} {{ hacked }} <%= hacked %>",
    "![x](http://evil.example/x.png) [x](javascript:window.hacked=1)",
    "\u202e right to left \u2066 isolate \u200b\u200d\ufeff zero width",
    "\x00 \x01 \x07 \x1b[31m red \x1b]0;title\x07 \x7f \x9b31m",
    "\r\rcarriage\r\nreturn\u2028line\u2029paragraph\x85next",
    "e" + "\u0301\u0337\u035c" * 300,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U000e0041\U000e0042 \ufffe \U0010ffff",
    "x" * 30_000,
    "\n" * 3000,
    "]]> <!-- --> <![CDATA[ ]] > &lt;img&gt; &#x3c;script&#x3e;",
    "\ufffd \ud7ff ../../etc/passwd %00 #row=x&pin=y __proto__ constructor",
]


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("viewer", ROOT / "benchmarks" / "viewer.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def viewing(*directories: Path) -> Iterator[str]:
    """The address of the viewer, by the command."""
    for directory in directories:
        (directory / "monitor").mkdir(exist_ok=True)
        (directory / "monitor" / "metrics.jsonl").touch()
    words = ["view", "--no-browser", *map(str, directories)]
    command = [sys.executable, "-m", "trinity_dask", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"{process.stdout.readline().split()[1]}/rollouts"
        finally:
            process.send_signal(signal.SIGINT)


def asked(address: str, call: str, job: Path, **rest: Any) -> Any:
    q = urllib.parse.quote(json.dumps({"job": str(job), **rest}))
    with urllib.request.urlopen(f"{address}/api/{call}?q={q}", timeout=WAIT_S) as answer:
        return json.load(answer)


def a_named_job(directory: Path) -> Config:
    directory.mkdir()
    return a_job(directory)


def shows(page: Any, total: int, at: int = 0) -> None:
    page.locator(f"body[data-shown='{at}/{total}']").wait_for()


def fill(page: Any, selector: str, text: str) -> None:
    field = page.locator(selector)
    field.fill(text)
    field.press("Enter")


def cells(page: Any, column: str) -> list[str]:
    """What the lines say in a column."""
    names = page.locator("#head .cell button").all_inner_texts()
    at = [name.rstrip(" ▲▼") for name in names].index(column)
    return [line.locator(".cell").nth(at).inner_text() for line in page.locator(".line").all()]


def opened(page: Any) -> str:
    page.locator("body[data-open]:not([data-open=''])").wait_for()
    return page.locator("body").get_attribute("data-open")


def test_rows_are_filtered_sorted_searched_and_opened(page: Any, tmp_path: Path) -> None:
    cfg = a_job(tmp_path)
    rows = a_batch(cfg, 1)
    a_batch(cfg, 2)
    Recorder(cfg).train_step(7, 0, 1, trained(rows, -0.25), rows.num_rows)
    with viewing(tmp_path) as address:
        page.goto(address)
        shows(page, 16)
        fill(page, "#head input[name=status]", "=trained")
        shows(page, 4)
        fill(page, "#head input[name=reward]", ">0")
        shows(page, 2)
        assert cells(page, "reward") == ["1", "1"]
        fill(page, "#head input[name=reward]", "much")
        page.get_by_text("'much' is no condition on numbers").wait_for()
        fill(page, "#head input[name=reward]", "")
        shows(page, 4)
        assert page.locator("#problem").is_hidden()
        page.locator("#head button", has_text="reward").click()
        page.locator("#head button", has_text="reward ▼").wait_for()
        page.wait_for_timeout(100)
        shows(page, 4)
        assert cells(page, "reward") == ["1", "1", "0", "0"]
        page.locator("#clear").click()
        shows(page, 16)
        fill(page, "#text", "no such thing")
        shows(page, 0)
        fill(page, "#text", "ANSWER 0")
        shows(page, 6)
        page.locator("#clear").click()
        shows(page, 16)
        page.locator(".line", has_text="failed").first.click()
        assert opened(page).startswith("rft:failed:")
        assert "ValueError: no" in page.locator("#panes").inner_text()
        assert "Traceback: line 3" in page.locator("#panes").text_content()
        page.keyboard.press("Escape")
        page.locator("#side").wait_for(state="hidden")


def test_a_token_says_what_is_recorded_of_it(page: Any, tmp_path: Path) -> None:
    cfg = a_job(tmp_path)
    rows = a_batch(cfg, 1)
    Recorder(cfg).train_step(7, 0, 1, trained(rows, -0.25), rows.num_rows)
    with viewing(tmp_path) as address:
        page.goto(f"{address}#colour=difference")
        shows(page, 8)
        page.locator(".line", has_text="trained").first.click()
        opened(page)
        tokens = page.locator(".tokens").last.locator("span[data-at]")
        assert tokens.all_inner_texts() == ["⟪2⟫", "⟪3⟫", "⟪4⟫", "⟪5⟫"]
        assert tokens.first.get_attribute("class") == "a3"  # 0.25 above, the most of this row
        tokens.nth(2).hover()
        told = page.locator("#token").inner_text()
        for fact in ("token 3 of the answer", "id 4", "logprob -0.5", "train_logprob -0.25"):
            assert fact in told
        assert "difference 0.25" in told
        assert "version -1" in told  # nobody sampled it
        page.locator(".tokens").last.focus()
        page.keyboard.press("ArrowRight")
        assert "token 4 of the answer" in page.locator("#token").inner_text()


def test_an_address_restores_what_was_looked_at(page: Any, tmp_path: Path) -> None:
    cfg = a_job(tmp_path)
    for batch in range(1, 60):
        a_batch(cfg, batch)
    with viewing(tmp_path) as address:
        page.goto(address)
        shows(page, 59 * 8)
        fill(page, "#head input[name=status]", "kept")
        shows(page, 59 * 4)
        fill(page, "#jump", "101")
        shows(page, 59 * 4, 100)
        page.locator("#head button", has_text="step").click()
        page.locator("#head button", has_text="step ▼").wait_for()
        fill(page, "#jump", "51")
        shows(page, 59 * 4, 50)
        page.locator(".line").nth(6).click()
        row = opened(page)
        page.locator("#colour").select_option("version")
        page.locator("#pin").click()
        steps, link = cells(page, "step"), page.url
        page.goto("about:blank")
        page.goto(link)
        shows(page, 59 * 4, 50)
        assert opened(page) == row
        assert page.locator("#colour").input_value() == "version"
        assert page.locator("#head input[name=status]").input_value() == "kept"
        assert cells(page, "step") == steps
        assert page.locator(".line.chosen").count() == 1
        page.keyboard.press("j")
        page.locator(f"body[data-open]:not([data-open='{row}'])").wait_for()
        page.locator("#pin").click()
        page.locator("#compare").click()
        page.locator("article").nth(1).wait_for()
        link = page.url
        page.goto("about:blank")
        page.goto(link)
        page.locator("article").nth(1).wait_for()
        assert opened(page).split(" ")[0] == row


def test_runs_of_a_task_stand_side_by_side_with_what_differs(page: Any, tmp_path: Path) -> None:
    rows = [
        Experience(
            np.array([1, 2, 3, last, 5]), prompt_length=2, eid=EID(1, 0, run), reward=float(run)
        )
        for run, last in enumerate((7, 8, 9))
    ]
    commit(a_job(tmp_path), 1, to_table(rows), step=1)
    with viewing(tmp_path) as address:
        page.goto(address)
        shows(page, 3)
        page.locator(".line").first.click()
        opened(page)
        page.locator("#group").click()
        page.locator("article").nth(2).wait_for()
        titles = page.locator("article h2").all_inner_texts()
        assert [title.split(" · ")[1] for title in titles] == ["run 2", "run 1", "run 0"]
        assert page.locator(".differs").all_inner_texts() == ["⟪8⟫", "⟪7⟫"]


def test_two_jobs_are_compared_at_the_same_prompt(page: Any, tmp_path: Path) -> None:
    for name, answer in (("one", 7), ("two", 8)):
        rows = [
            Experience(
                np.array([4, task, answer]),
                prompt_length=2,
                eid=EID(1, 5 - task if name == "two" else task, 0),
                prompt_text=f"task {task}",
            )
            for task in range(5)
        ]
        commit(a_named_job(tmp_path / name), 1, to_table(rows), step=1)
    with viewing(tmp_path / "one", tmp_path / "two") as address:
        page.goto(f"{address}#job={tmp_path}/one")
        shows(page, 5)
        page.locator(".line", has_text="task 3").click()
        opened(page)
        page.locator("#pin").click()
        page.locator("#same").click()
        shows(page, 1)
        page.locator("#job").select_option("two")
        shows(page, 1)
        assert cells(page, "prompt") == ["task 3"]
        page.locator(".line").click()
        opened(page)
        page.locator("#pin").click()
        page.locator("#compare").click()
        page.locator("article").nth(1).wait_for()
        answers = page.locator(".tokens span[data-at='0']").all_inner_texts()
        assert answers == ["⟪7⟫", "⟪8⟫"]


def a_tokenizer(directory: Path, pieces: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "x"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))


def a_nasty_job(directory: Path) -> Config:
    """Every field that a model, a user's code or a file may fill holds what it should not."""
    cfg = a_job(directory)
    cfg.model.model_path = str(directory)
    save(cfg, directory / "config.yaml")
    a_tokenizer(directory, NASTY)
    call = {"function": {"name": NASTY[0], "arguments": NASTY[1]}}
    rows = [
        Experience(
            np.arange(len(NASTY), dtype=np.int32),
            prompt_length=5,
            eid=EID(NASTY[i % 3], NASTY[2], i, suffix=f"{i}{NASTY[1]}"),
            reward=1.0,
            prompt_text=text,
            response_text=text,
            truncate_status=text,
            metrics={text: 1.0, "a": 0.5},
            info={"finish_reason": text, text: text},
            messages=[
                {"role": text, "content": text, "name": text},
                {"role": "assistant", "content": [{"text": text}], "tool_calls": [call]},
                {"role": "tool", "content": text, "reasoning_content": text},
            ],
            tools=[{"name": text}],
        )
        for i, text in enumerate(NASTY)
    ]
    plain = {"batch": "b", "batch_is_int": False, "task": NASTY[0], "task_is_int": False, "run": 0}
    wrong = [
        {**plain, "attempts": 1, "error": t, "traceback": t, "earlier": [t], "prompt_text": t}
        for t in NASTY
    ]
    told = Recorder(cfg).of_batch(
        FAILED, "b", lambda: pa.Table.from_pylist(wrong, schema=FAILED_SCHEMA), len(wrong)
    )
    assert failed(1).schema == FAILED_SCHEMA
    meta = {"explorer": NASTY[0], "step": 1, **entries({FAILED: told})}
    commit(cfg, "b", to_table(rows), **meta)
    Recorder(cfg).evaluation(1, 1, NASTY[0][:40], to_table(rows), len(rows))
    return cfg


def seen(text: str) -> str:
    """A text as it is to be seen: what cannot be seen is written out."""
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(
        f"\N{MATHEMATICAL LEFT ANGLE BRACKET}U+{ord(c):04X}\N{MATHEMATICAL RIGHT ANGLE BRACKET}"
        if unicodedata.category(c) in hidden and c not in "\n\t"
        else c
        for c in text
    )


def test_whatever_a_model_wrote_stays_text(page: Any, tmp_path: Path) -> None:
    a_nasty_job(tmp_path)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    with viewing(tmp_path) as address:
        page.goto(address)
        page.set_viewport_size({"width": 1800, "height": 1800})
        n = 3 * len(NASTY)
        shows(page, n)
        page.locator("#choose summary").click()
        for box in page.locator("#columns input").all():
            box.set_checked(True)
        page.locator("#choose summary").click()
        keys = [row["key"] for row in asked(address, "rows", tmp_path, **{"count": n})["rows"]]
        assert len(keys) == n
        for i, key in enumerate(keys):
            page.evaluate("(key) => { location.hash = '#row=' + encodeURIComponent(key) }", key)
            page.wait_for_function("(key) => document.body.dataset.open === key", arg=key)
            page.evaluate(
                "document.querySelectorAll('#panes details').forEach((d) => d.open = true)"
            )
            text = page.locator("#panes").text_content()
            assert seen(NASTY[i % len(NASTY)]) in text
            assert "\u202e" not in page.locator("body").text_content()
            assert page.evaluate(WITHIN)
        page.locator(".tokens span[data-at]").nth(9).hover()
        page.locator("#group").click()
        page.locator("article").nth(1).wait_for()
        assert page.evaluate("window.hacked") is None
        assert (
            page.locator("#panes :is(img, script, iframe, svg, link, style, meta, a)").count() == 0
        )
        assert page.evaluate("document.title") == "Trinity: rollouts"
    assert dialogs == []


def test_only_known_jobs_are_read_and_nothing_foreign_is_loaded(tmp_path: Path) -> None:
    a_batch(a_named_job(tmp_path / "known"), 1)
    a_batch(a_named_job(tmp_path / "other"), 1)
    with viewing(tmp_path / "known") as address:

        def status(path: str) -> int:
            try:
                with urllib.request.urlopen(f"{address}{path}", timeout=WAIT_S) as answer:
                    return answer.status
            except urllib.error.HTTPError as error:
                return error.code

        def question(**asked: Any) -> str:
            return f"/api/rows?q={urllib.parse.quote(json.dumps(asked))}"

        assert status(question(job=f"{tmp_path}/known")) == 200
        assert status(question(job=f"{tmp_path}/other")) == 404
        assert status(question(job=f"{tmp_path}/known/../other")) == 404
        same = {"same": [f"{tmp_path}/other", "rft:kept:x:0"]}
        assert status(question(job=f"{tmp_path}/known", query=same)) == 404
        assert status(question(job=f"{tmp_path}/known", query={"same": 5})) in (400, 404)
        for path in ("/api/rows?q=[]", "/api/rows?q={", f"/api/rows?q={'x' * 20_000}"):
            assert status(path) == 400
        for path in (
            "/static/../routes.py",
            "/static/..%2froutes.py",
            "/api/close",
            "/static/x.py",
        ):
            assert status(path) in (403, 404)
        with urllib.request.urlopen(address, timeout=WAIT_S) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    cluster, client = served()
    yield client
    client.close()
    cluster.close()


def test_a_live_run_s_rows_appear_as_they_are_committed(
    page: Any, client: Client, tmp_path: Path
) -> None:
    cfg = a_job(tmp_path)
    a_batch(cfg, 1)
    Teller(client, "live", tmp_path, name="live").step(1, actor__pg_loss=0.5)
    page.goto(url(client))
    page.get_by_role("link", name="rollouts", exact=True).first.click()
    shows(page, 8)
    a_batch(cfg, 2)
    shows(page, 16)


def test_it_works_through_a_tunnel_and_behind_a_proxy(
    page: Any, client: Client, tmp_path: Path
) -> None:
    a_batch(a_job(tmp_path), 1)
    Teller(client, "ways", tmp_path, name="ways").step(1, actor__pg_loss=0.5)
    there = f"#job={urllib.parse.quote(str(tmp_path))}"
    with tunnel(port_of(client)) as port:
        page.goto(f"http://127.0.0.1:{port}/trinity/rollouts{there}")
        shows(page, 8)
    prefix = f"user/joe/proxy/{port_of(client)}"
    with proxy(port_of(client), prefix) as port:
        page.goto(f"http://127.0.0.1:{port}/{prefix}/trinity/rollouts{there}")
        shows(page, 8)
        page.locator(".line").first.click()
        assert opened(page)


def test_the_reader_ends_with_the_scheduler(tmp_path: Path) -> None:
    a_batch(a_job(tmp_path), 1)
    cluster, client = served()
    try:
        Teller(client, "short", tmp_path, name="short").step(1, actor__pg_loss=0.5)
        address = url(client, "trinity/rollouts")
        deadline = time.monotonic() + WAIT_S
        while not json.load(urllib.request.urlopen(f"{address}/api/jobs"))["jobs"]:
            assert time.monotonic() < deadline
        assert asked(address, "state", tmp_path)["rows"] == 8
        readers = [
            process
            for process in psutil.Process().children(recursive=True)
            if "trinity_dask.view.child" in process.cmdline()
        ]
        assert readers
    finally:
        client.close()
        cluster.close()
    _, alive = psutil.wait_procs(readers[-1:], timeout=WAIT_S)
    assert alive == []


@pytest.mark.timeout(600)
def test_a_million_rows(page: Any, tmp_path: Path) -> None:
    """The best of several: what other work on this machine does is not the viewer's."""
    viewer, total = benchmark(), 1_000_000
    viewer.make_job(tmp_path / "many", total)
    server = viewer.Server(tmp_path / "many")
    try:
        page.goto(server.link)
        shows(page, total)
        places = np.random.default_rng(1).integers(0, total - 100, 12).tolist()
        jumps = [viewer.jump(page, place, total) for place in places]
        opens = [viewer.opened(page, 4 + i) for i in range(12)]
        fill(page, "#jump", str(total))
        page.locator(".line").last.click()
        assert opened(page).rpartition(":")[2] == str((total - 1) % viewer.BATCH)
        memory = server.memory()
    finally:
        server.close()
    assert sorted(jumps)[3] <= 150
    assert sorted(opens)[3] <= 150
    assert np.percentile(server.delays, 90) <= 0.05
    assert memory <= 300

"""What the rollout viewer costs on a job of a million rows, in a real Chromium.

A job is written as an explorer leaves one (Arrow files of a batch each, with their manifests,
texts, log-probs and versions), `trinity-dask view` serves it, and a browser looks at it: the time
until every file is read, jumps to anywhere, a row opened, a sort, a search through all texts, tasks
whose reward fell. The times of a jump and of an opened row are those that the page sees, from the
event to the drawn line. Memory is that of the server and its reader together (PSS: what is shared
counts once, mapped files by what is resident). While all this goes on, the server is asked fifty
times a second for a small file: the time of an answer bounds the delay of its loop.

    python benchmarks/viewer.py [--rows 1000000]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.config import save
from trinity_dask.config.schema import Config
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import to_table

RESULT = Path(__file__).parent / "results" / "viewer.json"
BATCH, RUNS, PROMPTS = 4096, 8, 4000
WORDS = ("so", "we", "add", "the", "two", "digits", "and", "carry", "one", "then", "write", "it")
ENDS = ("", "_p95", "_most")
SHOWN = "document.body.dataset.shown"


def make_job(directory: Path, rows: int) -> Path:
    """A job of ``rows`` rows in ``directory``, about 800 bytes each."""
    config = Config(job_dir=str(directory), name=directory.name)
    store_path = f"{directory}/buffer/experience"
    config.buffer.trainer_input.experience_buffer.path = store_path
    (directory / "monitor").mkdir(parents=True)
    (directory / "monitor" / "metrics.jsonl").write_text("")
    save(config, directory / "config.yaml")
    store, random = ExperienceStore(store_path, {}), np.random.default_rng(0)
    template = to_table([_experience(i, random) for i in range(BATCH)])
    for batch, start in enumerate(range(0, rows, BATCH), 1):
        n = min(BATCH, rows - start)
        store.commit(batch, _of_batch(template, batch, n, random), {"step": batch})
    return directory


def _experience(at: int, random: np.random.Generator) -> Experience:
    n = int(random.integers(10, 70))
    text = " ".join(random.choice(WORDS, n // 2))
    return Experience(
        random.integers(0, 100, n + 12, dtype=np.int32),
        prompt_length=12,
        eid=EID(0, at // RUNS, at % RUNS),
        reward=float(random.integers(0, 2)),
        logprobs=-random.exponential(1.0, n).astype(np.float32),
        versions=np.zeros(n, np.int32),
        info={"finish_reason": "stop"},
        metrics={"accuracy": float(random.integers(0, 2)), "format": 1.0},
        prompt_text=f"What is {at // RUNS} plus {at % 97}?",
        response_text=text,
    )


def _of_batch(template: pa.Table, batch: int, n: int, random: np.random.Generator) -> pa.Table:
    """The template's rows as those of another batch, with other rewards and prompts."""
    table = template.slice(0, n)
    prompts = [f"What is {(batch * 512 + i // RUNS) % PROMPTS} plus 3?" for i in range(n)]
    for name, values in {
        "batch": pa.array([str(batch)] * n),
        "batch_is_int": pa.array([True] * n),
        "reward": pa.array(random.integers(0, 2, n).astype(np.float64)),
        "prompt_text": pa.array(prompts),
    }.items():
        at = table.column_names.index(name)
        table = table.set_column(at, table.schema.field(name), values)
    return table


class Server:
    """``trinity-dask view`` of one job, and how long its loop keeps a request waiting."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trinity_dask", "view", "--no-browser", str(directory)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.link = f"{self.process.stdout.readline().split()[1]}/rollouts"
        self.delays: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            began = time.perf_counter()
            with urllib.request.urlopen(f"{self.link}/static/state.js", timeout=60) as answer:
                answer.read()
            self.delays.append(time.perf_counter() - began)

    def memory(self) -> float:
        """MB of the server and its children (PSS)."""
        own = psutil.Process(self.process.pid)
        everyone = [own, *own.children(recursive=True)]
        return sum(process.memory_full_info().pss for process in everyone) / 1e6

    def close(self) -> None:
        self._ended.set()
        self._thread.join(60)
        self.process.terminate()
        self.process.wait(60)


def state_of(link: str, directory: Path) -> dict[str, Any]:
    asked = urllib.parse.quote(json.dumps({"job": str(directory)}))
    with urllib.request.urlopen(f"{link}/api/state?q={asked}", timeout=60) as answer:
        return json.load(answer)


def timed(page: Any, script: str, ready: str, limit_s: float = 60.0) -> float:
    """Milliseconds from ``script`` until ``ready``, as the page's own clock sees them."""
    return page.evaluate(
        f"""() => new Promise((done, fail) => {{
          const began = performance.now();
          {script};
          const look = () => {ready} ? done(performance.now() - began)
            : performance.now() - began > {limit_s * 1000} ? fail(new Error("not ready"))
            : requestAnimationFrame(look);
          requestAnimationFrame(look);
        }})"""
    )


def jump(page: Any, place: int, total: int) -> float:
    """Milliseconds of a jump to a row by its number."""
    script = (
        f"const to = document.getElementById('jump'); to.value = {place + 1};"
        "to.dispatchEvent(new Event('change'))"
    )
    return timed(page, script, f"{SHOWN} === '{place}/{total}'")


def opened(page: Any, at: int) -> float:
    """Milliseconds until the row of a line is shown, its tokens and all."""
    page.evaluate("document.body.dataset.open = ''")
    script = f"document.querySelectorAll('.line')[{at}].click()"
    return timed(page, script, "document.body.dataset.open !== ''")


def set_to(page: Any, field: str, value: str, ready: str) -> float:
    """Milliseconds from a change of a field until the table is as it should be."""
    script = (
        f"const field = document.{field}; field.value = '{value}';"
        "field.dispatchEvent(new Event('change'))"
    )
    return timed(page, script, ready)


def measure(directory: Path, rows: int, jumps: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    server = Server(directory)
    result: dict[str, Any] = {"rows": rows}
    try:
        with sync_playwright() as api:
            browser = api.chromium.launch(executable_path=shutil.which("chromium"))
            context = browser.new_context(viewport={"width": 1500, "height": 900}, bypass_csp=True)
            page = context.new_page()
            began = time.perf_counter()
            page.goto(server.link)
            page.locator(".line").first.wait_for()
            result["first_line_s"] = round(time.perf_counter() - began, 2)
            while (told := state_of(server.link, directory))["left"] or told["rows"] < rows:
                time.sleep(0.05)
            result["all_read_s"] = round(time.perf_counter() - began, 2)
            page.wait_for_function(f"{SHOWN}.endsWith('/{rows}')")
            places = np.random.default_rng(1).integers(0, rows - 100, jumps).tolist()
            result |= _spread("jump_ms", [jump(page, place, rows) for place in places])
            result |= _spread("open_ms", [opened(page, 4 + i % 20) for i in range(jumps)])
            result["memory_mb"] = round(server.memory())
            whole = f"{SHOWN} === '0/{rows}'"
            page.evaluate("document.getElementById('jump').value = ''")
            sort = "document.querySelectorAll('#head button')[4].click()"
            result["sort_ms"] = round(timed(page, sort, whole), 1)
            looked = "!document.getElementById('count').textContent.includes('looked')"
            found = f"{SHOWN} !== '' && !{SHOWN}.endsWith('/{rows}') && {looked}"
            search = set_to(page, "getElementById('text')", "carry one then write", found)
            result["search_s"] = round(search / 1e3, 1)
            page.evaluate("document.getElementById('clear').click()")
            page.wait_for_function(whole)
            fell = set_to(page, "getElementById('since')", str(rows // BATCH // 2), found)
            result["fell_s"] = round(fell / 1e3, 1)
            result["memory_after_mb"] = round(server.memory())
            browser.close()
        result |= _spread("loop_ms", [1e3 * delay for delay in server.delays])
    finally:
        server.close()
    return result


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {
        name: round(statistics.median(values), 1),
        f"{name}_p95": round(float(np.percentile(values, 95)), 1),
        f"{name}_most": round(max(values), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--jumps", type=int, default=20)
    parser.add_argument("--job", type=Path, help="where to make it, or where it is; it is kept")
    parser.add_argument("--smoke", action="store_true", help="a small job; nothing is saved")
    flags = parser.parse_args()
    if flags.smoke:
        flags.rows, flags.jumps = 20_000, 3
    with tempfile.TemporaryDirectory() as root:
        directory = flags.job or Path(root, "many")
        if not directory.exists():
            make_job(directory, flags.rows)
        result = measure(directory, flags.rows, flags.jumps)
    if not flags.smoke:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print("| | median | 95 % | most |\n|---|---|---|---|")
    for title, name in (("jump", "jump_ms"), ("row opened", "open_ms"), ("loop", "loop_ms")):
        print(f"| {title}, ms | {' | '.join(str(result[name + end]) for end in ENDS)} |")
    for name in [n for n in result if not n.startswith(("jump", "open", "loop"))]:
        print(f"| {name} | {result[name]} | | |")


if __name__ == "__main__":
    main()

"""Makes the pictures of the documentation: real pages of a real run, in the machine's Chromium.

    python docs/make_screenshots.py [name ...]

Invariant: every picture is of one job, the demo's miniature, which is run for it in a temporary
directory; each is below ``MAX_BYTES``.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application

IMAGES = Path(__file__).parent / "images"
MAX_BYTES = 200_000
STEPS = 60
JOB = (
    "+experiment=sort_digits_tiny",
    "engine=torch",
    "name=demo",
    "monitor.sinks=[jsonl]",
    "monitor.curves=false",
    f"stages.1.trainer.total_steps={STEPS}",
    f"stages.1.buffer.total_steps={STEPS}",
    "+stages.1.synchronizer.sync_style=fully_async",
    "+stages.1.synchronizer.max_staleness=4",
    "+stages.1.explorer.max_inflight_batches=4",
)


def run_job(root: Path) -> Path:
    """The directory of a finished run of the demo's miniature."""
    from trinity_dask import Run, load_config

    with Run(load_config(*JOB, f"checkpoint_root_dir={root}")) as run:
        run.wait(600)
    return Path(run.base_dir)


@contextmanager
def served(make: Callable[[], Application]) -> Iterator[str]:
    """The address of an application, which is made and served on a loop of its own."""
    ready, address, loops = threading.Event(), list[str](), list[asyncio.AbstractEventLoop]()

    def serve() -> None:
        async def start() -> None:
            application, sockets = make(), bind_sockets(0, "127.0.0.1")
            HTTPServer(application).add_sockets(sockets)
            address.append(f"http://127.0.0.1:{sockets[0].getsockname()[1]}")
            ready.set()

        loop = asyncio.new_event_loop()
        loops.append(loop)
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    if not ready.wait(60):
        raise TimeoutError("the page was not served within a minute")
    try:
        yield address[0]
    finally:
        loops[0].call_soon_threadsafe(loops[0].stop)
        thread.join(10)


def dashboard(browser: Any, job: Path) -> bytes:
    """The page /trinity of the finished job."""

    def pages() -> Application:
        from tornado.ioloop import IOLoop

        from trinity_dask.dashboard.offline import application

        made = application([job])
        made.initialize(IOLoop.current())
        made.start()
        return made

    with served(pages) as address:
        page = browser.new_page(viewport={"width": 1500, "height": 1180})
        page.goto(f"{address}/trinity")
        page.get_by_text("Accounts", exact=True).wait_for()
        page.wait_for_function("Bokeh.documents.every((doc) => doc.is_idle)")
        page.wait_for_timeout(1000)  # figures are drawn after the document is idle
        return page.screenshot()


def rollouts(browser: Any, job: Path) -> bytes:
    """The rollout viewer of the finished job: its table, and the runs of a task side by side."""

    def pages() -> Application:
        from trinity_dask.dashboard.offline import application

        return application([job])

    with served(pages) as address:
        page = browser.new_page(viewport={"width": 1500, "height": 620})
        asked = "w.stage=grpo&w.step=2..9&sort=reward&down=1&colour=difference"
        page.goto(f"{address}/trinity/rollouts#{asked}")
        page.locator("body[data-shown^='0/']").wait_for()
        page.locator(".line").nth(2).click()
        page.locator("body[data-open]:not([data-open=''])").wait_for()
        page.locator("#group").click()
        page.locator("article").nth(2).wait_for()
        page.locator("article").nth(1).locator(".tokens span[data-at='1']").hover()
        return page.screenshot()


# by the name of the file; each is given the browser and the directory of the job
PICTURES: dict[str, Callable[[Any, Path], bytes]] = {"dashboard": dashboard, "rollouts": rollouts}


def save(name: str, picture: bytes) -> None:
    """Write it with as few colours as it needs. Raises ValueError: it is still too large."""
    from PIL import Image

    path = IMAGES / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(128).save(path, optimize=True)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes; at most {MAX_BYTES} are wanted")
    print(f"{path}: {size} bytes")


def main(names: list[str]) -> None:
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        sys.exit("no chromium here: apt-get install --no-install-recommends chromium")
    with tempfile.TemporaryDirectory() as root:
        job = run_job(Path(root) / "runs")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program)
            for name in names or PICTURES:
                save(name, PICTURES[name](browser, job))
            browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])

"""``trinity-dask view``: jobs in their directories, looked at in the browser, and their rows.

Invariant: the directories are only read, and the pages are served on the loopback device only. What
a job appends is seen a second later, so a job that runs elsewhere can be watched by its directory.
"""

from __future__ import annotations

import argparse
import asyncio
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trinity_dask.cli import CommandError

if TYPE_CHECKING:
    from bokeh.server.tornado import BokehTornado

HOST = "127.0.0.1"
MAX_FOUND = 10  # jobs that are shown when none is named


def main(args: Sequence[str]) -> int:
    """Serve until interrupted."""
    flags = _parser().parse_args(list(args))
    directories = [Path(name).expanduser().resolve() for name in flags.job_dirs] or _newest()
    _require_jobs(directories)
    try:
        asyncio.run(_serve(directories, flags.port, not flags.no_browser))
    except OSError as error:
        raise CommandError(f"--port={flags.port}: {error.strerror}") from error
    return 0


def _newest() -> list[Path]:
    """The jobs below the default of ``checkpoint_root_dir`` that were written to last."""
    from trinity_dask.config.schema import Config
    from trinity_dask.dashboard.offline import stages_of

    root = Path(Config().checkpoint_root_dir)
    found = {path.parent for path in root.glob("*/**/run.lock") if stages_of(path.parent)}
    if not found:
        raise CommandError(f"no job is below {root.resolve()}; name the directory of one")
    newest = sorted(found, key=lambda path: -path.stat().st_mtime)[:MAX_FOUND]
    return [path.resolve() for path in newest]


def _require_jobs(directories: Sequence[Path]) -> None:
    from trinity_dask.dashboard.offline import stages_of

    for directory in directories:
        if not stages_of(directory):
            raise CommandError(
                f"{directory} is no job's directory: there is no monitor/ in it, nor in a stage "
                "below it. A run prints where it wrote; jobs lie at "
                "<checkpoint_root_dir>/<project>/<group>/<name>"
            )


async def _serve(directories: Sequence[Path], port: int, opens: bool) -> None:
    from tornado.httpserver import HTTPServer
    from tornado.ioloop import IOLoop
    from tornado.netutil import bind_sockets

    from trinity_dask.dashboard.offline import application
    from trinity_dask.dashboard.plugin import PAGE

    (socket,) = bind_sockets(port, HOST)
    pages: BokehTornado = application(directories)
    server = HTTPServer(pages)
    server.add_sockets([socket])
    pages.initialize(IOLoop.current())
    pages.start()
    link = f"http://{HOST}:{socket.getsockname()[1]}/{PAGE}"
    print(f"view: {link}\nrollouts: {link}/rollouts\nCtrl-C ends it", flush=True)
    if opens:
        await asyncio.to_thread(webbrowser.open, link)
    try:
        await asyncio.Event().wait()
    finally:
        pages.stop()
        server.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask view", description=__doc__)
    help_ = "of a job or of a stage; none: the newest below ./runs"
    parser.add_argument("job_dirs", nargs="*", metavar="JOB_DIR", help=help_)
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    return parser

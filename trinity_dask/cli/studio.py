"""``trinity-dask studio``: make a configuration in the browser, check it, run it.

Invariant: the page is served on the loopback device only, to whoever has the printed link. A run
that was started there goes on when the page's process ends.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from trinity_dask.cli import CommandError


def main(args: Sequence[str]) -> int:
    """Serve until interrupted."""
    flags = _parser().parse_intermixed_args(list(args))
    try:
        asyncio.run(_serve(flags))
    except OSError as error:
        raise CommandError(f"--port={flags.port}: {error.strerror}") from error
    return 0


async def _serve(flags: argparse.Namespace) -> None:
    from trinity_dask.studio.server import Server

    directory = Path(flags.directory).expanduser().resolve()
    server = Server(tuple(flags.presets), directory, flags.port)
    print(f"studio: {server.link}\nfiles:  {directory}\nCtrl-C ends it", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        server.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask studio", description=__doc__)
    parser.add_argument("presets", nargs="*", help="to begin with: +experiment=... engine=...")
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument(
        "--directory", "-d", default="./studio", help="where files and run.log are written"
    )
    return parser

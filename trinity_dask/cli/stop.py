"""``trinity-dask stop``: end a run on a scheduler, also one whose driver is gone.

Invariant: the run saves its state as after Ctrl-C; the command returns when it has ended, or
fails when it has not within the time given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trinity_dask.cli import CommandError
from trinity_dask.cli.status import attached


def main(args: Sequence[str]) -> int:
    flags = _parser().parse_args(list(args))
    with attached(flags.address, flags.name) as run:
        run.stop("stopped by command")
        try:
            run.wait(flags.timeout_s)
        except TimeoutError as error:
            raise CommandError(
                f"{run.run_id} has not ended after {flags.timeout_s:g} s: {error}"
            ) from error
        print(f"run {run.run_id} has ended; its state is in {run.base_dir}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask stop", description=__doc__)
    parser.add_argument("address", help="job directory, or the scheduler, as tcp://host:8786")
    parser.add_argument("--name", help="job name or run id, when an address has several runs")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="seconds to wait for it")
    return parser

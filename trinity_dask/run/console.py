"""A run on the command line: progress, signals, the final tables, the exit code.

Invariant: the exit code is 0 only for a run that ended ``done``; the first Ctrl-C (or
SIGTERM) asks the run to save its state and exits 130, a second one does not wait for it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Optional

from trinity_dask.config import Config, ConfigError
from trinity_dask.run.session import Run

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
EXIT_CODES = {"done": EXIT_DONE, "failed": EXIT_FAILED, "interrupted": EXIT_INTERRUPTED}
REFRESH_S = 1.0


class _Interrupts:
    """Counts SIGINT and SIGTERM; the first stops the run, the second gives up waiting."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.count = 0

    def __call__(self, number: int, frame: Optional[FrameType]) -> None:
        self.count += 1
        name = signal.Signals(number).name
        if self.count == 1:
            print(f"\n{name}: saving the state; once more to leave without it", file=sys.stderr)
            # a handler must not block: the call goes over the network
            threading.Thread(target=self.run.stop, args=(f"interrupted by {name}",)).start()


@contextmanager
def _handled(interrupts: _Interrupts) -> Iterator[None]:
    before = {s: signal.signal(s, interrupts) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_from_cli(cfg: Config, overrides: Any = ()) -> int:
    """Run ``cfg`` to its end and return the exit code (0, 1 or 130)."""
    from trinity_dask.monitor.progress import Progress

    run = Run(cfg)
    interrupts = _Interrupts(run)
    with _handled(interrupts):
        run.start()
        with Progress(run.cfg.monitor.progress) as progress:
            status = _follow(run, interrupts, progress)
        run.close()
    return _finish(run, status, interrupts)


def _follow(run: Run, interrupts: _Interrupts, progress: Any) -> dict[str, Any]:
    status = run.status
    while status["state"] not in EXIT_CODES:
        if interrupts.count > 1:
            return {**status, "state": "interrupted", "message": "left without waiting"}
        status = run.wait_for_change(int(status["version"]), REFRESH_S)
        progress.update({**status, "dashboard": run.dashboard_link})
    return status


def _finish(run: Run, status: dict[str, Any], interrupts: _Interrupts) -> int:
    code = _exit_code(run, status)
    if status.get("stage") or code == EXIT_DONE:  # a run that never began has nothing to show
        _print_results(run)
    if status.get("accounts"):
        print("accounts: " + ", ".join(f"{k} {v}" for k, v in status["accounts"].items()))
    if code == EXIT_DONE and status.get("message"):
        print(status["message"])
    if code not in (EXIT_DONE, EXIT_INTERRUPTED):
        print(f"error: {status.get('message')}", file=sys.stderr)
    if code == EXIT_FAILED and status.get("stage"):
        print(f"logs: {run.base_dir}/log; the same command resumes", file=sys.stderr)
    return code


def _print_results(run: Run) -> None:
    """What a benchmark found, or else what the job did and where everything is."""
    from rich.console import Console

    from trinity_dask.monitor.report import bench_table, build_report, print_report

    if run.cfg.mode != "bench":
        print_report(build_report(run.base_dir))
        return
    table = bench_table(run.base_dir)
    if table is not None:
        Console(highlight=False).print(table)
    print(f"results: {run.base_dir}/**/benchmark_meta.json")


def _exit_code(run: Run, status: dict[str, Any]) -> int:
    if isinstance(run.error, ConfigError):
        return ConfigError.exit_code
    return EXIT_CODES[status["state"]]

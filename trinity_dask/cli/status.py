"""``trinity-dask status``: a live run by its scheduler's address, or a job by its directory.

Invariant: looking changes nothing; of a directory only what is committed is counted.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.cli import CommandError
from trinity_dask.cli.jobs import best_column, saved_stages
from trinity_dask.config.schema import Config
from trinity_dask.run.joining import WHERE

if TYPE_CHECKING:
    from trinity_dask.run import Run

_ADDRESS = re.compile(r"([a-z]+://)?[\w.\-\[\]:]+:\d+")
CONNECT_TIMEOUT_S = 10.0
LOOK_S = 3.0  # for the run of a directory, which may be over


def main(args: Sequence[str]) -> int:
    flags = _parser().parse_args(list(args))
    if not Path(flags.target).is_dir() and _ADDRESS.fullmatch(flags.target):
        lines = live_lines(flags.target, flags.name, CONNECT_TIMEOUT_S)
    else:
        lines = [line for stage in saved_stages(flags.target) for line in stage_lines(stage)]
        if (Path(flags.target) / WHERE).exists():
            try:
                lines = live_lines(flags.target, flags.name, LOOK_S) + lines
            except CommandError:
                lines.insert(0, "not running: nobody answers where its newest run was")
    print("\n".join(lines))
    return 0


def live_lines(target: str, name: Optional[str], timeout_s: float) -> list[str]:
    """What the run at an address, or of a directory, says of itself. Raises as :func:`attached`."""
    with attached(target, name, timeout_s) as run:
        status = run.wait_for_change(0, timeout_s)
        return [f"run {run.run_id} in {run.base_dir}", *status_lines(status)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask status", description=__doc__)
    parser.add_argument("target", help="job directory, or address as tcp://host:8786")
    parser.add_argument("--name", help="job name or run id, when an address has several runs")
    return parser


@contextmanager
def attached(
    address: str, name: Optional[str], timeout_s: float = CONNECT_TIMEOUT_S
) -> Iterator[Run]:
    """The live run at ``address``, or of the directory; it is left running.

    Raises:
        CommandError: nobody answers there, or there is no such run.
    """
    import dask

    from trinity_dask.run import Run

    try:
        with dask.config.set({"distributed.comm.timeouts.connect": f"{timeout_s}s"}):
            run = Run.attach(address, name)
    except (OSError, LookupError) as error:
        raise CommandError(f"{address}: {error}") from error
    try:
        yield run
    finally:
        run.close()


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """``key: value``, one per line, nested mappings in one line; empty values left out."""
    lines = []
    for key, value in status.items():
        if key == "runners":
            value = len(value) or None
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {item}" for name, item in value.items())
        if value not in (None, ""):
            lines.append(f"  {key}: {value}")
    return lines


def stage_lines(stage: Config) -> Iterator[str]:
    """What one stage has on disk: steps, committed batches, checkpoint, last metrics."""
    from trinity_dask.monitor.history import load_metrics
    from trinity_dask.trainer.checkpoints.checkpoint import latest_complete

    yield f"{stage.stage_name or stage.name}: mode {stage.mode}, in {stage.job_dir}"
    yield from _store_lines(stage)
    newest = latest_complete(str(stage.job_dir))
    yield f"  checkpoint: {newest.name if newest else 'none yet'}"
    frame = load_metrics(str(stage.job_dir))
    for role, rows in frame.groupby("role"):
        yield f"  {role}: step {int(rows['step'].max())}"
    best = best_column([str(column) for column in frame.columns])
    if best is not None:
        values = frame[best].dropna()
        yield f"  {best}: {values.iloc[0]:.3f} at first, {values.iloc[-1]:.3f} now"


def _store_lines(stage: Config) -> Iterator[str]:
    from trinity_dask.buffer.store.experience_store import ExperienceStore
    from trinity_dask.launcher.accounts import BatchAccounts

    buffer = stage.buffer.trainer_input.experience_buffer
    if stage.mode == "train" or buffer.storage_type != "store" or not buffer.path:
        return
    total, batches = BatchAccounts(), 0
    for manifest in ExperienceStore(buffer.path, buffer.storage_options).manifests():
        total, batches = total + BatchAccounts.from_meta(manifest.meta), batches + 1
    yield (
        f"  batches: {batches} committed; runs: {total.scheduled} scheduled, "
        f"{total.succeeded} succeeded, {total.failed} failed, {total.cancelled} cancelled; "
        f"rows: {total.produced} produced, {total.committed} committed, {total.filtered} filtered"
    )

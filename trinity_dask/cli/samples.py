"""``trinity-dask samples``: what the model answered, what it earned, what failed and was dropped.

Invariant: only reads; works while the run goes on. What a model wrote is shown as text: nothing in
it is markup, and control characters are written out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.cli import CommandError
from trinity_dask.cli.jobs import saved_stages
from trinity_dask.config.schema import Config
from trinity_dask.run.trace import visible

if TYPE_CHECKING:
    import pandas as pd
    from rich.text import Text

_ANSWER = ("prompt_text", "response_text", "reward", "truncate_status")
_COLUMNS = {
    "failed": ("group", "run", "attempts", "error", "earlier", "prompt_text", "traceback"),
    "filtered": ("group", "run", *_ANSWER, "operator", "reason"),
    "eval": ("eval", "group", "run", *_ANSWER, "version_max"),
}
_LONG = ("prompt_text", "response_text", "traceback")  # below a row's other values


def main(args: Sequence[str]) -> int:
    flags = _parser().parse_args(list(args))
    from trinity_dask.run.results import load_samples

    stages = saved_stages(flags.job_dir)
    kind = flags.kind or "kept"
    step = flags.step if flags.step is not None else last_step(stages, flags.stage, kind)
    which = {flags.kind: True} if flags.kind else {}
    try:
        frame = load_samples(stages, step, flags.stage, group=flags.group, **which)
    except LookupError as error:
        raise CommandError(f"{flags.job_dir}: {error}") from error
    rows = shown(frame, flags.n, flags.best, _COLUMNS.get(kind, _ANSWER))
    if flags.json or not sys.stdout.isatty():
        for row in rows:
            print(json.dumps({"step": step, **row}, ensure_ascii=False))
        return 0
    from rich.console import Console

    console = Console()
    console.print(f"step {step}: {len(rows)} of {len(frame)} rows", markup=False)
    for row in rows:
        console.print(readable(row))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask samples", description=__doc__)
    parser.add_argument("job_dir", help="directory of a job or of one stage")
    parser.add_argument("--step", type=int, help="explorer step; default the last committed")
    parser.add_argument("--stage", help="name of the stage; default the last with that batch")
    parser.add_argument("--group", help="the runs of one task: batch/task, or the task's id")
    for kind, text in (
        ("failed", "runs that failed, with their errors"),
        ("filtered", "rows that operators dropped, and why"),
        ("eval", "answers of the evaluation at that step"),
    ):
        parser.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=text)
    parser.add_argument("-n", type=int, default=8, help="how many (default 8)")
    parser.add_argument("--best", action="store_true", help="those with the highest reward")
    parser.add_argument("--json", action="store_true", help="JSON lines, as where no terminal is")
    return parser


def last_step(stages: Sequence[Config], stage: Optional[str], kind: str = "kept") -> int:
    """The last step at which any of the stages has committed a batch (``eval``: was evaluated).

    Raises:
        CommandError: there is none.
    """
    from trinity_dask.run.results import stage_sources, steps_of

    for source in stage_sources(stages, stage):
        if steps := steps_of(source, [kind]):
            return max(steps)
    none = "no evaluation is recorded" if kind == "eval" else "no batch has been committed"
    raise CommandError(f"{none} yet")


def shown(
    frame: pd.DataFrame, n: int, best: bool, columns: Sequence[str] = _ANSWER
) -> list[dict[str, Any]]:
    """The first ``n`` rows (or those of the highest reward) as plain dictionaries."""
    rows = frame.sort_values("reward", ascending=False, kind="stable") if best else frame
    kept = rows[[name for name in columns if name in rows]].head(n)
    plain = kept.astype(object).where(kept.notna(), None)  # JSON has null, not NaN
    found = [{str(key): value for key, value in row.items()} for row in plain.to_dict("records")]
    for row in found:
        for key, value in row.items():
            if hasattr(value, "tolist"):
                row[key] = value.tolist()
    return found


def readable(row: dict[str, Any]) -> Text:
    """A row for people: its values in a line, its texts below."""
    from rich.text import Text

    found = Text()
    for key, value in row.items():
        if key not in _LONG and value not in (None, []):
            found.append(f"{key} ", style="dim").append(f"{visible(str(value))}  ", style="bold")
    for key in _LONG:
        if row.get(key):
            found.append(f"\n{key}\n", style="dim").append(visible(str(row[key])))
    return found.append("\n")

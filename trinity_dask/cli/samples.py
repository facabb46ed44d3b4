"""``trinity-dask samples``: what the model answered and what it earned.

Invariant: reads committed batches only; works while the run goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.cli import CommandError
from trinity_dask.cli.jobs import saved_stages
from trinity_dask.config.schema import Config

if TYPE_CHECKING:
    import pandas as pd


def main(args: Sequence[str]) -> int:
    flags = _parser().parse_args(list(args))
    from trinity_dask.run.results import load_samples

    stages = saved_stages(flags.job_dir)
    step = flags.step if flags.step is not None else last_step(stages, flags.stage)
    try:
        frame = load_samples(stages, step, flags.stage)
    except LookupError as error:
        raise CommandError(f"{flags.job_dir}: {error}") from error
    for row in shown(frame, flags.n, flags.best):
        print(json.dumps({"step": step, **row}, ensure_ascii=False))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trinity-dask samples", description=__doc__)
    parser.add_argument("job_dir", help="directory of a job or of one stage")
    parser.add_argument("--step", type=int, help="explorer step; default the last committed")
    parser.add_argument("--stage", help="name of the stage; default the last with that batch")
    parser.add_argument("-n", type=int, default=8, help="how many (default 8)")
    parser.add_argument("--best", action="store_true", help="those with the highest reward")
    return parser


def last_step(stages: Sequence[Config], stage: Optional[str]) -> int:
    """The last batch that any of the stages committed.

    Raises:
        CommandError: none has committed a batch.
    """
    from trinity_dask.buffer.store.experience_store import ExperienceStore

    for config in reversed(stages):
        buffer = config.buffer.trainer_input.experience_buffer
        wanted = stage in (None, config.stage_name or config.name)
        if not wanted or buffer.storage_type != "store" or not buffer.path:
            continue
        manifests = ExperienceStore(buffer.path, buffer.storage_options).manifests()
        steps = [item.batch_id for item in manifests if isinstance(item.batch_id, int)]
        if steps:
            return max(steps)
    raise CommandError("no batch has been committed yet")


def shown(frame: pd.DataFrame, n: int, best: bool) -> list[dict[str, Any]]:
    """The first ``n`` rows (or those of the highest reward) as plain dictionaries."""
    rows = frame.sort_values("reward", ascending=False, kind="stable") if best else frame
    columns = ("prompt_text", "response_text", "reward", "truncate_status")
    kept = rows[[name for name in columns if name in rows]].head(n)
    plain = kept.astype(object).where(kept.notna(), None)  # JSON has null, not NaN
    return [{str(key): value for key, value in row.items()} for row in plain.to_dict("records")]

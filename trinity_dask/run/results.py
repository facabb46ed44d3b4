"""What a run left on disk: metrics and samples as data frames.

Invariant: everything here is read from the job directory, so it works for finished, running
and killed runs alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional

from trinity_dask.config import Config
from trinity_dask.experience.schema import SCHEMA
from trinity_dask.records.index import INDEX
from trinity_dask.records.layout import EVAL, FAILED, FILTERED, KEPT, TRAINER_COLUMNS, Source
from trinity_dask.records.reader import TRAINED, Rollouts

if TYPE_CHECKING:
    import pandas as pd


def load_samples(
    stages: Sequence[Config],
    step: int,
    stage: Optional[str] = None,
    *,
    group: str | int | None = None,
    failed: bool = False,
    filtered: bool = False,
    eval: bool = False,
) -> pd.DataFrame:
    """Rows of the batch committed at ``step`` (of ``stage``, or of the last stage with one), or
    instead of them those that are asked for: failed runs, filtered rows, answers of evaluations.

    ``group`` is ``"batch/task"`` or the id of a task. Columns: those of the index
    (docs/records.md), of an experience, and what the trainer knew; of failed runs their
    ``traceback`` and ``earlier`` errors too.

    Raises:
        LookupError: no stage has committed that batch, or was evaluated at that step.
    """
    chosen = {FAILED: failed, FILTERED: filtered, EVAL: eval}
    statuses = [status for status, wanted in chosen.items() if wanted] or [TRAINED, KEPT]
    columns = [*INDEX.names, *(n for n in SCHEMA.names if n not in INDEX.names), *TRAINER_COLUMNS]
    if failed:
        columns += ["traceback", "earlier"]
    for source in stage_sources(stages, stage):
        if step in steps_of(source, statuses):
            found = Rollouts([source]).where(step=step, group=group, status=statuses)
            return found.to_pandas(columns)
    what = "evaluation at step" if statuses == [EVAL] else "committed batch"
    raise LookupError(f"no {what} {step}" + (f" in stage {stage!r}" if stage else ""))


def stage_sources(stages: Sequence[Config], stage: Optional[str] = None) -> list[Source]:
    """The rows of every stage (or of the one called ``stage``), the last one first."""
    sources = [Source.of(config) for config in reversed(stages)]
    return [source for source in sources if stage in (None, source.stage)]


def steps_of(source: Source, statuses: Sequence[str]) -> set[int]:
    """The steps of a stage that may have rows of these statuses."""
    kinds = {EVAL if status == EVAL else KEPT for status in statuses}
    return {part.step for part in source.parts() if part.kind in kinds}

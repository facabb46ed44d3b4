"""What a run left on disk: metrics and samples as data frames.

Invariant: everything here is read from the job directory, so it works for finished, running
and killed runs alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from trinity_dask.buffer.store.experience_store import ExperienceStore, RowRef
from trinity_dask.config import Config

if TYPE_CHECKING:
    import pandas as pd


def load_samples(stages: list[Config], step: int, stage: Optional[str] = None) -> pd.DataFrame:
    """Rows of the batch committed at ``step`` (of ``stage``, or of the last stage with one).

    Raises:
        LookupError: no stage has committed that batch.
    """
    for config in reversed(stages):
        name = config.stage_name or config.name
        if stage is not None and stage != name:
            continue
        buffer = config.buffer.trainer_input.experience_buffer
        if buffer.storage_type != "store" or not buffer.path:
            continue
        store = ExperienceStore(buffer.path, buffer.storage_options)
        manifest = store.get_manifest(step)
        if manifest is not None:
            ref = RowRef(manifest.batch_id, manifest.path, 0, manifest.rows)
            return store.read([ref]).to_pandas()
    raise LookupError(f"no committed batch {step}" + (f" in stage {stage!r}" if stage else ""))

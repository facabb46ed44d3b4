"""What a run left on disk: metrics and samples as data frames, a status card as HTML.

Invariant: everything here is read from the job directory, so it works for finished, running
and killed runs alike.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any, Optional

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


def status_card(run_id: str, status: dict[str, Any], dashboard: Optional[str]) -> str:
    """A small table for notebooks."""
    shown = ("state", "stage", "step", "explorer_step", "model_version", "reward", "in_flight")
    rows = [(key, status.get(key)) for key in shown if status.get(key) is not None]
    rows += sorted(status.get("eval", {}).items())
    if status.get("message"):
        rows.append(("message", status["message"]))
    body = "".join(
        f"<tr><td>{html.escape(str(key))}</td><td>{html.escape(str(value))}</td></tr>"
        for key, value in rows
    )
    link = f'<a href="{html.escape(dashboard)}">dashboard</a>' if dashboard else ""
    return f"<table><caption>run {html.escape(run_id)} {link}</caption>{body}</table>"

"""Records of jobs that never ran, for the tests of what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.config import save
from trinity_dask.config.schema import Config
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import to_table
from trinity_dask.records.layout import (
    EID_COLUMNS,
    FAILED,
    FAILED_SCHEMA,
    FILTERED,
    FILTERED_SCHEMA,
    TRAINER_SCHEMA,
)
from trinity_dask.records.writer import Recorder, entries


def experiences(batch: int | str, n_tasks: int = 2, n_runs: int = 2) -> pa.Table:
    rows = [
        Experience(
            np.arange(6),
            prompt_length=2,
            eid=EID(batch, task, run),
            reward=float(run),
            logprobs=np.full(4, -0.5),
            versions=np.array([3, 4, -1, 3]),
            info={"finish_reason": "stop"},
            metrics={"accuracy": 1.0},
            response_text=f"answer {run}",
        )
        for task in range(n_tasks)
        for run in range(n_runs)
    ]
    return to_table(rows)


def filtered(batch: int | str, n_runs: int = 3) -> pa.Table:
    rows = experiences(batch, 1, n_runs)
    for name, text in (("operator", "reward_filter"), ("reason", "reward 0 < 1")):
        rows = rows.append_column(name, pa.array([text] * n_runs))
    return rows.cast(FILTERED_SCHEMA)


def failed(batch: int | str, n: int = 1) -> pa.Table:
    row = {
        **{"batch": str(batch), "batch_is_int": isinstance(batch, int), "task": "5"},
        **{"task_is_int": True, "run": 1, "attempts": 2, "error": "ValueError: no"},
        **{"traceback": "Traceback: line 3", "earlier": ["WorkerLost: gone"]},
    }
    return pa.Table.from_pylist([row] * n, schema=FAILED_SCHEMA)


def trained(rows: pa.Table, logprob: float) -> pa.Table:
    n = rows.num_rows
    tokens = [[logprob] * 4] * n
    more = {"train_logprobs": tokens, "train_advantages": tokens, "train_mask": [[True] * 4] * n}
    columns = {**{name: rows[name] for name in EID_COLUMNS}, **more}
    columns["train_entropy"] = pa.nulls(n, pa.list_(pa.float32()))
    return pa.table(columns).select(TRAINER_SCHEMA.names).cast(TRAINER_SCHEMA)


def a_job(tmp_path: Path) -> Config:
    """The configuration of a job in ``tmp_path``, saved there."""
    found = Config(job_dir=str(tmp_path))
    found.buffer.trainer_input.experience_buffer.path = f"{tmp_path}/buffer/experience"
    save(found, tmp_path / "config.yaml")
    return found


def commit(cfg: Config, batch: int | str, rows: pa.Table, **meta: Any) -> None:
    buffer = cfg.buffer.trainer_input.experience_buffer
    assert buffer.path is not None
    ExperienceStore(buffer.path, buffer.storage_options).commit(batch, rows, meta)


def a_batch(cfg: Config, batch: int, n_filtered: int = 3, n_failed: int = 1) -> pa.Table:
    """A committed batch with its records, as an explorer leaves it."""
    recorder, rows = Recorder(cfg), experiences(batch)
    found = {
        FILTERED: recorder.of_batch(
            FILTERED, batch, lambda: filtered(batch, n_filtered), n_filtered
        ),
        FAILED: recorder.of_batch(FAILED, batch, lambda: failed(batch, n_failed), n_failed),
    }
    counts = {"filtered": n_filtered, "failed": n_failed}
    commit(cfg, batch, rows, step=batch, explorer="ex", accounts=counts, **entries(found))
    return rows

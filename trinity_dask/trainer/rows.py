"""The rows of one train step on their way to the ranks, and what they look like.

Invariant: every rank resolves the same :class:`TrainInput` to the same table, row for row,
so the ranks can agree on shares without talking.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_dask.buffer.manifest import RowRef
from trinity_dask.buffer.store import ExperienceStore
from trinity_dask.experience.experience import RESPONSE_TRUNCATED
from trinity_dask.experience.payload import decode


@dataclass(frozen=True)
class TrainInput:
    """Rows by reference into a store, or by value as a payload of ``experience.payload``."""

    store_url: Optional[str] = None
    storage_options: dict[str, Any] = field(default_factory=dict)
    refs: tuple[RowRef, ...] = ()
    payload: Optional[bytes] = None
    skip_corrupt: bool = False


class RowSource:
    """Reads train inputs; keeps the store it opened for the next step."""

    def __init__(self) -> None:
        self._store: Optional[ExperienceStore] = None

    def read(self, rows: TrainInput) -> pa.Table:
        """The rows in order. Raises what the store raises for damaged files."""
        if rows.payload is not None:
            return decode(rows.payload)[0]
        if rows.store_url is None:
            raise ValueError("a train input needs a payload or a store_url")
        if self._store is None or self._store.url != rows.store_url:
            self._store = ExperienceStore(
                rows.store_url, rows.storage_options, skip_corrupt=rows.skip_corrupt
            )
        return self._store.read(rows.refs)


def row_lengths(table: pa.Table) -> np.ndarray:
    """Tokens of each row: int64 ``[rows]``."""
    return pc.list_value_length(table["tokens"]).to_numpy().astype(np.int64)


def available_fields(table: pa.Table) -> set[str]:
    """Names of the optional batch tensors that every row has."""
    names = {"advantages": "advantages", "rollout_logprobs": "logprobs"}
    return {tensor for tensor, column in names.items() if table[column].null_count == 0}


def describe_rows(table: pa.Table) -> dict[str, float]:
    """Metrics ``sample/*`` of all rows of a step."""
    if table.num_rows == 0:
        return {"sample/rows": 0.0, "sample/tokens": 0.0}
    tokens = row_lengths(table)
    prompt = table["prompt_length"].to_numpy().astype(np.int64)
    truncated = pc.equal(table["truncate_status"], RESPONSE_TRUNCATED)
    metrics = {
        "sample/rows": float(table.num_rows),
        "sample/tokens": float(tokens.sum()),
        "sample/response_length/mean": float((tokens - prompt).mean()),
        "sample/response_length/max": float((tokens - prompt).max()),
        "sample/task_count": float(_n_tasks(table)),
        "sample/truncated_share": (pc.sum(truncated).as_py() or 0) / table.num_rows,
    }
    return metrics | _spread("sample/reward", table["reward"]) | _versions(table)


def _n_tasks(table: pa.Table) -> int:
    return table.select(["batch", "task"]).group_by(["batch", "task"]).aggregate([]).num_rows


def _spread(name: str, column: pa.ChunkedArray) -> dict[str, float]:
    values = column.drop_null()
    if len(values) == 0:
        return {}
    return {
        f"{name}/mean": float(pc.mean(values).as_py()),
        f"{name}/std": float(pc.stddev(values).as_py()),
    }


def _versions(table: pa.Table) -> dict[str, float]:
    versions = pc.list_flatten(table["versions"])
    if len(versions) == 0:
        return {}
    bounds = pc.min_max(versions).as_py()
    return {
        "sample/model_version/mean": float(pc.mean(versions).as_py()),
        "sample/model_version/min": float(bounds["min"]),
        "sample/model_version/max": float(bounds["max"]),
    }

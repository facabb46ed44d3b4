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

from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.buffer.store.manifest import RowRef
from trinity_dask.experience.payload import decode


@dataclass(frozen=True)
class TrainInput:
    """Rows by reference into a store, then rows by value (of ``experience.payload``).

    Tokens of versions below ``min_version`` are masked; a row of unknown versions is not.
    """

    store_url: Optional[str] = None
    storage_options: dict[str, Any] = field(default_factory=dict)
    refs: tuple[RowRef, ...] = ()
    payload: Optional[bytes] = None
    skip_corrupt: bool = False
    min_version: int = 0


class RowSource:
    """Reads train inputs; keeps the store it opened for the next step."""

    def __init__(self) -> None:
        self._store: Optional[ExperienceStore] = None

    def read(self, rows: TrainInput) -> pa.Table:
        """The rows in order. Raises what the store raises for damaged files."""
        tables = []
        if rows.store_url is not None:
            tables.append(self._opened(rows).read(rows.refs))
        if rows.payload is not None:
            tables.append(decode(rows.payload)[0])
        if not tables:
            raise ValueError("a train input needs a payload or a store_url")
        table = pa.concat_tables(tables) if len(tables) > 1 else tables[0]
        return without_stale(table, rows.min_version)

    def _opened(self, rows: TrainInput) -> ExperienceStore:
        assert rows.store_url is not None
        if self._store is None or self._store.url != rows.store_url:
            self._store = ExperienceStore(
                rows.store_url, rows.storage_options, skip_corrupt=rows.skip_corrupt
            )
        return self._store


def without_stale(table: pa.Table, min_version: int) -> pa.Table:
    """``table`` with every token of a version below ``min_version`` out of its action mask."""
    if not stale_metrics(table, min_version):
        return table
    masks = []
    for versions, mask in zip(table["versions"], table["action_mask"], strict=True):
        fresh = None
        if versions.is_valid:
            fresh = versions.values.to_numpy() >= min_version
            if mask.is_valid:
                fresh &= mask.values.to_numpy(zero_copy_only=False)
        masks.append(mask.as_py() if fresh is None else fresh)
    index = table.column_names.index("action_mask")
    field = table.schema.field(index)
    return table.set_column(index, field, pa.array(masks, field.type))


def stale_metrics(table: pa.Table, min_version: int) -> dict[str, float]:
    """``sample/stale_tokens``, ``sample/stale_rows``: masked for their age; empty for none."""
    if min_version <= 0 or table.num_rows == 0:
        return {}
    known = table["versions"].drop_null()
    stale = pc.less(pc.list_flatten(known), min_version)
    if not pc.any(stale).as_py():
        return {}
    rows = pc.list_parent_indices(known).filter(stale)
    return {
        "sample/stale_tokens": float(pc.sum(stale).as_py()),
        "sample/stale_rows": float(pc.count_distinct(rows).as_py()),
    }


def row_lengths(table: pa.Table) -> np.ndarray:
    """Tokens of each row: int64 ``[rows]``."""
    return pc.list_value_length(table["tokens"]).to_numpy().astype(np.int64)


def available_fields(table: pa.Table) -> set[str]:
    """Names of the optional batch tensors that every row has."""
    names = {
        "advantages": "advantages",
        "rollout_logprobs": "logprobs",
        "teacher_logprobs": "teacher_logprobs",
    }
    return {tensor for tensor, column in names.items() if table[column].null_count == 0}

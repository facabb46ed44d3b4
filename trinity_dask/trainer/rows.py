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
from trinity_dask.experience.payload import decode


@dataclass(frozen=True)
class TrainInput:
    """Rows by reference into a store, then rows by value (of ``experience.payload``)."""

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
        tables = []
        if rows.store_url is not None:
            tables.append(self._opened(rows).read(rows.refs))
        if rows.payload is not None:
            tables.append(decode(rows.payload)[0])
        if not tables:
            raise ValueError("a train input needs a payload or a store_url")
        return pa.concat_tables(tables) if len(tables) > 1 else tables[0]

    def _opened(self, rows: TrainInput) -> ExperienceStore:
        assert rows.store_url is not None
        if self._store is None or self._store.url != rows.store_url:
            self._store = ExperienceStore(
                rows.store_url, rows.storage_options, skip_corrupt=rows.skip_corrupt
            )
        return self._store


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

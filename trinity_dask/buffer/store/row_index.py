"""What the queues know about the rows of a batch without reading them.

Invariant: the groups cover the rows in order without a gap, so a queue that hands out whole
groups hands out every row once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_dask.experience.schema import column, list_values

META_KEY = "row_index"
UNKNOWN = -1


@dataclass(frozen=True)
class RowIndex:
    """Per group of rows (one task's runs that lie together): its size and model versions.

    ``oldest`` and ``newest`` are the extreme versions that sampled a token of the group, -1
    when no token carries one.
    """

    sizes: tuple[int, ...]
    oldest: tuple[int, ...]
    newest: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.sizes) == len(self.oldest) == len(self.newest):
            raise ValueError("a row index has one size and two versions for each group")

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    def groups(self) -> Iterator[tuple[int, int, int, int]]:
        """``(start, stop, oldest, newest)`` of each group."""
        start = 0
        for size, oldest, newest in zip(self.sizes, self.oldest, self.newest, strict=True):
            yield start, start + size, oldest, newest
            start += size

    def to_meta(self) -> dict[str, list[int]]:
        """JSON form, for a manifest's ``meta``."""
        return {name: list(values) for name, values in asdict(self).items()}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], rows: int) -> RowIndex | None:
        """The index that was stored with a batch; None when there is none of ``rows`` rows."""
        stored = meta.get(META_KEY)
        if stored is None:
            return None
        index = cls(**{name: tuple(map(int, values)) for name, values in stored.items()})
        return index if index.rows == rows else None

    @classmethod
    def unknown(cls, rows: int) -> RowIndex:
        """One group of which nothing is known."""
        return cls((rows,), (UNKNOWN,), (UNKNOWN,)) if rows else cls((), (), ())

    @classmethod
    def of(cls, table: pa.Table) -> RowIndex:
        """The index of a table of experiences; vectorised, no loop over rows."""
        if table.num_rows == 0:
            return cls((), (), ())
        starts = _group_starts(table)
        oldest, newest = _row_versions(table)
        sizes = np.diff(np.append(starts, table.num_rows))
        known = np.where(oldest == UNKNOWN, np.iinfo(np.int64).max, oldest)
        low = np.minimum.reduceat(known, starts)
        low[low == np.iinfo(np.int64).max] = UNKNOWN
        high = np.maximum.reduceat(newest, starts)
        return cls(tuple(sizes.tolist()), tuple(low.tolist()), tuple(high.tolist()))


def group_codes(table: pa.Table) -> np.ndarray:
    """Number of each row's ``batch/task``, by first appearance: int64 ``[rows]``."""
    keys = (column(table, name) for name in ("batch", "task"))
    joined = pc.binary_join_element_wise(*keys, "/")
    return joined.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)


def gather_groups(table: pa.Table) -> pa.Table:
    """The rows with each group's together, in order of first appearance (stable)."""
    codes = group_codes(table)
    if np.all(np.diff(codes) >= 0):
        return table
    return table.take(pa.array(np.argsort(codes, kind="stable")))


def _group_starts(table: pa.Table) -> np.ndarray:
    codes = group_codes(table)
    return np.flatnonzero(np.diff(codes, prepend=-1))


def _row_versions(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Oldest and newest known version of each row's tokens: int64 ``[rows]`` each."""
    values, offsets = list_values(column(table, "versions"))
    low = np.full(table.num_rows, UNKNOWN, np.int64)
    high = low.copy()
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled) == 0:
        return low, high
    # tokens that no model sampled (a tool's, the user's) carry a negative version
    known = np.where(values < 0, np.iinfo(np.int32).max, values)
    found = np.minimum.reduceat(known, offsets[filled])
    low[filled] = np.where(found == np.iinfo(np.int32).max, UNKNOWN, found)
    high[filled] = np.maximum(np.maximum.reduceat(values, offsets[filled]), UNKNOWN)
    return low, high

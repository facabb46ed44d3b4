"""The record that makes a batch exist: what was committed, where, with which accounts.

Invariant: a manifest never changes once written, and its file name is a function of the
batch id alone, so that "first writer wins" is one exclusive file creation. What a queue must
know of the rows without reading them, their groups and versions, is a part of it; the groups
cover the rows in order without a gap, so whole groups hand out every row once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from trinity_dask.experience.schema import column, group_codes, list_values

FORMAT = 1
SUFFIX = ".json"
INDEX_KEY = "row_index"
UNKNOWN = -1


@dataclass(frozen=True)
class RowRef:
    """Rows ``start`` (inclusive) to ``stop`` (exclusive) of one committed data file."""

    batch_id: int | str
    path: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Manifest:
    """One committed batch. ``path`` is relative to the store, ``created`` Unix seconds.

    ``order`` numbers the commits of a store from 0; ``meta`` is what the writer passed
    (accounts, taskset state, metrics).
    """

    batch_id: int | str
    path: str
    rows: int
    n_bytes: int
    sha256: str
    meta: dict[str, Any]
    created: float
    order: int

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse :meth:`to_json`. Raises ``ValueError`` for anything else."""
        record = json.loads(data)
        if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
            raise ValueError(f"not a manifest of format {FORMAT}")
        names = {field.name for field in fields(cls)}
        if set(record) != names:
            raise ValueError(f"manifest keys {sorted(record)} instead of {sorted(names)}")
        return cls(**record)

    def ref(self, start: int = 0, stop: int | None = None) -> RowRef:
        return RowRef(self.batch_id, self.path, start, self.rows if stop is None else stop)

    @property
    def sort_key(self) -> tuple[int, int, float, str]:
        """Integer batches in numeric order, then named batches in the order of commit."""
        if isinstance(self.batch_id, int):
            return (0, self.batch_id, 0.0, "")
        return (1, self.order, self.created, self.batch_id)


def batch_key(batch_id: int | str) -> str:
    """File-name form of a batch id; ``7`` and ``"7"`` differ, and no name leaves its folder.

    Raises:
        TypeError: ``batch_id`` is neither an int nor a str.
    """
    if isinstance(batch_id, bool) or not isinstance(batch_id, int | str):
        raise TypeError(f"a batch id is an int or a str (got {batch_id!r})")
    if isinstance(batch_id, int):
        return str(batch_id)
    return "s~" + quote(batch_id, safe="")


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

    def groups(self) -> Iterator[tuple[int, int, int, int]]:
        """``(start, stop, oldest, newest)`` of each group."""
        start = 0
        for size, oldest, newest in zip(self.sizes, self.oldest, self.newest, strict=True):
            yield start, start + size, oldest, newest
            start += size

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], rows: int) -> RowIndex | None:
        """The index in a manifest's ``meta``; None when there is none of ``rows`` rows."""
        stored = meta.get(INDEX_KEY)
        if stored is None:
            return None
        index = cls(**{name: tuple(map(int, values)) for name, values in stored.items()})
        return index if sum(index.sizes) == rows else None

    @classmethod
    def unknown(cls, rows: int) -> RowIndex:
        """One group of which nothing is known."""
        return cls((rows,), (UNKNOWN,), (UNKNOWN,)) if rows else cls((), (), ())

    @classmethod
    def of(cls, table: pa.Table) -> RowIndex:
        """The index of a table of experiences; vectorised, no loop over rows."""
        if table.num_rows == 0:
            return cls((), (), ())
        starts = np.flatnonzero(np.diff(group_codes(table), prepend=-1))
        sizes = np.diff(np.append(starts, table.num_rows))
        values, offsets = list_values(column(table, "versions"))
        # tokens that no model sampled (a tool's, the user's) carry a negative version
        never = np.iinfo(np.int32).max
        low = np.full(table.num_rows, never, np.int64)
        high = np.full(table.num_rows, UNKNOWN, np.int64)
        filled = np.flatnonzero(np.diff(offsets))
        if len(filled):
            known = np.where(values < 0, never, values)
            low[filled] = np.minimum.reduceat(known, offsets[filled])
            high[filled] = np.maximum(np.maximum.reduceat(values, offsets[filled]), UNKNOWN)
        low, high = np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)
        low[low == never] = UNKNOWN
        return cls(tuple(sizes.tolist()), tuple(low.tolist()), tuple(high.tolist()))

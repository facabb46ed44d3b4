"""The record that makes a batch exist: what was committed, where, and with which accounts.

Invariant: a manifest never changes once written, and its file name is a function of the
batch id alone, so that "first writer wins" is one exclusive file creation.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any
from urllib.parse import quote

FORMAT = 1
SUFFIX = ".json"


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

"""Rows of a data set by number, wherever it lies and however it is written.

Invariant: opening costs what an index of the rows costs, not what the rows do; every row is
read when it is asked for. The rows of several files are one sequence, in the files' order.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import lzma
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
import xxhash

from trinity_dask.buffer.data.parts import Part, Row, open_part
from trinity_dask.buffer.data.prompts import is_blank
from trinity_dask.buffer.data.sources import find_sources
from trinity_dask.buffer.data.sql import is_database, read_sql
from trinity_dask.buffer.errors import DataError, UnusableRow
from trinity_dask.config.schema import ExperienceBufferConfig, TasksetConfig

log = logging.getLogger(__name__)

# of pyarrow: ArrowInvalid is a ValueError; a date that Python has not is an OverflowError
UNREADABLE = (OSError, ValueError, EOFError, lzma.LZMAError, ArithmeticError, pa.ArrowException)
SAMPLE_ROWS = 512  # that are checked before a run begins; all of a smaller data set


class RowReader:
    """Random access to the rows of files or of a database, as dicts. Threads may share it.

    Args:
        path: a file, a pattern, a directory, any of these as an fsspec URL, a data set of the
            Hugging Face hub, or the URL of a database.
        split, subset: of a data set that has several.
        name: the taskset's, used in messages.
        storage_options: passed to fsspec.
        query: of a database.

    Raises:
        DataError: nothing is there, it cannot be read, or it has no rows (named).
    """

    def __init__(
        self,
        path: str,
        split: str = "train",
        name: str | None = None,
        *,
        subset: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        query: str | None = None,
    ) -> None:
        self.name = name or path
        self._parts: list[tuple[str, Part]] = []
        if is_database(path):
            self._parts.append((path, read_sql(path, query)))
        else:
            for source in find_sources(path, split, subset, storage_options):
                try:
                    self._parts.append((source.name, open_part(source)))
                except UNREADABLE as error:
                    if isinstance(error, DataError):
                        raise
                    raise DataError(
                        f"{source.name} cannot be read as {source.format}: {error}"
                    ) from error
        self._ends = list(itertools.accumulate((len(part) for _, part in self._parts), initial=0))
        if len(self) == 0:
            raise DataError(f"{self.name}: {path} has no rows")

    @classmethod
    def of(cls, cfg: TasksetConfig | ExperienceBufferConfig) -> RowReader:
        """The data set that a section of the configuration names."""
        return cls(
            cfg.path or "",
            cfg.split,
            cfg.name,
            subset=cfg.subset_name,
            storage_options=cfg.storage_options,
            query=cfg.query,
        )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} in {self.name}")
        (file, part), local = self._find(index)
        try:
            return part.row(local)
        except UNREADABLE as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{file}, row {local} cannot be read: {error}") from error

    def _find(self, index: int) -> tuple[tuple[str, Part], int]:
        """The file of an index, and the index in it."""
        number = bisect.bisect_right(self._ends, index) - 1
        return self._parts[number], index - self._ends[number]

    def where(self, index: int) -> str:
        """File and row of an index, for messages."""
        (file, _), local = self._find(index)
        return f"{file}, row {local}"

    @cached_property
    def fingerprint(self) -> str:
        """Of the rows and their order: the content of text, samples of large binary files."""
        digest = xxhash.xxh3_128(str(len(self)).encode())
        for _, part in self._parts:
            digest.update(part.digest.encode())
        return digest.hexdigest()

    def sample(self) -> list[int]:
        """Indices that are cheap to read now: all of a small data set, else some of each file."""
        share = -(-SAMPLE_ROWS // len(self._parts))
        return [
            start + local
            for start, (_, part) in zip(self._ends, self._parts, strict=False)
            for local in part.head(share)
        ]

    def require(self, columns: Sequence[str], *, some: bool = False) -> None:
        """Check up front that a sample of the rows has a value in each of ``columns``.

        With ``some`` a value may be null (not absent) in some of them, not in all.

        Raises:
            UnusableRow: names the file, the row (from 0), the column and what is there.
        """
        lacking: dict[str, UnusableRow | None] = {}
        for index in self.sample():
            row = self[index]
            for column in columns:
                try:
                    self.check(index, row, [column])
                    lacking[column] = None
                except UnusableRow as error:
                    if not some or column not in row:
                        raise
                    lacking.setdefault(column, error)
        for none_has_it in filter(None, lacking.values()):
            raise none_has_it

    def check(self, index: int, row: Row, columns: Sequence[str]) -> None:
        """The same for one row."""
        for column in columns:
            if is_blank(row.get(column)):
                there = ", ".join(sorted(map(str, row))) or "nothing"
                raise UnusableRow(
                    f"{self.where(index)}: no value in column {column!r} (the row has: "
                    f"{there}). Add it, or name the right column under format."
                )

    def column(self, name: str) -> list[Any]:
        """The values of all rows in a column, null where a row has none."""
        values: list[Any] = []
        for file, part in self._parts:
            try:
                values += part.column(name)
            except UNREADABLE as error:
                if isinstance(error, DataError):
                    raise
                raise DataError(f"{file}, column {name!r} cannot be read: {error}") from error
        return values


def compare_data(reader: RowReader, state: Mapping[str, Any], *, accept: bool) -> bool:
    """Whether the rows are those in which the position ``state`` was saved.

    Raises:
        DataError: they are not, and that is not accepted.
    """
    rows = state.get("rows", len(reader))
    if state.get("fingerprint", reader.fingerprint) == reader.fingerprint and rows == len(reader):
        return True
    found = f"{rows} rows then, {len(reader)} now" if rows != len(reader) else f"{rows} other rows"
    message = (
        f"the data of {reader.name!r} is not what it was when its position was saved ({found}); "
        "rows may be repeated or left out"
    )
    if not accept:
        raise DataError(
            f"{message}. Restore the data, start a new job, or set buffer.accept_other_data=true "
            "to go on at the same row number"
        )
    log.warning(message)
    return False

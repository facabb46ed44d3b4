"""Rows of a data set on disk: jsonl, json, parquet, csv, feather, or a ``datasets`` directory.

Invariant: a row comes back as it is in the file. JSON lines are parsed one by one, so a
key that only some rows have is absent in the others instead of null, and no string turns
into a date; csv cells stay text, so ``013479`` keeps its zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from trinity_dask.buffer.errors import DataError


class _Rows(Protocol):
    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]: ...


class _JsonLines:
    """Lines are kept as bytes and parsed on access: a tenth of the memory of dicts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_bytes().split(b"\n")
        numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
        self._numbers = [n for n, _ in numbered]
        self._lines = [line for _, line in numbered]

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> dict[str, Any]:
        try:
            row = json.loads(self._lines[index])
        except ValueError as error:
            raise DataError(
                f"{self.path}, line {self._numbers[index]}: not JSON ({error})"
            ) from error
        return _as_row(row, f"{self.path}, line {self._numbers[index]}")


class _JsonArray:
    def __init__(self, path: Path, rows: list[Any]) -> None:
        self._rows = [_as_row(row, f"{path}, row {i}") for i, row in enumerate(rows)]

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])


class _ArrowRows:
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        return self._table.slice(index, 1).to_pylist()[0]


def _as_row(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row is a JSON object (got {type(value).__name__})")
    return value


def _read_json(path: Path) -> _Rows:
    with path.open("rb") as file:
        head = file.read(4096).lstrip()
    if not head.startswith(b"["):
        return _JsonLines(path)
    return _JsonArray(path, json.loads(path.read_bytes()))


def _read_csv(path: Path) -> _Rows:
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    with pa.csv.open_csv(path, parse_options=parse) as reader:
        names = reader.schema.names
    options = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    return _ArrowRows(pa.csv.read_csv(path, parse_options=parse, convert_options=options))


def _read_arrow(path: Path) -> _Rows:
    """The IPC file format (feather) or the stream format that ``datasets`` writes."""
    source = pa.memory_map(str(path))
    try:
        return _ArrowRows(pa.ipc.open_file(source).read_all())
    except pa.ArrowInvalid:
        source.seek(0)
        return _ArrowRows(pa.ipc.open_stream(source).read_all())


def _read_parquet(path: Path) -> _Rows:
    return _ArrowRows(pa.parquet.read_table(path, memory_map=True))


FORMATS: dict[str, Callable[[Path], _Rows]] = {
    ".jsonl": _JsonLines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}


def _load(path: Path) -> _Rows:
    try:
        return FORMATS[path.suffix](path)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error


def _saved_dataset(directory: Path) -> list[Path] | None:
    """The files of a directory written by ``datasets.Dataset.save_to_disk``, in order."""
    state = directory / "state.json"
    if not state.is_file():
        return None
    return [directory / f["filename"] for f in json.loads(state.read_text())["_data_files"]]


def _belongs_to(split: str, path: Path) -> bool:
    stem = path.name.removesuffix(path.suffix)
    return stem == split or stem.startswith((f"{split}-", f"{split}_"))


def find_files(path: str, split: str) -> list[Path]:
    """The data files behind ``path``: the file, or the split's files of a directory.

    Raises:
        DataError: nothing is there; the message says what was looked for.
    """
    source = Path(path).expanduser()
    if source.is_file():
        if source.suffix not in FORMATS:
            raise DataError(f"{source}: known formats are {', '.join(FORMATS)}")
        return [source]
    if not source.is_dir():
        raise DataError(f"no file or directory {path!r}; a data set must lie on a local disk")
    for directory in (source / split, source):
        saved = _saved_dataset(directory)
        if saved is not None:
            return saved
    return _split_files(source, split)


def _split_files(source: Path, split: str) -> list[Path]:
    folders = [source, source / "data", source / split]
    found = [p for f in folders if f.is_dir() for p in sorted(f.iterdir()) if p.suffix in FORMATS]
    files = [p for p in found if _belongs_to(split, p) or p.parent == source / split]
    if not files:
        names = ", ".join(p.name for p in found[:5]) or "no data file"
        raise DataError(
            f"{source} has no files of split {split!r} ({names} found); expected "
            f"{split}.jsonl, {split}-*.parquet, a folder {split}/, or a saved data set"
        )
    return files


class RowReader:
    """Random access to the rows of a file or directory, as dicts.

    ``name`` is the taskset's name, used in messages.
    """

    def __init__(self, path: str, split: str = "train", name: str | None = None) -> None:
        self.name = name or path
        self._parts = [(file, _load(file)) for file in find_files(path, split)]
        self._length = sum(len(rows) for _, rows in self._parts)
        if self._length == 0:
            raise DataError(f"{self.name}: {path} has no rows")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length} in {self.name}")
        rows, local = self._find(index)[1:]
        return rows.row(local)

    def _find(self, index: int) -> tuple[Path, _Rows, int]:
        for file, rows in self._parts:
            if index < len(rows):
                return file, rows, index
            index -= len(rows)
        raise IndexError(index)

    def where(self, index: int) -> str:
        """File and row of an index, for messages."""
        file, _, local = self._find(index)
        return f"{file}, row {local}"

    def select(self, indices: Iterable[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]

    def require(self, columns: Sequence[str]) -> None:
        """Check up front that every row has a value in each of ``columns``.

        Raises:
            DataError: names the file, the row (from 0), the column and what is there.
        """
        for index in range(self._length):
            row = self[index]
            for column in columns:
                if row.get(column) is None:
                    there = ", ".join(sorted(map(str, row))) or "nothing"
                    raise DataError(
                        f"{self.where(index)}: no value in column {column!r} (the row has: "
                        f"{there}). Add it, or name the right column under format."
                    )

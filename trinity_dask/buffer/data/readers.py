"""Rows of a data set on disk: jsonl, json, parquet, csv, feather, or a ``datasets`` directory.

Invariant: a row comes back as it is in the file. JSON lines are parsed one by one, so a
key that only some rows have is absent in the others instead of null, and no string turns
into a date; csv cells stay text, so ``013479`` keeps its zero.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from trinity_dask.buffer.errors import DataError

# a file's rows: how many there are, and the one at an index
Rows = tuple[int, Callable[[int], dict[str, Any]]]


def _read_json(path: Path) -> Rows:
    """Lines are kept as bytes and parsed on access: a tenth of the memory of dicts."""
    data = path.read_bytes()
    if path.suffix == ".json" and data[:4096].lstrip().startswith(b"["):
        array = json.loads(data)
        for index, value in enumerate(array):
            _check_row(value, f"{path}, row {index}")
        return len(array), lambda index: dict(array[index])
    lines = [(n, line) for n, line in enumerate(data.split(b"\n"), 1) if line.strip()]

    def row(index: int) -> dict[str, Any]:
        number, line = lines[index]
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        _check_row(value, f"{path}, line {number}")
        return value

    return len(lines), row


def _check_row(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row is a JSON object (got {type(value).__name__})")


def _read_table(path: Path) -> Rows:
    """csv as text; feather as the IPC file format or the stream format of ``datasets``."""
    if path.suffix == ".csv":
        parse = pa.csv.ParseOptions(newlines_in_values=True)
        with pa.csv.open_csv(path, parse_options=parse) as reader:
            names = reader.schema.names
        options = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
        table = pa.csv.read_csv(path, parse_options=parse, convert_options=options)
    elif path.suffix == ".parquet":
        table = pa.parquet.read_table(path, memory_map=True)
    else:
        source = pa.memory_map(str(path))
        try:
            table = pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            table = pa.ipc.open_stream(source).read_all()
    return table.num_rows, lambda index: table.slice(index, 1).to_pylist()[0]


FORMATS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_table,
    ".csv": _read_table,
    ".arrow": _read_table,
    ".feather": _read_table,
}


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
        state = directory / "state.json"  # written by datasets.Dataset.save_to_disk
        if state.is_file():
            names = json.loads(state.read_text())["_data_files"]
            return [directory / file["filename"] for file in names]
    folders = [source, source / "data", source / split]
    found = [p for f in folders if f.is_dir() for p in sorted(f.iterdir()) if p.suffix in FORMATS]
    files = []
    for file in found:
        stem = file.name.removesuffix(file.suffix)
        named = stem == split or stem.startswith((f"{split}-", f"{split}_"))
        if named or file.parent == source / split:
            files.append(file)
    if not files:
        there = ", ".join(p.name for p in found[:5]) or "no data file"
        raise DataError(
            f"{source} has no files of split {split!r} ({there} found); expected "
            f"{split}.jsonl, {split}-*.parquet, a folder {split}/, or a saved data set"
        )
    return files


class RowReader:
    """Random access to the rows of a file or directory, as dicts.

    ``name`` is the taskset's name, used in messages.
    """

    def __init__(self, path: str, split: str = "train", name: str | None = None) -> None:
        self.name = name or path
        self._parts: list[tuple[Path, Rows]] = []
        for file in find_files(path, split):
            try:
                self._parts.append((file, FORMATS[file.suffix](file)))
            except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
                raise DataError(f"{file} cannot be read as {file.suffix[1:]}: {error}") from error
        self._length = sum(count for _, (count, _) in self._parts)
        if self._length == 0:
            raise DataError(f"{self.name}: {path} has no rows")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"row {index} of {self._length} in {self.name}")
        _, row, local = self._find(index)
        return row(local)

    def _find(self, index: int) -> tuple[Path, Callable[[int], dict[str, Any]], int]:
        """The file of an index, its rows, and the index in it."""
        for file, (count, row) in self._parts:
            if index < count:
                return file, row, index
            index -= count
        raise IndexError(index)

    def where(self, index: int) -> str:
        """File and row of an index, for messages."""
        file, _, local = self._find(index)
        return f"{file}, row {local}"

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

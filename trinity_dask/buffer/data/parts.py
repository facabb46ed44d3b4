"""The rows of one file by index, without holding them: indexed lines, mapped memory, row groups.

Invariant: a row comes back as it is in the file. JSON lines are parsed one by one, so a
key that only some rows have is absent in the others instead of null, and no string turns
into a date; csv cells stay text, so ``013479`` keeps its zero. What is opened costs memory
in proportion to the number of rows at most, 16 bytes each; what must be decompressed,
converted or fetched to be read by index goes to an unnamed file on the disk, once. A JSON
array is indexed like lines.
"""

from __future__ import annotations

import bz2
import codecs
import io
import json
import lzma
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
import xxhash

from trinity_dask.buffer.data.sources import Source
from trinity_dask.buffer.errors import DataError

Row = dict[str, Any]
BLOCK = 16 << 20  # bytes that are read at once from text
PIECE = 1 << 20  # of it that are looked at together for JSON's brackets
CSV_BLOCKS = (1 << 20, 1 << 24, 1 << 28, (1 << 31) - 1)  # a row lies in two of them at most
WIDE_BOMS = {  # the longer ones first: UTF-32-LE begins as UTF-16-LE does
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
SPACES = np.frombuffer(b" \t\r\n", np.uint8)
WINDOW_ROWS = 1024  # decoded at once while a row group is read from its start
SMALL_GROUP_BYTES = 32 << 20  # decoded; larger row groups go to the disk when read at random
GROUPS_KEPT = 4
FETCH_BYTES = 1 << 20  # of one column, from storage at once
SAMPLE_BYTES = 64 << 10


class Part(Protocol):
    """Rows of one file. ``digest`` is of its content, or of samples of a large one."""

    digest: str

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """The row. Raises DataError where it cannot be read."""

    def head(self, count: int) -> Sequence[int]:
        """About ``count`` indices that are cheap to read now, of all over the file if may be."""

    def column(self, name: str) -> list[Any]:
        """The values in a column, null where a row has none."""


def open_part(source: Source) -> Part:
    """Raises OSError, ValueError (ArrowInvalid, EOFError too): it cannot be read."""
    if source.format in ("jsonl", "json"):
        return _open_json(source)
    if source.format in ("csv", "tsv"):
        return _open_csv(source)
    if source.format == "parquet":
        return ParquetPart(source)
    return _open_arrow(source)


def spread(length: int, count: int) -> Sequence[int]:
    """``count`` indices from the first to the last; all when there are no more."""
    if length <= count:
        return range(length)
    return np.linspace(0, length - 1, count).astype(int).tolist()


# -- bytes ----------------------------------------------------------------------------------
def _stream(source: Source) -> Any:
    """The file's content from the start, decompressed."""
    # some web servers give a file from its start only
    options = {"block_size": 0} if "http" in source.fs.protocol else {}
    raw = source.fs.open(source.path, "rb", **options)
    if source.compression in ("gzip", "zstd"):
        return pa.CompressedInputStream(pa.PythonFile(raw, "r"), source.compression)
    if source.compression == "bz2":
        return bz2.open(raw)
    return lzma.open(raw) if source.compression == "xz" else raw


def _blocks(source: Source) -> Iterator[bytes]:
    """The content as UTF-8, by blocks; a byte order mark says what else it is in."""
    with _stream(source) as stream:
        block = stream.read(BLOCK)
        wide = next((code for bom, code in WIDE_BOMS.items() if block.startswith(bom)), None)
        decoder = codecs.getincrementaldecoder(wide)() if wide else None
        while block:
            yield decoder.decode(block).encode() if decoder else block
            block = stream.read(BLOCK)


def _spool() -> Any:
    """A file on the disk that has no name and ends with its last user."""
    return tempfile.TemporaryFile(prefix="trinity-dask-rows-")


class _Reading(io.RawIOBase):
    """The blocks of a text as a file, with the digest of what was read."""

    def __init__(self, source: Source) -> None:
        self._blocks, self._rest = _blocks(source), b""
        self.digest = xxhash.xxh3_128()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = next(self._blocks, b"")
            self.digest.update(self._rest)
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _sampled_digest(file: BinaryIO, blocks: int) -> str:
    """Of a binary file: the whole of a small one, else its size and blocks all over it.

    Rows in another order or cleaned move what lies behind them, so samples see it.
    """
    size = file.seek(0, os.SEEK_END)
    digest = xxhash.xxh3_128(str(size).encode())
    if size <= blocks * SAMPLE_BYTES:
        places: Sequence[int] = range(0, size, SAMPLE_BYTES)
    else:
        places = spread(size - SAMPLE_BYTES + 1, blocks)
    for place in places:
        file.seek(place)
        digest.update(file.read(SAMPLE_BYTES))
    file.seek(0)
    return digest.hexdigest()


def _copy(source: Source) -> Any:
    """The decompressed content in a file on the disk."""
    file = _spool()
    with _stream(source) as stream:
        while block := stream.read(BLOCK):
            file.write(block)
    file.flush()
    return file


# -- json -----------------------------------------------------------------------------------
def _open_json(source: Source) -> Part:
    """Lines, or an array in a file named ``.json``."""
    with source.fs.open(source.path, "rb") as file:
        plain = source.is_local and not source.compression
        plain = plain and not file.read(4).startswith(tuple(WIDE_BOMS))
    path = source.path if plain else None
    if source.format == "json":
        with _stream(source) as stream:
            start = stream.read(4096)
        wide = next((code for bom, code in WIDE_BOMS.items() if start.startswith(bom)), None)
        text = start.decode(wide or "utf-8-sig", errors="ignore")
        if text.lstrip().startswith("["):
            return ArrayPart(source.name, _blocks(source), path)
    return LinesPart(source.name, _blocks(source), path)


class _IndexedText:
    """Rows of JSON between places in a file, parsed when they are asked for.

    ``path`` is that of a local file which holds just these bytes; without, they are kept in
    a file on the disk.
    """

    _unit = "row"  # what the places are called

    def __init__(self, name: str, blocks: Iterator[bytes], path: str | None = None) -> None:
        self._name, self._blocks, self._keeps = name, blocks, path is None
        self._file: Any = open(path, "rb") if path else _spool()  # noqa: SIM115
        self._digest = xxhash.xxh3_128()
        self._starts = self._stops = np.empty(0, np.int64)
        self._numbers: np.ndarray | None = None  # of the rows that are left; None: of all
        self._index()
        self._file.flush()
        self.digest = self._digest.hexdigest()

    def _index(self) -> None:
        """Set starts and stops from what ``_read`` gives."""

    def _read(self) -> Iterator[bytes]:
        for block in self._blocks:
            self._digest.update(block)
            if self._keeps:
                self._file.write(block)
            yield block

    def __len__(self) -> int:
        return len(self._stops)

    def _between(self, start: int, stop: int) -> bytes:
        # the file's own position is not used, so threads may read at once
        return os.pread(self._file.fileno(), int(stop - start), int(start))

    def _text(self, index: int) -> bytes:
        line = self._between(self._starts[index], self._stops[index])
        return line.removeprefix(codecs.BOM_UTF8)  # also within files that were joined

    def row(self, index: int) -> Row:
        number = index if self._numbers is None else int(self._numbers[index])
        where = f"{self._name}, {self._unit} {number + (self._unit == 'line')}"
        try:
            value = json.loads(self._text(index).decode())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        if not isinstance(value, dict):
            raise DataError(f"{where}: a row is a JSON object (got {type(value).__name__})")
        return value

    def head(self, count: int) -> Sequence[int]:
        return spread(len(self), count)

    def column(self, name: str) -> list[Any]:
        return [self.row(index).get(name) for index in range(len(self))]


class ArrayPart(_IndexedText):
    """One JSON array: where each of its items begins and ends, found in one pass.

    What lies outside of text in quotes says how deep a place is; an item is what lies between
    two places of depth 1. Raises ValueError: it is no array from its start to its end.
    """

    def _index(self) -> None:
        depth, quoted, offset, rest = 0, False, 0, b""
        places: list[list[np.ndarray]] = [[], [], []]  # starts, stops, commas between
        for block in self._read():
            for piece in (block[at : at + PIECE] for at in range(0, len(block), PIECE)):
                text = rest + piece
                body = text.rstrip(b"\\")  # what a backslash at the end is before is not known
                rest = text[len(body) :]
                at, kinds, depths, outside = _nesting(body, depth, quoted)
                depth = int(depths[-1]) if len(depths) else depth
                quoted ^= bool(np.count_nonzero(kinds == QUOTE) % 2)
                opens, closes = outside & (kinds == OPEN), outside & (kinds == CLOSE)
                places[0].append(at[opens & (depths == 2)] + offset)
                places[1].append(at[closes & (depths == 1)] + offset + 1)
                places[2].append(at[outside & (kinds == COMMA) & (depths == 1)] + offset)
                offset += len(body)
        self._size = offset + len(rest)
        self._starts, self._stops, commas = (np.concatenate(each) for each in places)
        whole = depth == 0 and not quoted and len(self._starts) == len(self._stops)
        gaps = max(len(self._starts) - 1, 0)
        whole &= len(commas) == gaps and not np.any(commas < self._stops[:gaps])
        if whole and not len(self._starts):
            whole = self._between(0, self._size).removeprefix(codecs.BOM_UTF8).split() in EMPTY
        if not whole:
            raise ValueError(
                "not one JSON array of objects (its brackets, quotes or commas do not fit "
                "together); write it anew, or as JSON lines with the suffix .jsonl"
            )

    def _text(self, index: int) -> bytes:
        """The item, after a look at what is in front of it, and behind the last one."""
        last = len(self) - 1
        before = self._between(self._stops[index - 1] if index else 0, self._starts[index])
        lead = before.removeprefix(codecs.BOM_UTF8).strip()
        tail = self._between(self._stops[last], self._size).strip() if index == last else b"]"
        if lead != (b"," if index else b"[") or tail != b"]":
            raise ValueError(f"between the items stands {(lead + tail)[:40]!r}")
        return super()._text(index)


EMPTY = ([b"[]"], [b"[", b"]"])  # an array without items
QUOTE, OPEN, CLOSE, COMMA, BACKSLASH = range(1, 6)
_KIND = {**dict.fromkeys(b"{[", OPEN), **dict.fromkeys(b"}]", CLOSE)}
_KIND |= {ord('"'): QUOTE, ord(","): COMMA, ord("\\"): BACKSLASH}
_KINDS = bytes(_KIND.get(byte, 0) for byte in range(256))


def _nesting(
    text: bytes, depth: int, quoted: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Where JSON's signs are in ``text``: place, kind, depth behind it, whether outside quotes.

    Quotes behind an odd number of backslashes are none. ``depth`` and ``quoted`` are those in
    front of the text, which ends in no backslash.
    """
    kinds = np.frombuffer(text.translate(_KINDS), np.uint8)
    at = np.flatnonzero(kinds != 0)
    kinds = kinds[at]
    slash = kinds == BACKSLASH
    if slash.any():
        goes_on = np.zeros(len(at), bool)  # the sign before is the byte before, a backslash
        goes_on[1:] = slash[:-1] & (np.diff(at) == 1)
        numbers = np.arange(len(at))
        run = numbers - np.maximum.accumulate(np.where(goes_on, 0, numbers))
        kept = ~slash & ~((kinds == QUOTE) & (run % 2 == 1))
        at, kinds = at[kept], kinds[kept]
    outside = (np.cumsum(kinds == QUOTE) + quoted) % 2 == 0
    moves = (outside & (kinds == OPEN)).astype(np.int64) - (outside & (kinds == CLOSE))
    return at, kinds, depth + np.cumsum(moves), outside


class LinesPart(_IndexedText):
    """JSON lines: where each begins and ends, found in one pass over the bytes."""

    _unit = "line"

    def _index(self) -> None:
        size, fresh = 0, True  # the next byte begins a line
        ends, doubtful = [np.empty(0, np.int64)], [np.zeros(1, np.int64)]
        for block in self._read():
            data = np.frombuffer(block, np.uint8)
            found = np.flatnonzero(data == ord("\n"))
            begins = np.concatenate([np.zeros(int(fresh), np.int64), found + 1])
            begins = begins[begins < len(data)]
            doubtful.append(begins[np.isin(data[begins], SPACES)] + size)
            ends.append(found + size)
            fresh = block.endswith(b"\n")
            size += len(block)
        self._file.flush()
        self._stops = np.concatenate([*ends, [size]])
        self._starts = np.concatenate([[0], self._stops[:-1] + 1])
        self._numbers = self._without_blank(np.concatenate([*doubtful, [size]]))

    def _without_blank(self, doubtful: np.ndarray) -> np.ndarray | None:
        """Drop blank lines, which begin at one of ``doubtful``; the numbers of those kept."""
        places = np.unique(np.searchsorted(self._starts, doubtful))
        found = [n for n in places.tolist() if n < len(self._starts)]
        blank = [n for n in found if not self._text(n).strip()]
        if not blank:
            return None
        numbers = np.delete(np.arange(len(self._stops)), blank)
        self._starts, self._stops = self._starts[numbers], self._stops[numbers]
        return numbers

    def column(self, name: str) -> list[Any]:
        # numbers, which selectors ask for, are read ten times faster by Arrow
        only = pa.json.ParseOptions(
            explicit_schema=pa.schema([(name, pa.float64())]), unexpected_field_behavior="ignore"
        )
        try:
            with open(f"/dev/fd/{self._file.fileno()}", "rb") as file:
                found = pa.json.read_json(file, parse_options=only)[name]
        except pa.ArrowInvalid:  # other values, or other text than Arrow reads
            found = ()
        if len(found) == len(self):
            return found.to_pylist()
        return super().column(name)


# -- tables ---------------------------------------------------------------------------------
class ArrowPart:
    """A table whose columns are mapped memory."""

    def __init__(self, table: pa.Table, digest: str) -> None:
        self._table, self.digest = table, digest

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> Row:
        return _row_of(self._table.slice(index, 1))

    def head(self, count: int) -> Sequence[int]:
        return spread(len(self), count)

    def column(self, name: str) -> list[Any]:
        if name not in self._table.column_names:
            return [None] * len(self)
        return self._table[name].to_pylist()


def _row_of(table: Any) -> Row:
    """The only row of a table or batch; a map is an object, as it is in JSON."""
    return table.to_pylist(maps_as_pydicts="lossy")[0]


def _mapped(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> pa.Table:
    """``batches`` as a table that lies on the disk and is mapped."""
    with _spool() as file:
        with pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        file.flush()
        return pa.ipc.open_file(pa.memory_map(f"/dev/fd/{file.fileno()}")).read_all()


def _open_csv(source: Source) -> Part:
    for block in CSV_BLOCKS:
        try:
            return _read_csv(source, pa.csv.ReadOptions(block_size=block))
        except pa.ArrowInvalid as error:
            if "Empty CSV" in str(error):
                return ArrowPart(pa.table({}), xxhash.xxh3_128_hexdigest(b""))
            if "straddling" not in str(error) or block == CSV_BLOCKS[-1]:
                raise
    raise AssertionError("there is a block size")


def _read_csv(source: Source, read: Any) -> Part:
    parse = pa.csv.ParseOptions(
        newlines_in_values=True, delimiter="\t" if source.format == "tsv" else ","
    )
    with pa.csv.open_csv(pa.PythonFile(_Reading(source)), read, parse) as reader:
        names = reader.schema.names
    options = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    text = _Reading(source)
    with pa.csv.open_csv(pa.PythonFile(text), read, parse, options) as reader:
        table = _mapped(reader.schema, iter(reader))
    return ArrowPart(table, text.digest.hexdigest())


def _open_arrow(source: Source) -> Part:
    """The IPC file format, or the stream format of ``datasets``."""
    if source.is_local and not source.compression:
        mapped = pa.memory_map(source.path)
    else:
        with _copy(source) as file:
            mapped = pa.memory_map(f"/dev/fd/{file.fileno()}")
    digest = _sampled_digest(mapped, 64)
    try:
        reader = pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
        return ArrowPart(pa.ipc.open_stream(mapped).read_all(), digest)
    if reader.num_record_batches and not _lies_in(reader.get_batch(0), mapped):
        # compressed: what is read of it would stay in memory
        batches = (reader.get_batch(n) for n in range(reader.num_record_batches))
        return ArrowPart(_mapped(reader.schema, batches), digest)
    return ArrowPart(reader.read_all(), digest)


def _lies_in(batch: pa.RecordBatch, mapped: pa.MemoryMappedFile) -> bool:
    mapped.seek(0)
    whole = mapped.read_buffer()
    buffers = [b for column in batch.columns for b in column.buffers() if b is not None]
    return all(0 <= b.address - whole.address < whole.size for b in buffers if b.size)


class ParquetPart:
    """Row groups on demand: of a large one, what is read from its start on is decoded as it
    goes, and read at random it is written to the disk once.

    Only the file's footer is read when it is opened, wherever it lies.
    """

    def __init__(self, source: Source) -> None:
        raw = None if source.compression else self._seekable(source)
        if raw is None:
            raw = _copy(source)
        self.digest = _sampled_digest(raw, 64 if source.is_local else 3)
        self._raw = raw
        self._file = pa.parquet.ParquetFile(raw, buffer_size=FETCH_BYTES, pre_buffer=False)
        meta = self._file.metadata
        counts = [meta.row_group(n).num_rows for n in range(meta.num_row_groups)]
        self._ends = np.cumsum([0, *counts])
        self._lock = threading.Lock()  # there is one window, and one file position
        self._window: tuple[int, int, Any, Iterator[pa.RecordBatch]] | None = None
        self._decoded: OrderedDict[int, pa.Table] = OrderedDict()  # small ones
        self._on_disk: dict[int, pa.Table] = {}  # large ones

    @staticmethod
    def _seekable(source: Source) -> Any:
        """The file for reads anywhere in it; None where its server gives it as a whole."""
        if source.is_local:
            return source.fs.open(source.path, "rb")
        # a cache of the file system's own would fetch around each small read
        raw = source.fs.open(source.path, "rb", cache_type="none")
        try:
            raw.seek(1)
            raw.read(1)
        except ValueError:
            return None
        return raw

    def __len__(self) -> int:
        return int(self._ends[-1])

    def row(self, index: int) -> Row:
        group = int(np.searchsorted(self._ends, index, side="right")) - 1
        local = index - int(self._ends[group])
        with self._lock:
            found = self._ahead(group, local)
            if found is None:
                found = self._group(group).slice(local, 1)
        return _row_of(found)

    def _ahead(self, group: int, local: int) -> Any:
        """The row, where reading on from the group's start soon comes to it; else None."""
        if group in self._decoded or group in self._on_disk:
            return None
        if self._window is None or self._window[0] != group or local < self._window[1]:
            if local >= WINDOW_ROWS:
                return None
            batches = self._file.iter_batches(WINDOW_ROWS, row_groups=[group])
            self._window = (group, 0, next(batches), batches)
        _, first, batch, batches = self._window
        if local >= first + len(batch) + WINDOW_ROWS:
            return None
        while local >= first + len(batch):
            first, batch = first + len(batch), next(batches)
        self._window = (group, first, batch, batches)
        return batch.slice(local - first, 1)

    def _group(self, group: int) -> pa.Table:
        if group in self._on_disk:
            return self._on_disk[group]
        if group not in self._decoded:
            if self._file.metadata.row_group(group).total_byte_size > SMALL_GROUP_BYTES:
                batches = self._file.iter_batches(WINDOW_ROWS, row_groups=[group])
                self._on_disk[group] = _mapped(self._file.schema_arrow, batches)
                return self._on_disk[group]
            self._decoded[group] = self._file.read_row_group(group)
            if len(self._decoded) > GROUPS_KEPT:
                self._decoded.popitem(last=False)
        self._decoded.move_to_end(group)
        return self._decoded[group]

    def head(self, count: int) -> Sequence[int]:
        return range(min(count, len(self), WINDOW_ROWS))

    def column(self, name: str) -> list[Any]:
        if name not in self._file.schema_arrow.names:
            return [None] * len(self)
        with self._lock:
            return self._file.read(columns=[name])[name].to_pylist()

"""The Arrow form of experiences: tables of one row each, and payloads between processes.

Invariant: ``from_table(to_table(x)) == x`` for every field of every experience, whatever
slice, chunking or file the table went through, and ``decode(encode(x, h))`` gives table and
header again. Free-form fields (``info``, ``metrics``, ``messages``, ``tools``) are JSON
strings: numbers, strings, booleans, lists, dicts with string keys and ``None`` come back
exactly; tuples come back as lists, numpy and torch values as plain numbers and lists. A
payload is one Arrow IPC stream with a JSON header: nothing in it is executed on decoding,
and bytes that are not a payload are refused with a message, never half-read.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_dask.experience.eid import EID
from trinity_dask.experience.experience import RESPONSE_FIELDS, Experience

_ARROW = {np.float32: pa.float32(), np.int32: pa.int32(), np.bool_: pa.bool_()}
_TOKEN_FIELDS: dict[str, type] = {"chosen": np.int32, "rejected": np.int32}
LIST_FIELDS: dict[str, type] = {"tokens": np.int32, **RESPONSE_FIELDS, **_TOKEN_FIELDS}
TEXT_FIELDS = ("truncate_status", "prompt_text", "response_text")
JSON_FIELDS = ("info", "metrics")  # never null
OPTIONAL_JSON_FIELDS = ("messages", "tools")

_EID_SCHEMA = [
    pa.field("batch", pa.string(), nullable=False),
    pa.field("batch_is_int", pa.bool_(), nullable=False),
    pa.field("task", pa.string(), nullable=False),
    pa.field("task_is_int", pa.bool_(), nullable=False),
    pa.field("run", pa.int64(), nullable=False),
    pa.field("step", pa.int64(), nullable=False),
    pa.field("suffix", pa.string(), nullable=False),
]
SCHEMA = pa.schema(
    [
        *_EID_SCHEMA,
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("reward", pa.float64()),
        *(pa.field(n, pa.list_(_ARROW[t]), nullable=n != "tokens") for n, t in LIST_FIELDS.items()),
        *(pa.field(n, pa.string()) for n in TEXT_FIELDS),
        *(pa.field(n, pa.string(), nullable=False) for n in JSON_FIELDS),
        *(pa.field(n, pa.string()) for n in OPTIONAL_JSON_FIELDS),
    ]
)
# the fields of an experience; each is the column of its name, eid is the first seven
FIELDS = ("eid", *SCHEMA.names[len(_EID_SCHEMA) :])


# -- columns of experiences ---------------------------------------------------------------
def to_table(experiences: Sequence[Experience]) -> pa.Table:
    """The experiences as a table of :data:`SCHEMA`, in order.

    Raises:
        ValueError: a free-form field holds what JSON cannot, or text is not Unicode.
    """
    columns = {name: array for field in FIELDS for name, array in encoded(experiences, field)}
    return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def from_table(table: pa.Table) -> list[Experience]:
    """The experiences of a table made by :func:`to_table`, in order.

    Arrays of one column are views of one writable buffer; rows do not overlap.

    Raises:
        ValueError: a column is missing or has another type, or lengths do not fit.
    """
    check_schema(table)
    check_lengths(table)
    # The checks of Experience were made above for all rows at once, so they are not
    # repeated row by row: that is most of the time of a large table.
    experiences = [Experience.__new__(Experience) for _ in range(table.num_rows)]
    for name in FIELDS:
        _put(experiences, name, decoded(table, name))
    return experiences


def encoded(experiences: Sequence[Experience], field: str) -> list[tuple[str, pa.Array]]:
    """The columns of one field of every experience, by name. Raises as :func:`to_table`."""
    values = [getattr(exp, field) for exp in experiences]
    if field == "eid":
        return _eid_columns(values)
    if field in LIST_FIELDS:
        return [(field, _list_column(values, LIST_FIELDS[field]))]
    if field in JSON_FIELDS or field in OPTIONAL_JSON_FIELDS:
        return [(field, _json_column(experiences, values, field))]
    try:
        return [(field, pa.array(values, SCHEMA.field(field).type))]
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{field} holds text that is not valid Unicode ({error}); "
            "replace its lone surrogates before making the experience"
        ) from error


def decoded(table: pa.Table, field: str) -> list[Any]:
    """One field of every row, as an :class:`Experience` holds it."""
    if field == "eid":
        parts = {n: column(table, n).to_pylist() for n in SCHEMA.names[: len(_EID_SCHEMA)]}
        batch, task = (
            [int(text) if flag else text for text, flag in zip(parts[n], flags, strict=True)]
            for n, flags in (("batch", parts["batch_is_int"]), ("task", parts["task_is_int"]))
        )
        return list(map(EID, batch, task, parts["run"], parts["step"], parts["suffix"]))
    array = column(table, field)
    if field in LIST_FIELDS:
        return _rows_of_lists(array)
    if field in JSON_FIELDS or field in OPTIONAL_JSON_FIELDS:
        return _json_rows(array)
    return array.to_pylist()


def _eid_columns(eids: list[EID]) -> list[tuple[str, pa.Array]]:
    columns = []
    for name in ("batch", "task"):
        ids = [getattr(eid, name) for eid in eids]
        columns.append((name, pa.array([str(i) for i in ids], pa.string())))
        flags = pa.array([not isinstance(i, str) for i in ids], pa.bool_())
        columns.append((f"{name}_is_int", flags))
    columns.append(("run", pa.array([eid.run for eid in eids], pa.int64())))
    columns.append(("step", pa.array([eid.step for eid in eids], pa.int64())))
    columns.append(("suffix", pa.array([eid.suffix for eid in eids], pa.string())))
    return columns


def _list_column(arrays: list[np.ndarray | None], dtype: type) -> pa.Array:
    """One list array from per-row arrays; ``None`` becomes null."""
    present = [a for a in arrays if a is not None]
    if not present:
        return pa.nulls(len(arrays), pa.list_(_ARROW[dtype]))
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([0 if a is None else len(a) for a in arrays], out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{offsets[-1]} tokens in one table; at most 2^31-1: use smaller batches")
    values = pa.array(np.concatenate(present), _ARROW[dtype])
    whole = len(present) == len(arrays)
    mask = None if whole else pa.array([a is None for a in arrays], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=mask)


def _rows_of_lists(array: pa.Array) -> list[np.ndarray | None]:
    if array.null_count == len(array):
        return [None] * len(array)
    values, offsets = list_values(array)
    values = values.copy()  # Arrow memory is read-only; operators change experiences in place
    rows: list[np.ndarray | None] = [values[a:b] for a, b in pairwise(offsets.tolist())]
    if array.null_count:
        valid = array.is_valid().to_pylist()
        rows = [row if ok else None for row, ok in zip(rows, valid, strict=True)]
    return rows


def plain(value: Any) -> Any:
    """The JSON form of a value that :mod:`json` does not know."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "detach"):
        return value.detach().cpu().tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


_encode_json = json.JSONEncoder(default=plain, separators=(",", ":")).encode
_SCALARS = frozenset((str, int, float, bool, type(None)))


def _flat(value: Any, deeper: bool = True) -> bool:
    """A dict of scalars and of dicts of scalars: its ``repr`` tells it from every other."""
    if type(value) is not dict:
        return False
    for inner in value.values():
        if type(inner) not in _SCALARS and not (deeper and _flat(inner, False)):
            return False
    return True


def _json_column(experiences: Sequence[Experience], values: list[Any], name: str) -> pa.Array:
    texts: list[str | None] = []
    known: dict[str, str] = {}  # the rows of a group mostly say the same
    for exp, value in zip(experiences, values, strict=True):
        try:
            if value is None:
                texts.append(None)
            elif _flat(value):
                key = repr(value)
                text = known.get(key)
                if text is None:
                    text = known[key] = _encode_json(value)
                texts.append(text)
            else:
                texts.append(_encode_json(value))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"experience {exp.eid}: {name} holds {error}, which JSON cannot; "
                "use numbers, strings, booleans, lists, dicts and None"
            ) from error
    return pa.array(texts, pa.string())


def _json_rows(array: pa.Array) -> list[Any]:
    """Every row's own object; texts that repeat are parsed once where a copy is enough."""
    known: dict[str, dict[str, Any]] = {}
    rows: list[Any] = []
    for text in array.to_pylist():
        if text is not None and text not in known:
            value = json.loads(text)
            if not _flat(value):
                rows.append(value)
                continue
            known[text] = value
        flat = known.get(text)
        if flat is None:
            rows.append(None)
        else:  # a copy of one level is enough
            rows.append({k: v.copy() if type(v) is dict else v for k, v in flat.items()})
    return rows


# -- tables -------------------------------------------------------------------------------
def column(table: pa.Table, name: str) -> pa.Array:
    """The named column as one array, chunks joined."""
    chunked = table.column(name)
    if chunked.num_chunks == 1:
        return chunked.chunk(0)
    return pa.concat_arrays(chunked.chunks) if chunked.num_chunks else pa.array([], chunked.type)


def list_values(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Flat values and int64 ``[rows + 1]`` offsets of a list array; null lists are empty."""
    offsets = np.zeros(len(array) + 1, np.int64)
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    np.cumsum(lengths.to_numpy(zero_copy_only=False), out=offsets[1:])
    return array.flatten().to_numpy(zero_copy_only=False), offsets


def group_codes(table: pa.Table) -> np.ndarray:
    """Number of each row's ``batch/task``, by first appearance: int64 ``[rows]``."""
    keys = (column(table, name) for name in ("batch", "task"))
    joined = pc.binary_join_element_wise(*keys, "/")
    return joined.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)


def conform(table: pa.Table) -> pa.Table:
    """The columns of :data:`SCHEMA`, in order; optional ones that are missing are null.

    So a store that was written before a field existed stays readable; columns of a later
    version are left out.

    Raises:
        ValueError: a required column is missing, or one has another type.
    """
    for field in SCHEMA:
        if field.nullable and field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    check_schema(table)
    table = table.select(SCHEMA.names)
    return table if table.schema.equals(SCHEMA) else table.cast(SCHEMA)


def check_schema(table: pa.Table) -> None:
    """Raise ``ValueError`` unless ``table`` has the columns and types of :data:`SCHEMA`."""
    if table.schema.equals(SCHEMA):
        return
    present = set(table.column_names)
    missing = [name for name in SCHEMA.names if name not in present]
    if missing:
        raise ValueError(f"not a table of experiences: it lacks the columns {', '.join(missing)}")
    for field in SCHEMA:
        found = table.schema.field(field.name).type
        if found != field.type:
            raise ValueError(
                f"not a table of experiences: column {field.name} is {found}, not {field.type}"
            )


def check_lengths(table: pa.Table) -> None:
    """Raise ``ValueError`` unless every response field has one value per response token."""
    lengths = pc.list_value_length(table["tokens"])
    response = pc.subtract(lengths, table["prompt_length"])
    is_pair = pc.and_(pc.is_valid(table["chosen"]), pc.is_valid(table["rejected"]))
    for name in RESPONSE_FIELDS:
        differs = pc.not_equal(pc.list_value_length(table[name]), response)
        if pc.any(pc.and_not(differs, is_pair), skip_nulls=True).as_py():
            raise ValueError(f"a row's {name} does not have one value per response token")


# -- experiences that are read from their table when they are looked at -------------------
class LazyRows:
    """The rows of one table as :attr:`experiences`, converted column by column on demand.

    The first look at, or change of, a field of any of them converts that field of all rows;
    :meth:`to_table` makes columns of the fields that were converted and takes the others
    from the table. So a step that needs rewards costs nothing for tokens and texts.

    Raises:
        ValueError: as :func:`from_table`.
    """

    def __init__(self, table: pa.Table) -> None:
        check_schema(table)
        check_lengths(table)
        self._table = table
        self.converted: set[str] = set()
        rows = [_RowExperience.__new__(_RowExperience) for _ in range(table.num_rows)]
        _put(rows, "source", repeat(self))
        _put(rows, "row", range(table.num_rows))
        self.experiences: list[Experience] = list(rows)

    def convert(self, field: str) -> None:
        """Give every row its value of ``field``. Raises AttributeError for another name."""
        if field not in FIELDS:
            raise AttributeError(f"an experience has no field {field!r}")
        _put(self.experiences, field, decoded(self._table, field))
        self.converted.add(field)

    def to_table(self, experiences: Sequence[Experience]) -> pa.Table:
        """``experiences``, some or all of these rows in any order, as a table.

        Others among them (copies, new ones) cost a conversion of every field.
        """
        own = [e for e in experiences if type(e) is _RowExperience and e.source is self]
        if len(own) < len(experiences):
            return to_table(experiences)
        rows = [exp.row for exp in own]
        table = self._table
        if rows != list(range(table.num_rows)):
            table = table.take(pa.array(rows, pa.int64()))
        columns = dict(zip(table.column_names, table.columns, strict=True))
        for field in self.converted:
            columns.update(encoded(experiences, field))
        return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


class _RowExperience(Experience):
    """A row of :class:`LazyRows`. A copy of it is a plain :class:`Experience`."""

    __slots__ = ("row", "source")
    row: int
    source: LazyRows | None

    def __getattr__(self, name: str) -> Any:  # called where a slot has no value yet
        if name == "source":
            return None
        if self.source is None:
            raise AttributeError(f"an experience has no field {name!r}")
        self.source.convert(name)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.source is not None and name not in self.source.converted:
            self.source.convert(name)
        object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Experience, tuple(getattr(self, name) for name in Experience.__match_args__)


def _put(rows: Sequence[Experience], name: str, values: Iterable[Any]) -> None:
    """Set an attribute of every row, past ``__setattr__``; a loop takes thrice as long."""
    deque(map(getattr(_RowExperience, name).__set__, rows, values), maxlen=0)


# -- payloads -----------------------------------------------------------------------------
PAYLOAD_VERSION = b"1"
_VERSION_KEY = b"trinity_dask.payload"
_HEADER_KEY = b"trinity_dask.header"


def encode(experiences: pa.Table | Iterable[Experience], header: dict[str, Any]) -> bytes:
    """Experiences, or a table of them, and a JSON-able ``header`` as bytes; none are allowed.

    Raises:
        ValueError: as :func:`to_table`, or the table has another schema.
    """
    table = experiences if isinstance(experiences, pa.Table) else to_table(list(experiences))
    check_schema(table)
    metadata = {_VERSION_KEY: PAYLOAD_VERSION, _HEADER_KEY: json.dumps(header).encode()}
    table = table.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def decode(data: bytes | memoryview) -> tuple[pa.Table, dict[str, Any]]:
    """Table and header of a payload; the table shares memory with ``data``.

    Raises:
        ValueError: ``data`` is not a payload, is cut short, or is of another version.
    """
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(data))
        table = reader.read_all()
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise ValueError(
            f"not an experience payload: {len(data)} bytes are no complete Arrow stream ({error})"
        ) from error
    metadata = table.schema.metadata or {}
    version = metadata.get(_VERSION_KEY)
    if version != PAYLOAD_VERSION:
        raise ValueError(
            f"not an experience payload: version {version!r} in the Arrow stream, "
            f"expected {PAYLOAD_VERSION!r}"
        )
    check_schema(table)
    bare = table.replace_schema_metadata(None)
    # a cast copies every column, and payloads of our own encode need none
    bare = bare if bare.schema.equals(SCHEMA) else bare.cast(SCHEMA)
    return bare, json.loads(metadata[_HEADER_KEY])


def peek_header(data: bytes | memoryview) -> dict[str, Any]:
    """The header of a payload; its rows are not read.

    Raises:
        ValueError: ``data`` is not a payload.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
            return json.loads((stream.schema.metadata or {})[_HEADER_KEY])
    except (pa.ArrowInvalid, KeyError) as error:
        raise ValueError(f"not an experience payload: {error!r}") from error

"""The Arrow form of experiences: one row each, every field, exactly.

Invariant: ``from_table(to_table(x)) == x`` for every field of every experience, whatever
slice, chunking or file the table went through. Free-form fields (``info``, ``metrics``,
``messages``, ``tools``) are JSON strings: numbers, strings, booleans, lists, dicts with
string keys and ``None`` come back exactly; tuples come back as lists, numpy and torch
values as plain numbers and lists.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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

SCHEMA = pa.schema(
    [
        pa.field("batch", pa.string(), nullable=False),
        pa.field("batch_is_int", pa.bool_(), nullable=False),
        pa.field("task", pa.string(), nullable=False),
        pa.field("task_is_int", pa.bool_(), nullable=False),
        pa.field("run", pa.int64(), nullable=False),
        pa.field("step", pa.int64(), nullable=False),
        pa.field("suffix", pa.string(), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("reward", pa.float64()),
        *(pa.field(n, pa.list_(_ARROW[t]), nullable=n != "tokens") for n, t in LIST_FIELDS.items()),
        *(pa.field(n, pa.string()) for n in TEXT_FIELDS),
        *(pa.field(n, pa.string(), nullable=False) for n in JSON_FIELDS),
        *(pa.field(n, pa.string()) for n in OPTIONAL_JSON_FIELDS),
    ]
)


def _plain(value: Any) -> Any:
    """The JSON form of a value that :mod:`json` does not know."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "detach"):
        return value.detach().cpu().tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


_encode_json = json.JSONEncoder(default=_plain, separators=(",", ":")).encode


_SCALARS = frozenset((str, int, float, bool, type(None)))


def _flat(value: Any, deeper: bool = True) -> bool:
    """A dict of scalars and of dicts of scalars: its ``repr`` tells it from every other."""
    if type(value) is not dict:
        return False
    for inner in value.values():
        if type(inner) not in _SCALARS and not (deeper and _flat(inner, False)):
            return False
    return True


def _copied(flat: dict[str, Any]) -> dict[str, Any]:
    return {k: v.copy() if type(v) is dict else v for k, v in flat.items()}


def _json_column(experiences: Sequence[Experience], name: str) -> pa.Array:
    values: list[str | None] = []
    known: dict[str, str] = {}  # the rows of a group mostly say the same
    for exp in experiences:
        value = getattr(exp, name)
        try:
            if value is None:
                values.append(None)
            elif _flat(value):
                key = repr(value)
                text = known.get(key)
                if text is None:
                    text = known[key] = _encode_json(value)
                values.append(text)
            else:
                values.append(_encode_json(value))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"experience {exp.eid}: {name} holds {error}, which JSON cannot; "
                "use numbers, strings, booleans, lists, dicts and None"
            ) from error
    return pa.array(values, pa.string())


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


def _text_column(experiences: Sequence[Experience], name: str) -> pa.Array:
    values = [getattr(exp, name) for exp in experiences]
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds text that is not valid Unicode ({error}); "
            "replace its lone surrogates before making the experience"
        ) from error


def _eid_columns(eids: list[EID]) -> dict[str, pa.Array]:
    columns: dict[str, pa.Array] = {}
    for name in ("batch", "task"):
        ids = [getattr(eid, name) for eid in eids]
        columns[name] = pa.array([str(i) for i in ids], pa.string())
        columns[f"{name}_is_int"] = pa.array([not isinstance(i, str) for i in ids], pa.bool_())
    columns["run"] = pa.array([eid.run for eid in eids], pa.int64())
    columns["step"] = pa.array([eid.step for eid in eids], pa.int64())
    columns["suffix"] = pa.array([eid.suffix for eid in eids], pa.string())
    return columns


def to_table(experiences: Sequence[Experience]) -> pa.Table:
    """The experiences as a table of :data:`SCHEMA`, in order.

    Raises:
        ValueError: a free-form field holds what JSON cannot, or text is not Unicode.
    """
    columns = _eid_columns([exp.eid for exp in experiences])
    columns["prompt_length"] = pa.array([exp.prompt_length for exp in experiences], pa.int32())
    columns["reward"] = pa.array([exp.reward for exp in experiences], pa.float64())
    for name, dtype in LIST_FIELDS.items():
        columns[name] = _list_column([getattr(exp, name) for exp in experiences], dtype)
    for name in TEXT_FIELDS:
        columns[name] = _text_column(experiences, name)
    for name in (*JSON_FIELDS, *OPTIONAL_JSON_FIELDS):
        columns[name] = _json_column(experiences, name)
    return pa.Table.from_arrays([columns[field.name] for field in SCHEMA], schema=SCHEMA)


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


def _ids(table: pa.Table, name: str) -> list[int | str]:
    texts = column(table, name).to_pylist()
    flags = column(table, f"{name}_is_int").to_pylist()
    return [int(text) if flag else text for text, flag in zip(texts, flags, strict=True)]


def _eids(table: pa.Table) -> list[EID]:
    parts = (column(table, name).to_pylist() for name in ("run", "step", "suffix"))
    return list(map(EID, _ids(table, "batch"), _ids(table, "task"), *parts))


def _json_rows(array: pa.Array) -> list[Any]:
    """Every row's own object; texts that repeat are parsed once where a copy is enough."""
    known: dict[str, Any] = {}
    rows = []
    for text in array.to_pylist():
        value = known.get(text)
        if value is None and text is not None:
            value = json.loads(text)
            if _flat(value):
                known[text] = value
                value = _copied(value)
        elif value is not None:
            value = _copied(value)
        rows.append(value)
    return rows


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
    lengths = pc.list_value_length(column(table, "tokens"))
    response = pc.subtract(lengths, column(table, "prompt_length"))
    is_pair = pc.and_(pc.is_valid(column(table, "chosen")), pc.is_valid(column(table, "rejected")))
    for name in RESPONSE_FIELDS:
        differs = pc.not_equal(pc.list_value_length(column(table, name)), response)
        if pc.any(pc.and_not(differs, is_pair), skip_nulls=True).as_py():
            raise ValueError(f"a row's {name} does not have one value per response token")


def from_table(table: pa.Table) -> list[Experience]:
    """The experiences of a table made by :func:`to_table`, in order.

    Arrays of one column are views of one writable buffer; rows do not overlap.

    Raises:
        ValueError: a column is missing or has another type, or lengths do not fit.
    """
    check_schema(table)
    check_lengths(table)
    columns: dict[str, Any] = {"eid": _eids(table)}
    for name in ("prompt_length", "reward", *TEXT_FIELDS):
        columns[name] = column(table, name).to_pylist()
    for name in LIST_FIELDS:
        columns[name] = _rows_of_lists(column(table, name))
    for name in (*JSON_FIELDS, *OPTIONAL_JSON_FIELDS):
        columns[name] = _json_rows(column(table, name))
    return _build(columns, table.num_rows)


def _build(columns: dict[str, Any], n_rows: int) -> list[Experience]:
    # The checks of Experience were made above for all rows at once, so they are not
    # repeated row by row: that is most of the time of a large table.
    experiences = [Experience.__new__(Experience) for _ in repeat(None, n_rows)]
    for name, values in columns.items():
        for exp, value in zip(experiences, values, strict=True):
            setattr(exp, name, value)
    return experiences

"""The rows of a job as columns of numbers, a few bytes each, so that a million can be sorted.

Invariant: a row's place is chunk by chunk in the order of the files, and every chunk has every
column (what is missing is :data:`NONE` or NaN). Texts that repeat are kept once, as codes; prompts
and answers are not here at all. Changing a chunk changes ``version``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Optional

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_dask.experience.schema import column

NONE = int(np.iinfo(np.int32).min)  # in a column of whole numbers
WHOLE = (
    *("step", "run", "turn", "prompt_length", "length", "version_min", "version_max"),
    *("train_step", "uses", "attempts"),
)
TEXTS = (
    *("status", "stage", "batch", "task", "explorer", "eval", "finish", "truncated"),
    *("operator", "reason", "error"),
)
#: how columns are listed; ``parts.<name>`` come after ``reward``
ORDER = (
    *("status", "stage", "step", "group", "run", "turn", "reward", "length", "prompt_length"),
    *(
        "finish",
        "truncated",
        "version_min",
        "version_max",
        "train_step",
        "uses",
        "eval",
        "explorer",
    ),
    *("operator", "reason", "error", "attempts"),
)
PART = "parts."  # of a reward, and other metrics of the row
MAX_PARTS = 32
MAX_TEXT = 300  # characters of a text that is kept here; the file has the rest
MAX_JOINED = 4  # columns that are kept in one piece too

Chunk = dict[str, np.ndarray]


class Texts:
    """Each different text once; ``code`` of a text is its place."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        found = self._codes.get(text)
        if found is None:
            found = self._codes[text] = len(self.values)
            self.values.append(text)
        return found

    def encode(self, array: pa.Array) -> np.ndarray:
        """int32 ``(rows,)``: codes, :data:`NONE` where there is no text."""
        encoded = array.dictionary_encode()
        codes = [self.code(text[:MAX_TEXT]) for text in encoded.dictionary.to_pylist()]
        places = np.array([*codes, NONE], np.int32)
        return places[pc.fill_null(encoded.indices, len(codes)).to_numpy(zero_copy_only=False)]


class Rows:
    """All chunks of a job. A key names a chunk: what file, of which stage."""

    def __init__(self) -> None:
        self.texts = {name: Texts() for name in TEXTS}
        self.parts: list[str] = []  # names of columns of numbers of the rows' own
        self.version = 0
        self._chunks: dict[Any, Chunk] = {}
        self._order: dict[Any, int] = {}  # key -> its place among the keys
        self._starts: Optional[np.ndarray] = None  # of the chunks; and the end
        self._joined: dict[str, np.ndarray] = {}
        self._groups: Optional[tuple[np.ndarray, list[str]]] = None

    def __len__(self) -> int:
        return int(self._begins()[-1])

    def chunk_of(self, index: pa.Table) -> Chunk:
        """Of all rows of a file, as ``records.index.INDEX``: int32, float64 (parts: float32) and
        uint64 ``(rows,)`` by name; ``id`` is a hash of the row's id. A column of one value takes
        no room, and cannot be written to."""
        found = {name: _whole(column(index, name)) for name in WHOLE}
        found["reward"] = _floats(column(index, "reward"))
        found |= {name: self.texts[name].encode(column(index, name)) for name in TEXTS}
        found |= self._parts_of(column(index, "parts"))
        found = {name: _slim(values) for name, values in found.items()}
        found["id"] = hashes(column(index, "id"))
        return found

    def _parts_of(self, array: pa.Array) -> Chunk:
        encoded = array.dictionary_encode()
        told = [_numbers(text) for text in encoded.dictionary.to_pylist()]
        names = dict.fromkeys(name for numbers in told for name in numbers)
        for name in names:
            if name not in self.parts and len(self.parts) < MAX_PARTS:
                self.parts.append(name)
        at = pc.fill_null(encoded.indices, len(told)).to_numpy(zero_copy_only=False)
        return {
            PART + name: np.array([*(n.get(name, np.nan) for n in told), np.nan], np.float32)[at]
            for name in names
            if name in self.parts
        }

    # chunks -----------------------------------------------------------------------------
    def put(self, key: Any, chunk: Chunk) -> None:
        """Add or replace; :meth:`arrange` says where."""
        self._chunks[key] = chunk
        self.changed()

    def drop(self, key: Any) -> None:
        del self._chunks[key]
        self.changed()

    def get(self, key: Any) -> Optional[Chunk]:
        return self._chunks.get(key)

    def arrange(self, keys: Iterable[Any]) -> None:
        """The order of the chunks; keys without a chunk wait for one."""
        order = {key: at for at, key in enumerate(keys)}
        if list(order) != list(self._order):
            self._order = order
            self.changed()

    def changed(self) -> None:
        self.version += 1
        self._joined.clear()
        self._groups = self._starts = None

    def _begins(self) -> np.ndarray:
        """int64 ``(keys + 1,)``: places of the chunks' first rows, and of the end."""
        if self._starts is None:
            sizes = [len(c["id"]) if (c := self._chunks.get(k)) else 0 for k in self._order]
            self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return self._starts

    # columns ------------------------------------------------------------------------------
    def chunks(self) -> list[tuple[Any, Chunk]]:
        """In order, those that are there."""
        return [(key, self._chunks[key]) for key in self._order if key in self._chunks]

    def column(self, name: str) -> np.ndarray:
        """All rows of a column, in order."""
        if name not in self._joined:
            while len(self._joined) >= MAX_JOINED:
                del self._joined[next(iter(self._joined))]
            chunks = [chunk_column(chunk, name) for _, chunk in self.chunks()]
            empty = np.empty(0, np.float64 if self.kind(name) == "number" else np.int32)
            self._joined[name] = np.concatenate(chunks) if chunks else empty
        return self._joined[name]

    def coded(self, name: str) -> tuple[np.ndarray, list[str]]:
        """A column of texts: int32 ``(rows,)`` codes (:data:`NONE`: no text), and the texts."""
        if name != "group":
            return self.column(name), self.texts[name].values
        if self._groups is None:
            batches, tasks = self.column("batch").astype(np.int64), self.column("task")
            pairs, codes = np.unique((batches << 32) | tasks, return_inverse=True)
            known = self.texts["batch"].values, self.texts["task"].values
            names = [f"{known[0][p >> 32]}/{known[1][p & 0xFFFFFFFF]}" for p in pairs.tolist()]
            self._groups = codes.astype(np.int32), names
        return self._groups

    def kind(self, name: str) -> str:
        """``whole``, ``number`` or ``text``. Raises KeyError: there is no such column."""
        if name in WHOLE:
            return "whole"
        if name in TEXTS or name == "group":
            return "text"
        if name == "reward" or name.removeprefix(PART) in self.parts:
            return "number"
        raise KeyError(name)

    def names(self) -> list[str]:
        """Columns in the order in which they are listed."""
        at = ORDER.index("reward") + 1
        return [*ORDER[:at], *(PART + name for name in self.parts), *ORDER[at:]]

    def locate(self, place: int) -> tuple[Any, int]:
        """The chunk of a row, and its place there."""
        starts = self._begins()
        at = int(np.searchsorted(starts, place, side="right")) - 1
        return list(self._order)[at], int(place - starts[at])

    def place(self, key: Any, at: int) -> int:
        """The opposite of :meth:`locate`. Raises KeyError: there is no such chunk."""
        return int(self._begins()[self._order[key]]) + at

    def value(self, chunk: Chunk, at: int, name: str) -> Any:
        """One cell, as JSON has it."""
        if name == "group":
            return f"{self.value(chunk, at, 'batch')}/{self.value(chunk, at, 'task')}"
        if name not in chunk:
            return None
        value = chunk[name][at]
        if self.kind(name) == "number":
            return None if np.isnan(value) else float(value)
        if value == NONE:
            return None
        return self.texts[name].values[value] if name in self.texts else int(value)


def _slim(values: np.ndarray) -> np.ndarray:
    """The values; one, repeated without a copy, where all are that one."""
    same = len(values) > 1 and bool((values == values[0]).all() or missing(values).all())
    return np.broadcast_to(values[0], values.shape) if same else values


def missing(values: np.ndarray) -> np.ndarray:
    """bool ``(rows,)``: where a column holds no value."""
    return np.isnan(values) if values.dtype.kind == "f" else values == NONE


def chunk_column(chunk: Chunk, name: str) -> np.ndarray:
    """NaN for rows of a file that has no such numbers."""
    return chunk[name] if name in chunk else np.full(len(chunk["id"]), np.nan)


def hashes(array: pa.Array) -> np.ndarray:
    """uint64 ``(rows,)``: equal for equal texts, and with 64 bits for hardly any others."""
    import xxhash

    return np.array(
        [xxhash.xxh3_64_intdigest((t or "").encode()) for t in array.to_pylist()], np.uint64
    )


def _whole(array: pa.Array) -> np.ndarray:
    values = pc.fill_null(array, NONE).to_numpy(zero_copy_only=False)
    return np.clip(values, NONE, -(NONE + 1)).astype(np.int32)


def _floats(array: pa.Array) -> np.ndarray:
    return pc.fill_null(array, np.nan).to_numpy(zero_copy_only=False).astype(np.float64)


def _numbers(text: Optional[str]) -> dict[str, float]:
    """The numbers in a JSON object; whatever else it may be holds none."""
    try:
        told = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(told, dict):
        return {}
    numbers = {n: v for n, v in told.items() if n != "reward" and isinstance(v, (int, float))}
    return {name: float(v) for name, v in numbers.items() if abs(v) < 1e300 or v != v}

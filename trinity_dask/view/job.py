"""A job whose rows are looked at: its files are taken in bit by bit, and asked of.

Invariant: whatever is asked is answered from what has been taken in, at once; ``work`` does a
bounded piece of what is left. A file that cannot be read is left out and named, and does not stop
the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_dask.config.schema import Config
from trinity_dask.experience.schema import column, list_values
from trinity_dask.records.index import NEEDED, index_of
from trinity_dask.records.layout import KEPT, TRAINER, TRAINER_COLUMNS, Part, Source, saved_stages
from trinity_dask.view import detail
from trinity_dask.view.columns import NONE, Chunk, Rows, hashes
from trinity_dask.view.query import Query, QueryError, select

REFRESH_S = 2.0
REFRESH_SHARE = 20  # looking for new files takes at most one part in so many of the time
MAX_ERRORS = 20
MAX_SEARCHES, MAX_RESULTS = 4, 2
MAX_OPEN = 8  # files; what was read of one stays resident while it is open
MAX_PANES = 16  # runs side by side
EXCERPT = 160  # characters of a prompt and an answer in the table
_TEXTS = ["prompt_text", "response_text"]
_SEARCHED = [*_TEXTS, "error", "traceback"]

Key = tuple[int, str, str]  # of a file: place of its stage, kind, path


@dataclass
class Search:
    """A text: in which rows of what files it is, and what files are left."""

    text: str
    left: deque[Key]
    found: dict[Key, np.ndarray] = field(default_factory=dict)


class Job:
    """Rows of the stages of one job directory. Not safe for several threads."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.rows = Rows()
        self.errors: dict[str, str] = {}
        self.progress = 0  # grows with everything that is taken in
        self._stages: list[tuple[Config, Source]] = []
        self._parts: dict[Key, Part] = {}
        self._versions: dict[Key, float] = {}  # of what has been taken in
        self._names: dict[str, Key] = {}
        self._todo: deque[Key] = deque()
        self._trained: dict[Key, dict[str, tuple[np.ndarray, int]]] = {}
        self._of_batch: dict[tuple[int, str], Key] = {}  # kept rows
        self._searches: dict[str, Search] = {}
        self._hashing, self._unhashed = False, deque[Key]()
        self._results: dict[Any, tuple[np.ndarray, Optional[np.ndarray]]] = {}
        self._open: dict[Any, pa.Table] = {}
        self._decoders: dict[int, Any] = {}
        self._next_look = 0.0

    # taking in --------------------------------------------------------------------------
    def look(self) -> None:
        """Find new files, if it is time. Raises LookupError: there is no job in the directory."""
        began = time.monotonic()
        if began < self._next_look:
            return
        self._find_stages()
        parts: dict[Key, Part] = {}
        for at, (_, source) in enumerate(self._stages):
            for part in source.parts():
                parts[at, part.kind, part.path] = part
        for key in [k for k in self._versions if k not in parts]:
            self._forget(key)
        self._parts = parts
        self._names = {self._name(key): key for key in parts}
        self._todo = deque(k for k, p in parts.items() if self._versions.get(k) != p.version)
        self.rows.arrange(key for key in parts if not self._joins(key))
        took = time.monotonic() - began
        self._next_look = time.monotonic() + max(REFRESH_S, REFRESH_SHARE * took)

    def _find_stages(self) -> None:
        files = len([*Path(self.directory).glob("*/config.yaml")])
        if self._stages and files <= len(self._stages):
            return
        known = {str(config.job_dir) for config, _ in self._stages}
        for config in saved_stages(self.directory):
            if str(config.job_dir) not in known:
                self._stages.append((config, Source.of(config)))

    def _joins(self, key: Key) -> bool:
        """Rows of a trainer's file tell of rows elsewhere, unless the stage has no store."""
        return key[1] == TRAINER and self._stages[key[0]][1].store_url is not None

    def _forget(self, key: Key) -> None:
        self._versions.pop(key, None)
        if self._joins(key):
            self._trained.pop(key, None)
            self._train_again()
        elif self.rows.get(key) is not None:
            self.rows.drop(key)

    def work(self, until: float) -> bool:
        """Take in files, hash prompts and search texts until ``time.monotonic()`` is ``until``;
        False: there is nothing left to do."""
        while time.monotonic() < until:
            if self._todo:
                self._take_in(self._todo.popleft())
            elif (search := next((s for s in self._searches.values() if s.left), None)) is not None:
                self._search(search, search.left.popleft())
            elif self._hashing and self._unhashed:
                self._hash(self._unhashed.popleft())
            else:
                return False
            self.progress += 1
        return True

    def _guarded(self, key: Key, what: Callable[[], None]) -> bool:
        """Whether a file could be read; it is named where not."""
        try:
            what()
            return True
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            if len(self.errors) < MAX_ERRORS:
                self.errors[key[2]] = f"{type(error).__name__}: {error}"[:500]
            return False

    def _take_in(self, key: Key) -> None:
        part, source = self._parts[key], self._stages[key[0]][1]
        self._versions[key] = part.version
        self._guarded(key, lambda: self._take(key, part, source))

    def _take(self, key: Key, part: Part, source: Source) -> None:
        index = index_of(part, source.read(part, list(NEEDED)))
        if self._joins(key):
            self._take_trained(key, index, part.step)
            return
        chunk = self.rows.chunk_of(index)
        if part.kind == KEPT:
            self._of_batch[key[0], str(part.batch)] = key
            for trained in self._trained.values():
                self._mark(chunk, trained.get(self._batch(key[0], str(part.batch))))
        self.rows.put(key, chunk)
        self._unhashed.append(key)
        for search in self._searches.values():
            search.found.pop(key, None)
            search.left.append(key)

    @staticmethod
    def _batch(stage: int, batch: str) -> str:
        return f"{stage}/{batch}"

    # rows that were trained -----------------------------------------------------------------
    def _take_trained(self, key: Key, index: pa.Table, step: int) -> None:
        again = key in self._trained
        batches = column(index, "batch").dictionary_encode()
        codes, ids = batches.indices.to_numpy(zero_copy_only=False), hashes(column(index, "id"))
        self._trained[key] = {
            self._batch(key[0], batch): (np.sort(ids[codes == code]), step)
            for code, batch in enumerate(batches.dictionary.to_pylist())
        }
        if again:
            self._train_again()
        for name, trained in ({} if again else self._trained[key]).items():
            stage, _, batch = name.partition("/")
            kept = self._of_batch.get((int(stage), batch))
            chunk = None if kept is None else self.rows.get(kept)
            if chunk is not None:
                self._mark(chunk, trained)
                self.rows.changed()

    def _mark(self, chunk: Chunk, trained: Optional[tuple[np.ndarray, int]]) -> None:
        """Say of the rows of a chunk that a step trained them."""
        if trained is None:
            return
        ids, step = trained
        for name in ("train_step", "uses", "status"):
            chunk[name] = np.array(chunk[name])  # a column of one value cannot be written to
        at = np.minimum(np.searchsorted(ids, chunk["id"]), len(ids) - 1)
        hit = ids[at] == chunk["id"]
        chunk["train_step"][hit] = np.maximum(chunk["train_step"][hit], step)
        chunk["uses"][hit] = np.maximum(chunk["uses"][hit], 0) + 1
        chunk["status"][hit] = self.rows.texts["status"].code("trained")

    def _train_again(self) -> None:
        """A step was done again, so what is known of it was wrong."""
        kept = self.rows.texts["status"].code(KEPT)
        for (stage, batch), key in self._of_batch.items():
            if (chunk := self.rows.get(key)) is not None:
                for name, value in (("train_step", NONE), ("uses", NONE), ("status", kept)):
                    chunk[name] = np.full(len(chunk["id"]), value, np.int32)
                for trained in self._trained.values():
                    self._mark(chunk, trained.get(self._batch(stage, batch)))
        self.rows.changed()

    # texts ------------------------------------------------------------------------------
    def _search(self, search: Search, key: Key) -> None:
        chunk = self.rows.get(key)
        if chunk is not None:
            search.found[key] = found = np.zeros(len(chunk["id"]), bool)
            self._guarded(key, lambda: self._search_in(key, search.text, found))

    def _search_in(self, key: Key, text: str, found: np.ndarray) -> None:
        table = self._read(key, _SEARCHED)
        for name in set(_SEARCHED) & set(table.column_names):
            matches = _matches(column(table, name), text)
            found |= pc.fill_null(matches, False).to_numpy(zero_copy_only=False)

    def _hash(self, key: Key) -> None:
        chunk = self.rows.get(key)
        if chunk is not None:
            chunk["prompt"] = np.zeros(len(chunk["id"]), np.uint64)
            self._guarded(key, lambda: chunk.update(prompt=self._prompts(key, chunk)))

    def _prompts(self, key: Key, chunk: Chunk) -> np.ndarray:
        """uint64 ``(rows,)``: of the prompt's text, or of its tokens where there is none."""
        table = self._read(key, ["prompt_text", "tokens"])
        empty = pa.nulls(table.num_rows, pa.string())
        texts = column(table, "prompt_text") if "prompt_text" in table.column_names else empty
        found = hashes(texts)
        if texts.null_count and "tokens" in table.column_names:
            values, offsets = list_values(column(table, "tokens"))
            import xxhash

            for at in np.flatnonzero(texts.is_null().to_numpy(zero_copy_only=False)):
                ids = values[offsets[at] : offsets[at] + max(chunk["prompt_length"][at], 0)]
                found[at] = xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids).tobytes())
        return np.maximum(found, 1)

    # asking -----------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """What there is, and how much of it has been taken in."""
        return {
            "rows": len(self.rows),
            "files": len(self._parts),
            "left": len(self._todo),
            "version": self.progress,
            "columns": [{"name": n, "kind": self.rows.kind(n)} for n in self.rows.names()],
            "errors": [f"{path}: {why}" for path, why in self.errors.items()],
        }

    def find(self, query: Query) -> tuple[np.ndarray, Optional[np.ndarray], float]:
        """Places of the rows in order, their changes (for ``since``), and the share of the rows
        that have been looked at. Raises QueryError."""
        found = prompts = None
        looked: list[float] = []
        if query.text:
            search = self._begun(query.text)
            looked.append(_share(self.rows, lambda key, _: key in search.found))
            found = _joined(self.rows, lambda key, _: search.found.get(key), bool)
        if query.since is not None or query.same is not None:
            self._hashing = True
            looked.append(_share(self.rows, lambda _, chunk: "prompt" in chunk))
            prompts = _joined(self.rows, lambda _, chunk: chunk.get("prompt"), np.uint64)
        known = (repr(query), self.rows.version, tuple(looked))
        if known not in self._results:
            while len(self._results) >= MAX_RESULTS:
                del self._results[next(iter(self._results))]
            self._results[known] = select(self.rows, query, found, prompts)
        return *self._results[known], min(looked, default=1.0)

    def _begun(self, text: str) -> Search:
        if text not in self._searches:
            _matches(pa.array([""]), text)  # an expression that is none is refused now
            while len(self._searches) >= MAX_SEARCHES:
                del self._searches[next(iter(self._searches))]
            keys = deque(key for key, _ in self.rows.chunks())
            self._searches[text] = Search(text, keys)
        return self._searches[text]

    def page(self, query: Query, start: int, count: int) -> dict[str, Any]:
        """Some of the rows that are found, with the beginnings of their texts."""
        places, changes, looked = self.find(query)
        start = min(max(start, 0), len(places))
        rows = [self.cells(int(place)) for place in places[start : start + count]]
        if changes is not None:
            for row, change in zip(rows, changes[start : start + count], strict=True):
                row["change"] = float(change)
        return {"start": start, "total": len(places), "looked": looked, "rows": rows}

    def place(self, query: Query, name: str) -> Optional[int]:
        """Where a row is among those that are found. Raises QueryError."""
        key, at, _ = self.named(name)
        (found,) = np.nonzero(self.find(query)[0] == self.rows.place(key, at))
        return int(found[0]) if len(found) else None

    def cells(self, place: int, texts: bool = True) -> dict[str, Any]:
        """One row of the table."""
        key, at = self.rows.locate(place)
        chunk = self.rows.get(key)
        assert chunk is not None
        found = {
            n: v for n in self.rows.names() if (v := self.rows.value(chunk, at, n)) is not None
        }
        if texts:
            self._guarded(key, lambda: found.update(self._excerpts(key, at)))
        return {"key": f"{self._name(key)}:{at}", **found}

    def _excerpts(self, key: Key, row: int) -> dict[str, Any]:
        table = self._read(key, _TEXTS)
        texts = {"prompt": "prompt_text", "answer": "response_text"}
        told = {n: table[c][row].as_py() for n, c in texts.items() if c in table.column_names}
        return {name: text[:EXCERPT] for name, text in told.items() if text}

    def _name(self, key: Key) -> str:
        return f"{self._stages[key[0]][1].stage}:{key[1]}:{key[2]}"

    def named(self, name: str) -> tuple[Key, int, Chunk]:
        """File and place of a row by its name, which stays while the row does.

        Raises:
            QueryError: there is no such row, or not yet.
        """
        of_file, _, row = name.rpartition(":")
        key = self._names.get(of_file)
        chunk = None if key is None else self.rows.get(key)
        if key is None or chunk is None or not row.isdecimal() or int(row) >= len(chunk["id"]):
            raise QueryError(f"there is no row {name!r} here (any more, or not read yet)")
        return key, int(row), chunk

    def whole(self, name: str) -> dict[str, Any]:
        """A row in full, without its tokens."""
        key, at, _ = self.named(name)
        cells = self.cells(self.rows.place(key, at), texts=False)
        row = self._row(key, at, [*detail.COLUMNS, *detail.NUMBERS.values()])
        row["parts"] = row.pop("metrics", None)
        return {**cells, **detail.detail(row)}

    def tokens(self, name: str, start: int, stop: int) -> dict[str, Any]:
        """A slice of a row's tokens."""
        key, at, chunk = self.named(name)
        row = self._row(key, at, ["tokens", *detail.NUMBERS.values()])
        length = max(int(chunk["prompt_length"][at]), 0)
        decoder, why = self._decoder(key[0])
        return {**detail.tokens(row, length, start, stop, decoder), "without": why}

    def same(self, name: str) -> int:
        """The hash of a row's prompt."""
        key, at, chunk = self.named(name)
        return int(self._prompts(key, chunk)[at])

    def group(self, name: str) -> list[str]:
        """The rows of a row's task, those with the highest reward first."""
        _, at, chunk = self.named(name)
        group = self.rows.value(chunk, at, "group")
        stage = self.rows.value(chunk, at, "stage")
        query = Query({"group": f"={group}", "stage": f"={stage}"}, sort="reward", down=True)
        places, _, _ = self.find(query)
        return [self.cells(int(place), texts=False)["key"] for place in places[:MAX_PANES]]

    def answer_ids(self, name: str) -> list[int]:
        """The tokens of a row's answer."""
        key, at, chunk = self.named(name)
        ids = self._row(key, at, ["tokens"]).get("tokens") or []
        return ids[max(int(chunk["prompt_length"][at]), 0) :]

    # files --------------------------------------------------------------------------------
    def _read(self, key: Key, columns: list[str]) -> pa.Table:
        """Some columns of a file, mapped; the last used stay open. Raises OSError, ValueError."""
        part, source = self._parts[key], self._stages[key[0]][1]
        known = (key, part.version, tuple(columns))
        table = self._open.pop(known, None)
        if table is None:
            while len(self._open) >= MAX_OPEN:
                del self._open[next(iter(self._open))]
            table = source.read(part, columns)
        self._open[known] = table
        return table

    def _row(self, key: Key, at: int, columns: list[str]) -> dict[str, Any]:
        """Columns of a row and, where it was trained, what the trainer recorded of it."""
        own = ["metrics" if name == "parts" else name for name in columns]
        found: dict[str, Any] = self._read(key, own).slice(at, 1).to_pylist()[0]
        chunk = self.rows.get(key)
        assert chunk is not None
        wanted = [name for name in columns if name in TRAINER_COLUMNS]
        if wanted and key[1] == KEPT and chunk["train_step"][at] != NONE:
            self._guarded(key, lambda: found.update(self._of_trainer(key[0], chunk, at, wanted)))
        return found

    def _of_trainer(
        self, stage: int, chunk: Chunk, at: int, columns: list[str]
    ) -> Mapping[str, Any]:
        for key, part in self._parts.items():
            if key[0] == stage and key[1] == TRAINER and part.step == chunk["train_step"][at]:
                ids = hashes(column(index_of(part, self._read(key, list(NEEDED))), "id"))
                (rows,) = np.nonzero(ids == chunk["id"][at])
                if len(rows):
                    return self._read(key, columns).slice(int(rows[-1]), 1).to_pylist()[0]
        return {}

    def _decoder(self, stage: int) -> tuple[Any, Optional[str]]:
        """The tokenizer of a stage, or why there is none."""
        if stage not in self._decoders:
            from trinity_dask.view.tokenizers import decoder_of

            self._decoders[stage] = decoder_of(self._stages[stage][0])
        return self._decoders[stage]


def _matches(texts: pa.Array, wanted: str) -> pa.Array:
    """Where a text is: as it is, whatever the case; or ``/an expression/``. Raises QueryError."""
    if len(wanted) > 2 and wanted.startswith("/") and wanted.endswith("/"):
        try:
            return pc.match_substring_regex(texts, wanted[1:-1])
        except pa.ArrowInvalid as error:
            raise QueryError(f"{wanted} is no regular expression: {error}") from None
    return pc.match_substring(texts, wanted, ignore_case=True)


def _share(rows: Rows, done: Callable[[Key, Chunk], bool]) -> float:
    chunks = [(len(chunk["id"]), done(key, chunk)) for key, chunk in rows.chunks()]
    return sum(n for n, yes in chunks if yes) / max(sum(n for n, _ in chunks), 1)


def _joined(rows: Rows, of: Callable[[Key, Chunk], Optional[np.ndarray]], dtype: Any) -> np.ndarray:
    """What is known of every row, in order; 0 of those that nothing is known of."""
    parts = [(of(key, chunk), len(chunk["id"])) for key, chunk in rows.chunks()]
    found = [np.zeros(n, dtype) if part is None else part for part, n in parts]
    return np.concatenate(found) if found else np.empty(0, dtype)

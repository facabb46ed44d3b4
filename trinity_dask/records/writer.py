"""Records are written: bounded, durable, and never in the way of what they are about.

Invariant: what is beyond a bound is counted, never silently gone: written + left out is what the
accounts say. A record that cannot be written is a warning and counts as left out; no step fails
for it. Files appear whole (see :mod:`~trinity_dask.records.layout`), so a kill leaves none in
part, and at worst one that no manifest names.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from trinity_dask.buffer.store.experience_store import (
    FsspecFiles,
    LocalFiles,
    open_files,
    serialise,
)
from trinity_dask.buffer.store.manifest import batch_key
from trinity_dask.config.schema import Config, MonitorConfig
from trinity_dask.records.layout import (
    META_KEY,
    RECORDS_KEY,
    TRAINER,
    eval_path,
    records_url,
    storage_options,
)

log = logging.getLogger("trinity_dask.records")

MB = 1 << 20


@dataclass(frozen=True)
class Entry:
    """What a manifest says of a record: its file ("" where there is none) and its counts."""

    path: str
    rows: int
    left_out: int


class Recorder:
    """Writes the records of one stage, within ``monitor.record_*``. Blocking: for threads."""

    def __init__(self, cfg: Config) -> None:
        self.limits: MonitorConfig = cfg.monitor
        self.url = records_url(cfg)
        self._options = storage_options(cfg)
        self._explorer = cfg.explorer.name

    @cached_property
    def _files(self) -> LocalFiles | FsspecFiles:
        return open_files(self.url, self._options)

    def of_batch(
        self, kind: str, batch_id: int | str, table: Callable[[], pa.Table], total: int
    ) -> Entry:
        """Write rows of a batch that is about to be committed: the first of ``total``.

        The entry belongs into the manifest, under ``RECORDS_KEY``: it makes them exist.
        """
        if not total or not getattr(self.limits, f"record_{kind}"):
            return Entry("", 0, total)
        path = f"{kind}/{batch_key(batch_id)}-{uuid.uuid4().hex}.arrow"
        rows = self._put(path, self._within(table()), total, {"batch": batch_id})
        return Entry(path if rows else "", rows, total - rows)

    def evaluation(
        self, step: int, model_version: int, name: str, table: pa.Table, total: int
    ) -> None:
        """Write answers of an evaluation; those of the same one before are replaced."""
        path = eval_path(step, model_version, self._explorer, name)
        facts = {"name": name, "model_version": model_version}
        self._put(path, self._within(table), total, facts)

    def train_step(
        self, step: int, rank: int, world_size: int, table: pa.Table, with_numbers: int
    ) -> None:
        """Write what one rank did in a train step; a step that is done again is replaced.

        All rows are named; the first ``with_numbers`` have their log-probs and the like.
        """
        path = f"{TRAINER}/{step}.{rank}of{world_size}.arrow"
        self._put(path, table, table.num_rows, {"with_numbers": with_numbers})

    def _within(self, table: pa.Table) -> pa.Table:
        return within(table, int(self.limits.record_mb * MB))

    def _put(self, path: str, table: pa.Table, total: int, facts: Mapping[str, Any]) -> int:
        """How many rows were written."""
        rows = table.num_rows
        meta = {**facts, "total": total, "left_out": total - rows, "time": time.time()}
        named = table.replace_schema_metadata({META_KEY: json.dumps(meta).encode()})
        try:
            self._files.put(path, serialise(named))
        except Exception as error:  # whatever a file system raises
            log.warning(
                "%d rows are not recorded: writing %s/%s failed with %s: %s",
                rows,
                self.url,
                path,
                type(error).__name__,
                error,
            )
            return 0
        if total > rows:
            log.info("%s: %d of %d rows recorded (monitor.record_*)", path, rows, total)
        return rows

    def sweep(self, manifests: Sequence[Any]) -> int:
        """Remove files of committed batches that their manifests do not name: a writer was killed
        before its commit. Returns how many."""
        named = {batch_key(m.batch_id): m.meta.get(RECORDS_KEY, {}) for m in manifests}
        kinds = {kind for entries in named.values() for kind in entries}
        removed = 0
        for kind in kinds:
            for path in self._files.list(kind):
                entries = named.get(Path(path).stem.rpartition("-")[0])
                if entries is not None and entries.get(kind, {}).get("path") != path:
                    self._files.discard(path)
                    removed += 1
        return removed


def entries(found: Mapping[str, Entry]) -> dict[str, Any]:
    """For the meta of a manifest: nothing where nothing happened."""
    told = {kind: asdict(e) for kind, e in found.items() if e.rows or e.left_out}
    return {RECORDS_KEY: told} if told else {}


def within(table: pa.Table, max_bytes: int) -> pa.Table:
    """As many first rows as fit into ``max_bytes`` of Arrow memory; never a part of a row."""
    low, high = 0, table.num_rows
    while low < high:
        middle = (low + high + 1) // 2
        if table.slice(0, middle).nbytes <= max_bytes:
            low = middle
        else:
            high = middle - 1
    return table.slice(0, low)

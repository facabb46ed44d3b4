"""One reader over every row of a job: kept and trained ones, filtered, failed, evaluated.

Invariant: read only, from files alone, so it works for live, finished and killed runs alike; a
row that was committed and later trained is one row. What has been read of a file that cannot
change is kept, so looking again costs only what is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from trinity_dask.experience.schema import SCHEMA, column
from trinity_dask.records.index import INDEX, NEEDED, index_of, trainings, with_trainings
from trinity_dask.records.layout import (
    EVAL,
    FAILED,
    FAILED_SCHEMA,
    FILTERED,
    KEPT,
    RECORDS_KEY,
    TRAINER,
    TRAINER_COLUMNS,
    Part,
    Source,
    saved_stages,
)

if TYPE_CHECKING:
    import pandas as pd

TRAINED = "trained"
STATUSES = (TRAINED, KEPT, FILTERED, FAILED, EVAL)
_OF_FILES = {
    **{f.name: f.type for f in SCHEMA if f.name not in INDEX.names},
    **{n: FAILED_SCHEMA.field(n).type for n in ("traceback", "earlier", "source")},
}
#: what :meth:`Rollouts.table` gives beside the index, when asked
EXTRA = (*_OF_FILES, *TRAINER_COLUMNS)


def rollouts(
    job_dir: str | Path,
    *,
    step: int | None = None,
    group: str | int | None = None,
    status: str | Iterable[str] | None = None,
    stage: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Rollouts:
    """The rows of a job, by its directory (or that of a stage), or the URL of a bare store.

    Args:
        step: of the explorer, the evaluation, or (rows of a file) the train step.
        group: ``"batch/task"``, or the id of a task.
        status: one or some of ``trained``, ``kept``, ``filtered``, ``failed``, ``eval``.
        stage: name of one stage; None: all.
        storage_options: of the file system, for a URL.

    Raises:
        LookupError: there is no run in the directory, or no such stage.
        ValueError: an unknown status.
    """
    if "://" in str(job_dir):
        url = str(job_dir).rstrip("/")
        options = dict(storage_options or {})
        sources = [Source("", url, f"{url}/records", options, options)]
    else:
        sources = [Source.of(cfg) for cfg in saved_stages(job_dir)]
    if stage is not None:
        known = ", ".join(source.stage for source in sources)
        sources = [source for source in sources if source.stage == stage]
        if not sources:
            raise LookupError(f"{job_dir} has no stage {stage!r}; it has {known}")
    return Rollouts(sources).where(step=step, group=group, status=status)


class Rollouts:
    """Rows of some stages, perhaps only those of a step, a group, some statuses."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.step: int | None = None
        self.group: str | None = None
        self.statuses: frozenset[str] = frozenset(STATUSES)
        self._indices: dict[tuple[int, str], tuple[float, pa.Table]] = {}

    def where(
        self,
        *,
        step: int | None = None,
        group: str | int | None = None,
        status: str | Iterable[str] | None = None,
    ) -> Rollouts:
        """Those of these rows that are of a step, a group, some statuses (None: any)."""
        wanted = {status} if isinstance(status, str) else set(status or self.statuses)
        if unknown := wanted - set(STATUSES):
            raise ValueError(
                f"status {', '.join(sorted(unknown))} is unknown; use {', '.join(STATUSES)}"
            )
        found = Rollouts(self.sources)
        found._indices = self._indices
        found.step = self.step if step is None else step
        found.group = self.group if group is None else str(group)
        found.statuses = self.statuses & wanted
        return found

    def parts(self, source: Source) -> list[Part]:
        """The files of the wanted rows of a stage as they are now, in order; all of the
        trainer's among them, since nobody knows without them when a row was trained."""
        kinds = set(self.statuses - {TRAINED})
        if self.statuses & {TRAINED, KEPT}:
            kinds |= {KEPT, TRAINER}
        return [
            part
            for part in source.parts()
            if part.kind in kinds
            and (self.step is None or part.kind == TRAINER or part.step == self.step)
        ]

    # rows -------------------------------------------------------------------------------
    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row each: the columns of ``INDEX``, or those named, which may be of ``EXTRA`` too.

        ``tokens``, ``logprobs``, ``versions``, ``action_mask``, texts and the like come from the
        row's own file; ``train_logprobs``, ``train_entropy``, ``train_advantages`` and
        ``train_mask`` from the last step that trained it, null where that was not recorded.

        Raises:
            ValueError: an unknown column (lists those there are).
            OSError: a file that a manifest names is gone.
        """
        names = list(INDEX.names if columns is None else columns)
        if unknown := [n for n in names if n not in INDEX.names and n not in EXTRA]:
            raise ValueError(
                f"no column {', '.join(unknown)}; there are {', '.join((*INDEX.names, *EXTRA))}"
            )
        extra = [n for n in names if n not in INDEX.names]
        pieces: list[pa.Table] = []
        for source in self.sources:
            pieces += self._of_source(source, extra)
        if not pieces:
            schema = [*INDEX, *(pa.field(n, self._type(n)) for n in extra)]
            return pa.schema(schema).empty_table().select(names)
        return pa.concat_tables(pieces).select(names)

    def to_pandas(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """:meth:`table` as a data frame."""
        return self.table(columns).to_pandas()

    def __len__(self) -> int:
        return self.table(["row"]).num_rows

    # of one stage -------------------------------------------------------------------------
    def _of_source(self, source: Source, extra: list[str]) -> list[pa.Table]:
        mine = self.parts(source)
        in_files = [part for part in mine if part.kind == TRAINER]
        train_index = [self.index(source, part) for part in in_files]
        joined = pa.concat_tables(train_index) if train_index else INDEX.empty_table()
        trained = trainings(joined)
        of_trainer = [n for n in extra if n in TRAINER_COLUMNS]
        pieces: list[pa.Table] = []
        for part in mine:
            if part.kind == TRAINER:
                continue
            index = self.index(source, part)
            if part.kind == KEPT:
                index = with_trainings(index, trained)
            index = self._chosen(index)
            if index.num_rows:
                index = self._with_columns(source, part, index, extra)
                pieces.append(self._with_trainer(source, in_files, index, of_trainer))
        if source.store_url is None:  # rows of a file: the trainer's files are all there is
            for part, index in zip(in_files, train_index, strict=True):
                index = self._chosen(index)
                if index.num_rows:
                    pieces.append(self._with_columns(source, part, index, extra))
        order = [*INDEX.names, *extra]
        return [piece.select(order) for piece in pieces]

    def index(self, source: Source, part: Part) -> pa.Table:
        """The index of one file, from memory where it was read before. ``trained`` is not told of
        kept rows here; see :func:`~trinity_dask.records.index.with_trainings`."""
        key = (id(source), part.path)
        known = self._indices.get(key)
        if known is None or known[0] != part.version:
            made = index_of(part, source.read(part, list(NEEDED)))
            known = self._indices[key] = part.version, made
        return known[1]

    def _chosen(self, index: pa.Table) -> pa.Table:
        masks = []
        if self.statuses != frozenset(STATUSES):
            masks.append(pc.is_in(index["status"], value_set=pa.array(sorted(self.statuses))))
        if self.group is not None:
            name = "group" if "/" in self.group else "task"
            masks.append(pc.equal(index[name], self.group))
        if self.step is not None:
            masks.append(pc.equal(index["step"], self.step))
        return index.filter(reduce(pc.and_, masks)) if masks else index

    def _with_columns(
        self, source: Source, part: Part, index: pa.Table, extra: list[str]
    ) -> pa.Table:
        """``index`` with columns of its own file, null where the file has none."""
        names = [n for n in extra if n in _OF_FILES or part.kind == TRAINER]
        if not names:
            return index
        rows = source.read(part, names).take(column(index, "row"))
        for name in names:
            if name in rows.column_names:
                values = rows[name].cast(self._type(name))
            else:
                values = pa.nulls(index.num_rows, self._type(name))
            index = index.append_column(pa.field(name, self._type(name)), values)
        return index

    def _with_trainer(
        self, source: Source, files: list[Part], index: pa.Table, names: list[str]
    ) -> pa.Table:
        """``index`` with the trainer's columns, from the files of the steps that trained rows."""
        if not names:
            return index
        steps = set(index["train_step"].drop_null().to_pylist())
        ids, tables = [pa.array([], pa.string())], []
        for part in files:
            if part.step in steps:
                of_part = self.index(source, part)
                # an id may have been trained before: the step tells the last time
                key = pc.binary_join_element_wise(
                    column(of_part, "id"), pa.repeat(str(part.step), of_part.num_rows), "@"
                )
                ids.append(key)
                tables.append(source.read(part, names).select(names))
        steps_of = pc.cast(column(index, "train_step"), pa.string())
        wanted = pc.binary_join_element_wise(column(index, "id"), steps_of, "@")
        at = pc.index_in(wanted, value_set=pa.concat_arrays(ids))
        rows = pa.concat_tables(tables).take(at) if tables else None
        for name in names:
            none = pa.nulls(index.num_rows, self._type(name))
            values = none if rows is None else rows[name].cast(self._type(name))
            index = index.append_column(pa.field(name, self._type(name)), values)
        return index

    @staticmethod
    def _type(name: str) -> pa.DataType:
        return _OF_FILES.get(name) or TRAINER_COLUMNS[name]

    # what is not there ----------------------------------------------------------------------
    def left_out(self) -> dict[str, int]:
        """Filtered rows and failed runs that were beyond the bounds of ``monitor.record_*``."""
        return {kind: counts["left_out"] for kind, counts in self.accounts().items()}

    def accounts(self) -> dict[str, dict[str, int]]:
        """Of ``filtered`` (rows) and ``failed`` (runs): how many were ``recorded``, ``left_out``,
        and how many the manifests have ``counted``.

        The first two make the third in a job that was recorded from its beginning.
        """
        found = {kind: {"recorded": 0, "left_out": 0, "counted": 0} for kind in (FILTERED, FAILED)}
        kept = (p for source in self.sources for p in source.parts() if p.kind == KEPT)
        for meta in (part.meta for part in kept):
            for kind, counts in found.items():
                entry = meta.get(RECORDS_KEY, {}).get(kind, {})
                counts["recorded"] += int(entry.get("rows", 0))
                counts["left_out"] += int(entry.get("left_out", 0))
                counts["counted"] += int(meta.get("accounts", {}).get(kind, 0))
        return found

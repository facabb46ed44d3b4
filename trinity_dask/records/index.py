"""The index of rows: one narrow, flat row for each, whatever file it lies in.

Invariant: an index is made column by column, without a loop over rows, and never touches texts;
``path`` and ``row`` say where the rest of a row is. Every kind of part has the same columns, null
where a kind has none.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trinity_dask.experience.schema import column, list_values
from trinity_dask.records.layout import EVAL, FAILED, FILTERED, KEPT, TRAINER, Part

INDEX = pa.schema(
    [
        ("status", pa.string()),  # trained, kept, filtered, failed, eval
        ("stage", pa.string()),
        ("step", pa.int64()),  # of the explorer; of a row of a file: its train step
        ("group", pa.string()),  # batch/task: all runs of a task; task ids repeat in every batch
        ("batch", pa.string()),
        ("task", pa.string()),
        ("run", pa.int64()),
        ("turn", pa.int64()),  # of a run of several experiences
        ("id", pa.string()),  # batch/task/run/turn/suffix, as Experience.eid.uid
        ("explorer", pa.string()),
        ("eval", pa.string()),  # name of the eval taskset
        ("reward", pa.float64()),
        ("parts", pa.string()),  # the reward's parts and other metrics, as JSON
        ("prompt_length", pa.int32()),  # tokens
        ("length", pa.int32()),  # tokens of the response
        ("finish", pa.string()),  # stop, length, ... as the engine said; null where unknown
        ("truncated", pa.string()),  # response_truncated, prompt_truncated
        ("version_min", pa.int64()),  # of the model that sampled the tokens
        ("version_max", pa.int64()),
        ("error", pa.string()),  # of a failed run: type and message
        ("attempts", pa.int32()),
        ("operator", pa.string()),  # that dropped the row
        ("reason", pa.string()),
        ("train_step", pa.int64()),  # the last step that trained the row
        ("uses", pa.int32()),  # how often it was trained
        ("path", pa.string()),
        ("row", pa.int64()),  # in that file
    ]
)
# the columns of a file that an index is made of
NEEDED = (
    *("batch", "task", "run", "step", "suffix", "reward", "metrics", "prompt_length", "tokens"),
    *("info", "truncate_status", "versions", "error", "attempts", "operator", "reason"),
)
_FINISH = r'"finish_reason":"(?P<finish>[^"\\]*)"'
_STATUS = {KEPT: KEPT, FILTERED: FILTERED, FAILED: FAILED, EVAL: EVAL, TRAINER: "trained"}


def index_of(part: Part, table: pa.Table) -> pa.Table:
    """The rows of ``part``, read with at least the columns of ``NEEDED`` that it has."""
    n = table.num_rows
    present = set(table.column_names)
    constant = {
        "status": _STATUS[part.kind],
        "stage": part.stage,
        "step": part.step,
        "eval": part.name or None,
        "explorer": part.meta.get("explorer"),
        "path": part.path,
    }
    found: dict[str, pa.Array] = {
        name: pa.repeat(pa.scalar(value, INDEX.field(name).type), n)
        for name, value in constant.items()
    }
    for name in ("reward", "run", "error", "attempts", "operator", "reason", "prompt_length"):
        if name in present:
            found[name] = column(table, name)
    batch, task = column(table, "batch"), column(table, "task")
    found |= {"batch": batch, "task": task, "row": pa.array(np.arange(n))}
    found["group"] = pc.binary_join_element_wise(batch, task, "/")
    if "suffix" in present:
        turn = column(table, "step")
        numbers = (pc.cast(each, pa.string()) for each in (column(table, "run"), turn))
        suffix = column(table, "suffix")
        found["turn"] = turn
        found["id"] = pc.binary_join_element_wise(found["group"], *numbers, suffix, "/")
    if "tokens" in present:
        lengths = pc.list_value_length(column(table, "tokens"))
        found["length"] = pc.cast(pc.subtract(lengths, found["prompt_length"]), pa.int32())
        found |= _versions(column(table, "versions"))
        found["parts"] = column(table, "metrics")
        found["truncated"] = column(table, "truncate_status")
        said = pc.struct_field(pc.extract_regex(column(table, "info"), _FINISH), "finish")
        found["finish"] = said
    if part.kind == TRAINER:
        found["train_step"] = found["step"]
        found["uses"] = pa.repeat(pa.scalar(1, pa.int32()), n)
    arrays = [
        pc.cast(found[f.name], f.type) if f.name in found else pa.nulls(n, f.type) for f in INDEX
    ]
    return pa.Table.from_arrays(arrays, schema=INDEX)


def _versions(versions: pa.Array) -> dict[str, pa.Array]:
    """Oldest and newest version that sampled a token of each row; null where none is known."""
    values, offsets = list_values(versions)
    n = len(versions)
    never = np.iinfo(np.int32).max
    low, high = np.full(n, never, np.int64), np.full(n, -1, np.int64)
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        # tokens that no model sampled (a tool's, the user's) carry a negative version
        low[filled] = np.minimum.reduceat(np.where(values < 0, never, values), offsets[filled])
        high[filled] = np.maximum.reduceat(values, offsets[filled])
    unknown = high < 0
    return {
        "version_min": pa.array(low, mask=unknown),
        "version_max": pa.array(high, mask=unknown),
    }


def trainings(index: pa.Table) -> pa.Table:
    """``id``, ``train_step`` (the last) and ``uses`` of an index of trained rows."""
    grouped = index.group_by("id").aggregate([("train_step", "max"), ("uses", "sum")])
    return grouped.rename_columns(
        [
            {"train_step_max": "train_step", "uses_sum": "uses"}.get(n, n)
            for n in grouped.column_names
        ]
    )


def with_trainings(index: pa.Table, trained: pa.Table) -> pa.Table:
    """An index of rows in which those that were trained (of :func:`trainings`) say so."""
    if not trained.num_rows or not index.num_rows:
        return index
    at = pc.index_in(column(index, "id"), value_set=column(trained, "id"))
    status = pc.if_else(pc.is_valid(at), "trained", column(index, "status"))
    for name, values in (
        ("status", status),
        ("train_step", column(trained, "train_step").take(at)),
        ("uses", pc.cast(column(trained, "uses"), pa.int32()).take(at)),
    ):
        index = index.set_column(index.column_names.index(name), INDEX.field(name), values)
    return index

"""What is remembered of a batch on its way: rows that a step dropped, runs that failed.

Invariant: a row is dropped by one step, the first that did not return it, and is recorded as it
was then; what is remembered is bounded, what is counted is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import pyarrow as pa

from trinity_dask.experience import Experience
from trinity_dask.experience.schema import LazyRows, to_table
from trinity_dask.records.layout import FAILED_SCHEMA, FILTERED_SCHEMA

Why = Callable[[Sequence[Experience]], str]


@dataclass
class Dropped:
    """The first ``limit`` rows that steps of the pipeline dropped from a batch."""

    limit: int
    source: Optional[LazyRows] = None  # of which the rows are
    rows: list[Experience] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def compare(
        self,
        operator: str,
        before: Sequence[Experience],
        after: Sequence[Experience],
        why: Optional[Why] = None,
    ) -> None:
        """``operator`` made ``after`` of ``before``; ``why`` tells of the rows of one task, as
        they were before, for what reason some of them were dropped."""
        room = self.limit - len(self.rows)
        if room <= 0 or len(after) == len(before):
            return
        kept = set(map(id, after))
        gone = [exp for exp in before if id(exp) not in kept]
        if len(gone) != len(before) - len(after):  # it returned copies
            names = {exp.eid.uid for exp in after}
            gone = [exp for exp in before if exp.eid.uid not in names]
        gone = gone[:room]
        told: dict[str, str] = {}
        if why is not None:
            groups: dict[str, list[Experience]] = {exp.eid.tid: [] for exp in gone}
            for exp in before:
                if exp.eid.tid in groups:
                    groups[exp.eid.tid].append(exp)
            told = {tid: _told(why, group) for tid, group in groups.items()}
        self.rows += gone
        self.operators += [operator] * len(gone)
        self.reasons += [told.get(exp.eid.tid, "") if told else "" for exp in gone]

    def table(self) -> pa.Table:
        """Of ``FILTERED_SCHEMA``."""
        table = to_table([]) if self.source is None else self.source.to_table(self.rows)
        for name, values in (("operator", self.operators), ("reason", self.reasons)):
            table = table.append_column(name, pa.array(values, pa.string()))
        return table.cast(FILTERED_SCHEMA)


def _told(why: Why, group: Sequence[Experience]) -> str:
    """The reason; of a user's operator whatever comes of asking, since the batch is worth more."""
    try:
        return str(why(group))
    except Exception as error:
        return f"unknown: why() raised {type(error).__name__}: {error}"


def failed_table(runs: Sequence[Any]) -> pa.Table:
    """Failed runs (the scheduler's ``FailedRun``) as a table of ``FAILED_SCHEMA``."""
    rows = [
        {
            "batch": str(run.batch_id),
            "batch_is_int": not isinstance(run.batch_id, str),
            "task": str(run.task_id),
            "task_is_int": not isinstance(run.task_id, str),
            "run": run.run,
            "attempts": run.attempts,
            "error": _printable(str(run.error)),
            "traceback": _printable(run.error.traceback),
            "earlier": [_printable(text) for text in run.earlier],
            "prompt_text": _printable(run.prompt),
            "source": _printable(run.source),
        }
        for run in runs
    ]
    return pa.Table.from_pylist(rows, schema=FAILED_SCHEMA)


def _printable(text: str) -> str:
    """As Unicode: a message may quote lone surrogates, which no file can hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

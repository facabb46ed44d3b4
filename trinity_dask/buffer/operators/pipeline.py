"""From the payloads of one batch to the rows that are committed.

Invariant: rows in = rows out + filtered. Operators run in the configured order over the
whole batch, then the grouped advantage, so that a group is seen whole. The batch stays one
table: what no step looks at is never converted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trinity_dask.buffer.data.taskset import SELECTOR_METRIC
from trinity_dask.buffer.operators.operators import OPERATORS
from trinity_dask.config.schema import OperatorConfig
from trinity_dask.experience import Experience
from trinity_dask.experience.schema import SCHEMA, LazyRows, group_codes
from trinity_dask.registry import build

Metrics = dict[str, Any]
AdvantageFn = Callable[[list[Experience]], tuple[list[Experience], Metrics]]
PREFIX = "experience_pipeline"
# a cut answer is masked or punished, never both: punishing what is masked moves the others
EXCLUSIVE = ("mask_response_truncated", "overlong_penalty")


class ExperiencePipeline:
    """Operators and an advantage function over the experiences of one batch.

    Raises:
        ValueError: an unknown operator or operator argument, with the nearest name, or
            operators that exclude each other.
    """

    def __init__(
        self, operators: Sequence[OperatorConfig], advantage_fn: AdvantageFn | None = None
    ) -> None:
        if {cfg.name for cfg in operators}.issuperset(EXCLUSIVE):
            raise ValueError(
                f"operators {' and '.join(EXCLUSIVE)} exclude each other: a cut answer is either "
                "masked or punished; leave one of them out"
            )
        self._steps: list[tuple[str, AdvantageFn]] = []
        for place, cfg in enumerate(operators):
            used = sum(other.name == cfg.name for other in operators[:place])
            label = f"{cfg.name}#{used + 1}" if used else cfg.name
            operator = build(f"operator {cfg.name!r}", OPERATORS.get(cfg.name), cfg.args)
            self._steps.append((label, operator.process))
        if advantage_fn is not None:
            self._steps.append(("advantage", advantage_fn))

    def process(self, tables: list[pa.Table]) -> tuple[pa.Table, Metrics, int]:
        """Table to commit, metrics (``experience_pipeline/...``), and rows filtered out.

        The rows of a task are made to lie together. An operator's metrics carry its name,
        so two operators never overwrite each other; ``selector_metric``, which is no
        number, is passed on under its own name, several of them as one.
        """
        started = time.perf_counter()
        table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
        codes = group_codes(table)
        if np.any(np.diff(codes) < 0):  # a group's rows lie apart: stable, by first appearance
            table = table.take(pa.array(np.argsort(codes, kind="stable")))
        rows = LazyRows(table)
        experiences = rows.experiences
        metrics: Metrics = {}
        for label, step in self._steps:
            before = len(experiences)
            experiences, found = step(experiences)
            if len(experiences) > before:
                raise ValueError(
                    f"pipeline step {label!r} returned {len(experiences)} of {before} "
                    "experiences; a step may change or drop rows, not add them"
                )
            observed = found.pop(SELECTOR_METRIC, None)
            if observed is not None:
                metrics[SELECTOR_METRIC] = {**metrics.get(SELECTOR_METRIC, {}), **observed}
            for key, value in found.items():
                name = key if key.startswith("time/") else f"{PREFIX}/{label}/{key}"
                metrics[name] = float(value)
        result = rows.to_table(experiences)
        metrics[f"{PREFIX}/experience_count"] = float(result.num_rows)
        metrics[f"time/{PREFIX}"] = time.perf_counter() - started
        return result, metrics, table.num_rows - result.num_rows

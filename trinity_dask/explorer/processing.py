"""From the payloads of a batch to the rows that are committed, with what they look like.

Invariant: rows in = rows out + filtered; a pipeline that says otherwise is an error. All of
it is CPU work, so :meth:`Processing.process` belongs in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from trinity_dask.algorithm.table import resolve_algorithm
from trinity_dask.buffer.operators.pipeline import ExperiencePipeline
from trinity_dask.config.schema import Config
from trinity_dask.experience.payload import decode
from trinity_dask.explorer.batch_stats import row_statistics
from trinity_dask.registry import load_plugins

log = logging.getLogger("trinity_dask.coordinator")

TRUNCATED_ALARM = 0.5
Processed = tuple[pa.Table, dict[str, Any], int]


class BatchFailed(RuntimeError):
    """Nothing of a batch can be trained on; the message quotes the first error."""


class Processing:
    """The experience pipeline of one explorer."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        load_plugins(cfg.plugin_dirs)  # they may register a function of the algorithm
        spec = resolve_algorithm(asdict(cfg.algorithm))
        in_trainer = getattr(spec, "advantage_in_trainer", False)
        advantage_fn = None if in_trainer else spec.advantage_fn
        self._pipeline = ExperiencePipeline(cfg.buffer.operators, advantage_fn)

    def process(self, payloads: Sequence[bytes]) -> Processed:
        """Rows to commit, metrics, rows filtered out.

        Raises:
            BatchFailed: no prompt of the batch fitted.
            RuntimeError: rows were lost in the pipeline.
        """
        # in the order of their tasks, whichever ended first: mini-batches depend on it
        tables = sorted((decode(payload)[0] for payload in payloads), key=_first_run)
        statistics = row_statistics(pa.concat_tables(tables)) if tables else {}
        table, metrics, filtered = self._pipeline.process(tables)
        produced = sum(t.num_rows for t in tables)
        if produced != table.num_rows + filtered:
            raise RuntimeError(
                f"the pipeline got {produced} rows and returned {table.num_rows}, but says it "
                f"filtered {filtered}"
            )
        warn_truncated(statistics)
        self._require_prompts(statistics)
        return table, {**metrics, **statistics}, filtered

    def _require_prompts(self, statistics: dict[str, float]) -> None:
        """A batch in which no prompt fitted has nothing to learn from, and neither has the next."""
        if statistics.get("rollout/prompt_truncated_share") == 1.0:
            raise BatchFailed(
                "every prompt of the batch is longer than model.max_prompt_tokens = "
                f"{self.cfg.model.max_prompt_tokens}, so nothing was sampled; raise it (and "
                "model.max_model_len), or shorten the prompts or the workflow's system prompt"
            )


def _first_run(table: pa.Table) -> tuple[int, str, int]:
    if table.num_rows == 0:
        return 0, "", 0
    task = table["task"][0].as_py()
    return len(task), task, table["run"][0].as_py()  # task 2 before task 10


def count_groups(table: pa.Table) -> int:
    """Tasks that have a row in the table."""
    return int(table.group_by(["batch", "task"]).aggregate([]).num_rows)


def warn_truncated(statistics: dict[str, float]) -> None:
    share = statistics.get("rollout/truncated_share", 0.0)
    if share > TRUNCATED_ALARM:
        log.warning(
            "%.0f %% of the responses were cut at their maximal length; rewards of cut answers "
            "say little. Raise model.max_response_tokens",
            100 * share,
        )

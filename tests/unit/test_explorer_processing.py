"""The rows of a batch, from the payloads of its tasks."""

from __future__ import annotations

import itertools

import numpy as np

from trinity_dask.config.schema import Config
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import encode
from trinity_dask.explorer.coordinator import ExperiencePipeline


def payload(task: int, base: int) -> bytes:
    rows = [
        Experience(
            np.arange(4, dtype=np.int32),
            prompt_length=2,
            eid=EID(batch=1, task=task, run=base + run),
            reward=float(run),
            logprobs=np.zeros(2, np.float32),
        )
        for run in range(2)
    ]
    return encode(rows, {})


def test_rows_are_in_the_order_of_their_tasks_whichever_ended_first() -> None:
    pipeline = ExperiencePipeline.from_config(Config())
    parts = [payload(10, 0), payload(2, 0), payload(2, 2), encode([], {})]
    for order in itertools.permutations(parts):
        table = pipeline.process(order)[0]
        found = list(zip(table["task"].to_pylist(), table["run"].to_pylist(), strict=True))
        assert found == [("2", 0), ("2", 1), ("2", 2), ("2", 3), ("10", 0), ("10", 1)]

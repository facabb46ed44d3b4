"""The rows of a batch, from the payloads of its tasks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from trinity_dask.config.schema import Config
from trinity_dask.experience import EID, PROMPT_TRUNCATED, Experience
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


def too_long(task: int) -> bytes:
    """Two runs of a prompt that was not sampled, as the model wrapper gives them."""
    rows = [
        Experience(
            np.arange(4, dtype=np.int32),
            prompt_length=3,
            eid=EID(batch=1, task=task, run=run),
            reward=0.0,
            logprobs=np.zeros(1, np.float32),
            action_mask=np.zeros(1, np.bool_),
            truncate_status=PROMPT_TRUNCATED,
        )
        for run in range(2)
    ]
    return encode(rows, {})


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "rloo"])
@pytest.mark.parametrize(
    ("long", "good", "kept", "filtered"),
    [(1, 0, 0, 2), (4, 0, 0, 8), (1, 1, 4, 0), (3, 1, 8, 0), (0, 2, 4, 0), (0, 0, 0, 0)],
)
def test_a_batch_of_prompts_that_are_too_long_is_passed(
    algorithm: str, long: int, good: int, kept: int, filtered: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Among others that fit their rows stay, masked; alone they are counted as filtered."""
    cfg = Config()
    cfg.algorithm.algorithm_type = algorithm
    parts = [*map(too_long, range(long)), *(payload(long + n, 0) for n in range(good))]
    table, metrics, dropped = ExperiencePipeline.from_config(cfg).process(parts)
    assert (table.num_rows, dropped) == (kept, filtered)
    if long:
        assert metrics["rollout/prompt_truncated_share"] == long / (long + good)
    assert ("is committed without rows" in caplog.text) == (filtered > 0)

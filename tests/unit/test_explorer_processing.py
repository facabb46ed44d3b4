"""The rows of a batch, from the payloads of its tasks."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

from trinity_dask.config.schema import Config, OperatorConfig
from trinity_dask.experience import EID, PROMPT_TRUNCATED, Experience
from trinity_dask.experience.schema import encode
from trinity_dask.explorer.coordinator import ExperiencePipeline, with_rows_kept
from trinity_dask.records.batch import Dropped
from trinity_dask.workflows import Task


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


def scored(task: int, rewards: list[float]) -> bytes:
    rows = [
        Experience(np.arange(4), prompt_length=2, eid=EID(1, task, run), reward=reward)
        for run, reward in enumerate(rewards)
    ]
    return encode(rows, {})


def test_what_operators_drop_is_told_with_the_first_that_did_and_why() -> None:
    cfg = Config()
    cfg.buffer.operators = [
        OperatorConfig("reward_filter", {"threshold": 0.0}),
        OperatorConfig("reward_std_filter"),
    ]
    parts = [scored(0, [-1.0, 0.0, 1.0]), scored(1, [0.5, 0.5]), scored(2, [1.0])]
    dropped = Dropped(100)
    _, _, filtered = ExperiencePipeline.from_config(cfg).process(parts, dropped)
    rows = dropped.table().select(["task", "run", "reward", "operator", "reason"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("0", 0, -1.0, "reward_filter", "no reward, or one below 0"),
        *(
            ("1", run, 0.5, "reward_std_filter", "2 runs that count, all with the same reward")
            for run in range(2)
        ),
        ("2", 0, 1.0, "reward_std_filter", "1 runs that count, all with the same reward"),
    ]
    assert filtered == len(rows)
    bounded = Dropped(2)
    ExperiencePipeline.from_config(cfg).process(parts, bounded)
    assert bounded.table().equals(dropped.table().slice(0, 2))


def test_an_operator_that_returns_copies_is_understood() -> None:
    def halve(exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        return [copy.copy(exp) for exp in exps[::2]], {}

    dropped = Dropped(100)
    ExperiencePipeline([], halve).process([scored(0, [1.0, 2.0, 3.0])], dropped)
    assert dropped.table()["reward"].to_pylist() == [2.0]


def test_prompts_that_are_too_long_are_dropped_as_such() -> None:
    dropped = Dropped(3)
    ExperiencePipeline.from_config(Config()).process([too_long(0), too_long(1)], dropped)
    assert dropped.table()["operator"].to_pylist() == [PROMPT_TRUNCATED] * 3


@pytest.mark.parametrize(
    ("n_tasks", "runs", "limit"), [(10, 1, 4), (10, 4, 8), (3, 2, 99), (5, 1, 0)]
)
def test_answers_to_be_kept_are_spread_over_the_tasks(n_tasks: int, runs: int, limit: int) -> None:
    tasks = [Task("w", repeat_times=runs, is_eval=True) for _ in range(n_tasks)]
    kept = [task.wants_rows for task in with_rows_kept(tasks, limit)]
    assert runs * sum(kept) == min(limit, n_tasks * runs)
    assert abs(sum(kept[: n_tasks // 2]) - sum(kept[n_tasks // 2 :])) <= 1


def test_an_operator_that_cannot_say_why_costs_no_batch() -> None:
    class Odd:
        def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
            return exps[1:], {}

        def why(self) -> str:
            return "takes no group"

    pipeline, dropped = ExperiencePipeline([]), Dropped(9)
    pipeline._steps = [("odd", Odd().process, Odd().why)]  # type: ignore[list-item]
    table, _, filtered = pipeline.process([scored(0, [1.0, 2.0])], dropped)
    assert (table.num_rows, filtered) == (1, 1)
    assert "why() raised TypeError" in dropped.table()["reason"][0].as_py()

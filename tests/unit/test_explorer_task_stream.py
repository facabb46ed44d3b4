"""Wherever a run is cut off, the resumed one reads the tasks that it would have read."""

from __future__ import annotations

import asyncio
import json
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trinity_dask.config.schema import Config, TasksetConfig
from trinity_dask.explorer.batches import (
    refill_id,
    signature,
    train_batch_id,
    train_step_of,
)
from trinity_dask.explorer.task_stream import TasksetReader, TaskStream

ROWS, BATCH, STEPS, WINDOW = 7, 2, 9, 2  # epochs end inside of batches


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("tasks") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(ROWS)))
    config = Config(mode="explore")
    config.buffer.batch_size = BATCH
    config.buffer.total_steps = STEPS
    config.explorer.max_inflight_batches = WINDOW
    taskset = TasksetConfig(path=str(path), workflow="simple_workflow")
    taskset.data_selector.selector_type = "shuffle"
    config.buffer.explorer_input.taskset = taskset
    return config


async def explore(
    stream: TaskStream, first: int, last_commit: int, refills: set[int]
) -> tuple[dict[int, list[int]], dict[int, dict[str, Any]]]:
    """Read ahead as the explorer does; returns what was read for each step, refills
    included, and what was stored with each commit."""
    read: dict[int, list[int]] = {}
    stored: dict[int, dict[str, Any]] = {}
    waiting: list[int] = []
    step = first
    while True:
        tasks = await stream.read(step) if step <= STEPS else None
        if tasks is not None:
            read[step] = [t.index["index"] for t in tasks]
            waiting.append(step)
            step += 1
        if len(waiting) == WINDOW or tasks is None:
            if not waiting:
                return read, stored
            done = waiting.pop(0)
            if done in refills:
                read[done] += [t.index["index"] for t in await stream.read_more()]
            stored[done] = json.loads(json.dumps(stream.state_at(done)))
            if done == last_commit:
                return read, stored


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    cuts=st.lists(st.integers(1, STEPS), max_size=3, unique=True),
    refills=st.sets(st.integers(1, STEPS)),
)
def test_fault_35_the_tasks_of_every_step_are_those_of_an_uninterrupted_run(
    cfg: Config, cuts: list[int], refills: set[int]
) -> None:
    async def main() -> None:
        whole, _ = await explore(TaskStream(TasksetReader(cfg)), 1, STEPS, refills)
        found: dict[int, list[int]] = {}
        stored: dict[int, dict[str, Any]] = {}
        last = 0
        for cut in [*sorted(cuts), STEPS]:
            if cut == last:
                continue
            stream = TaskStream(TasksetReader(cfg))
            if last:
                stream.load(stored[last], [(s, stored[s]) for s in sorted(stored)[-WINDOW:]])
            read, new = await explore(stream, last + 1, cut, refills)
            stored |= new
            found |= {step: tasks for step, tasks in read.items() if step <= cut}
            last = cut
        assert found == whole

    asyncio.run(main())


def learning(cfg: Config, rows: int, steps: int) -> Config:
    """The same tasks chosen by what was learned of them."""
    path = Path(cfg.buffer.explorer_input.taskset.path).with_name(f"hard{rows}.jsonl")
    lines = [json.dumps({"prompt": f"p{i}", "f0": 0.1, "f1": i / rows}) for i in range(rows)]
    path.write_text("\n".join(lines))
    own = deepcopy(cfg)
    own.buffer.total_steps, own.buffer.explorer_input.taskset.path = steps, str(path)
    chosen = own.buffer.explorer_input.taskset.data_selector
    chosen.selector_type, chosen.feature_keys = "difficulty_based", ["f0", "f1"]
    return own


async def learn(stream: TaskStream, first: int, last: int, refills: set[int]) -> list[Any]:
    """``(step, rows, stored, kept)`` of each step, committed one by one behind the window; those
    that are under way at the end are lost."""
    found: list[Any] = []
    read: dict[int, list[int]] = {}
    for step in range(first, last + WINDOW):
        if (tasks := await stream.read(step)) is not None:
            read[step] = [t.index["index"] for t in tasks]
        if (done := step - WINDOW + 1) in read:
            if done in refills:
                read[done] += [t.index["index"] for t in await stream.read_more()]
            values = [(row * 7 + done) % 5 / 4 for row in read[done]]
            stream.feedback(done, {"0": {"indices": read[done], "values": values}})
            stored = json.loads(json.dumps(stream.state_at(done)))
            kept = json.loads(json.dumps(stream.take_learned()))
            found.append((done, read[done], stored, kept))
    return found


@pytest.mark.parametrize("kept", ["kept", "one behind", "lost", "from the future"])
def test_what_a_selector_learned_is_in_no_commit_and_yet_resumed_exactly(
    cfg: Config, kept: str
) -> None:
    """Whatever became of the file of it, and wherever the run was cut off."""
    steps, cuts = 110, (20, 33, 34, 35, 71, 100)
    refills = {19, 34, 36, 99}
    mine = learning(cfg, 60, steps)

    async def main() -> None:
        whole = await learn(TaskStream(TasksetReader(mine)), 1, steps, refills)
        files = [None, *(file for *_, file in whole if file is not None)]
        assert len(files) == 4
        for cut in cuts:
            before = [f for *_, f in whole[:cut] if f is not None]
            last = {
                "kept": before[-1:],
                "one behind": before[-2:-1],
                "lost": [],
                "from the future": files[-1:],
            }[kept]
            done = [(step, stored) for step, _, stored, _ in whole[:cut]]
            told = {step: stored["selector_metric"] for step, stored in done}
            stream = TaskStream(TasksetReader(mine))
            stream.load(done[-1][1], done[-WINDOW:], last[0] if last else None, told)
            again = await learn(stream, cut + 1, min(cut + 8, steps), refills)
            assert [found[:3] for found in again] == [found[:3] for found in whole[cut : cut + 8]]

    asyncio.run(main())


def test_a_commit_is_as_large_with_many_rows_as_with_few(cfg: Config) -> None:
    async def size(rows: int) -> int:
        found = await learn(TaskStream(TasksetReader(learning(cfg, rows, 4))), 1, 3, {2})
        return max(len(json.dumps(stored)) for _, _, stored, _ in found)

    assert asyncio.run(size(4000)) < asyncio.run(size(40)) + 200


@pytest.mark.parametrize("again", [False, True])
def test_what_arrives_while_tasks_are_read_is_not_lost(
    cfg: Config, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A commit and its feedback come while the thread reads, for the first time or again."""
    reading, go_on = threading.Event(), threading.Event()
    reader, told = TasksetReader(cfg), {"0": {"indices": [1], "values": [0.5]}}
    real = reader.read

    def slow() -> Any:
        tasks = real()
        reading.set()
        assert go_on.wait(60)
        return tasks

    async def main() -> None:
        stream = TaskStream(reader)
        await stream.read(1)
        if again:
            first = TaskStream(TasksetReader(cfg))
            for step in (1, 2):
                await first.read(step)
            await first.read_more()
            stream.load(first.state_at(1))
        before = reader.train.state_dict()
        monkeypatch.setattr(reader, "read", slow)
        read = asyncio.ensure_future(stream.read(2))
        assert await asyncio.to_thread(reading.wait, 60)
        stream.feedback(1, told)
        stored = stream.state_at(1)
        go_on.set()
        await read
        assert stored["taskset_state"] == before
        assert len(stored.get("replay", [])) == again
        assert stored["selector_metric"] == told
        assert reader.train.state_dict()["pending"] == [[1, told]]

    asyncio.run(main())


def test_names_of_batches() -> None:
    assert signature("both", "any") is None
    assert signature("explore", "explorer") is None
    assert signature("explore", "explorer1") == "explorer1"
    assert train_batch_id(12, None) == 12
    assert train_batch_id(12, "a@b") == "12@a@b"
    assert refill_id(12, 1) == "12+1"
    assert refill_id("12@e", 2) == "12+2@e"
    assert train_step_of(12, None) == 12
    assert train_step_of("12@e", "e") == 12
    assert [train_step_of(b, "e") for b in (12, "12@f", "12+1@e", "eval", "12")] == [None] * 5
    assert [train_step_of(b, None) for b in ("12@e", "12+1", "name")] == [None] * 3

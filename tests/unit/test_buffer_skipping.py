"""Rows that cannot be used are passed and counted; the same rows come after any stop."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trinity_dask.buffer.data.row_file import RowFile
from trinity_dask.buffer.data.taskset import Taskset, TasksetScheduler
from trinity_dask.buffer.errors import DataError, EndOfData, EndOfTasks, UnusableRow
from trinity_dask.config.schema import (
    ExperienceBufferConfig,
    FormatConfig,
    SelectorConfig,
    TasksetConfig,
)
from trinity_dask.demo.tokenizer import ascii_tokenizer
from trinity_dask.experience.schema import from_table

TOKENIZER = ascii_tokenizer()
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(n: int, **of_row: dict[str, Any]) -> list[dict[str, Any]]:
    """``n`` good rows; those named ``r<index>`` are changed."""
    return [{"prompt": f"q{i}", "response": str(i)} | of_row.get(f"r{i}", {}) for i in range(n)]


def tasks_of(path: str, **given: Any) -> Taskset:
    fmt = FormatConfig(**given.pop("fmt", {}))
    order = SelectorConfig(given.pop("selector", "sequential"), 42, **given.pop("more", {}))
    cfg = TasksetConfig(path=path, workflow="w", reward_fn="r", format=fmt, data_selector=order)
    return Taskset(cfg, **{"batch_size": 2, **given})


def drain(tasks: Any) -> list[list[int]]:
    batches = []
    while True:
        try:
            batches.append([task.index["index"] for task in tasks.read()])
        except EndOfTasks:
            return batches


EMPTY = [{"prompt": None}, {"prompt": ""}, {"prompt": " \n"}, {"response": None}, {"response": " "}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("empty", EMPTY)
def test_the_next_row_takes_the_place_of_an_empty_one(
    tmp_path: Path, suffix: str, empty: dict[str, Any]
) -> None:
    path = write(tmp_path / f"t.{suffix}", numbered(6, r1=empty, r2=empty, r5=empty))
    tasks = tasks_of(path)
    assert drain(tasks) == [[0, 3], [3, 3], [4, 0]]
    assert tasks.skipped == 3
    evaluated = tasks_of(path, is_eval=True, batch_size=4)
    assert drain(evaluated) == [[0, 3], [4]]  # every usable row once
    with pytest.raises(DataError, match=rf"t\.{suffix}, row 1: .*(no value in column|is empty)"):
        drain(tasks_of(path, fmt={"empty_rows": "refuse"}))


@pytest.mark.parametrize("messages", [None, "", "[]", []])
def test_a_conversation_without_a_message_is_empty(tmp_path: Path, messages: Any) -> None:
    rows = [{"messages": [USER], "response": "1"}, {"messages": messages, "response": "1"}]
    tasks = tasks_of(write(tmp_path / "t.jsonl", rows), fmt={"prompt_type": "messages"})
    assert drain(tasks) == [[0, 0]]


@pytest.mark.parametrize("selector", ["sequential", "shuffle", "random", "offline_easy2hard"])
@pytest.mark.parametrize("cut", range(4))
def test_a_resumed_run_passes_the_same_rows(tmp_path: Path, selector: str, cut: int) -> None:
    rows = [row | {"level": i} for i, row in enumerate(numbered(7, r0={"prompt": ""}))]
    rows[3]["prompt"] = rows[4]["prompt"] = None  # type: ignore[assignment]
    path = write(tmp_path / "t.jsonl", rows)
    more = {"feature_keys": ["level"]} if selector == "offline_easy2hard" else {}

    def new() -> Taskset:
        return tasks_of(path, selector=selector, more=more)

    expected, first, second = drain(new()), new(), new()
    assert len(expected) == 3
    assert all(set(batch) <= {1, 2, 5, 6} for batch in expected)
    head = [[t.index["index"] for t in first.read()] for _ in range(min(cut, 3))]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + drain(second) == expected


@pytest.mark.parametrize("column", ["prompt", "response"])
def test_a_data_set_of_empty_rows_is_refused_at_once(tmp_path: Path, column: str) -> None:
    rows = [row | {column: None} for row in numbered(5)]
    with pytest.raises(DataError, match=rf"row 0: no value in column '{column}'"):
        tasks_of(write(tmp_path / "t.jsonl", rows))
    blank = [row | {"prompt": " "} for row in numbered(5)]
    with pytest.raises(DataError, match="row 0: no value in column 'prompt'"):
        tasks_of(write(tmp_path / "t.jsonl", blank))


@pytest.mark.parametrize("truth", [[], {}, float("nan")])
def test_a_truth_of_nothing_is_none(tmp_path: Path, truth: Any) -> None:
    path = write(tmp_path / "t.jsonl", numbered(4, r1={"response": truth}))
    assert drain(tasks_of(path)) == [[0, 2], [2, 3]]
    other = write(tmp_path / "o.jsonl", numbered(4, r1={"response": 0}, r2={"response": False}))
    assert drain(tasks_of(other)) == [[0, 1], [2, 3]]


def test_what_is_wrong_otherwise_is_no_empty_row(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", numbered(3, r1={"prompt": ["q"]}))
    with pytest.raises(DataError, match="row 1: column 'prompt' holds a list") as caught:
        drain(tasks_of(path))
    assert not isinstance(caught.value, UnusableRow)


def test_batches_larger_than_the_data(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", numbered(3))
    cfg = TasksetConfig(path=path, workflow="w")
    with pytest.raises(DataError, match=r"3 rows, in 1 epochs fewer than one batch"):
        TasksetScheduler([cfg], batch_size=4)
    assert drain(TasksetScheduler([cfg], batch_size=4, total_epochs=3)) == [
        [0, 1, 2, 0],
        [1, 2, 0, 1],
    ]
    assert drain(tasks_of(path, batch_size=2)) == [[0, 1]]  # the last one makes no batch
    assert drain(tasks_of(path, batch_size=2, is_eval=True)) == [[0, 1], [2]]


# -- training rows ---------------------------------------------------------------------------
def rows_of(path: str, schema: str = "sft", limit: int | None = None, **fmt: Any) -> RowFile:
    form = FormatConfig(**{"apply_chat_template": False, **fmt})
    cfg = ExperienceBufferConfig(path=path, format=form)
    return RowFile(cfg, TOKENIZER, batch_size=2, schema=schema, max_tokens=limit)


def answers(rows: RowFile, n: int = 2) -> list[list[str]]:
    found = []
    while True:
        try:
            batch = from_table(rows.read(n))
        except EndOfData:
            return found
        found.append(
            [TOKENIZER.decode(e.tokens[e.prompt_length :].tolist()).removesuffix("<|im_end|>")
             for e in batch]
        )  # fmt: skip


@pytest.mark.parametrize("empty", EMPTY)
def test_empty_training_rows_are_passed(tmp_path: Path, empty: dict[str, Any]) -> None:
    path = write(tmp_path / "r.jsonl", numbered(4, r1=empty))
    rows = rows_of(path)
    assert answers(rows) == [["0", "2"], ["2", "3"]]
    assert rows.skipped == 1
    with pytest.raises(DataError, match=r"r\.jsonl, row 1"):
        answers(rows_of(path, empty_rows="refuse"))


LONG = {"prompt": "q", "response": "x" * 30}
NO_ROOM = {"prompt": "q" * 30, "response": "1"}


@pytest.mark.parametrize(
    ("policy", "bad", "found"),
    [
        ("cut", LONG, [["0", "x" * 9], ["2", "3"]]),
        ("cut", NO_ROOM, [["0", "2"], ["2", "3"]]),
        ("skip", LONG, [["0", "2"], ["2", "3"]]),
        ("skip", NO_ROOM, [["0", "2"], ["2", "3"]]),
        ("refuse", LONG, None),
        ("refuse", NO_ROOM, None),
    ],
)
def test_long_training_rows(
    tmp_path: Path, policy: str, bad: dict[str, Any], found: list[list[str]] | None
) -> None:
    path = write(tmp_path / "r.jsonl", numbered(4, r1=bad))
    rows = rows_of(path, limit=10, long_rows=policy)
    if found is None:
        with pytest.raises(UnusableRow, match=r"r\.jsonl, row 1: 3\d tokens, the limit is 10"):
            answers(rows)
    else:
        assert answers(rows) == found


BLANK_CHATS = {
    "JSON text of null": "null",
    "JSON text of no turn": "[]",
    "spaces": " ",
    "a user without text": [{"role": "user", "content": None}, ANSWER],
    "a user of spaces": [USER, ANSWER, {"role": "user", "content": " "}, ANSWER],
    "an answer to nothing": [ANSWER],
    "an answer of nothing": [USER, {"role": "assistant", "content": None}],
}


@pytest.mark.parametrize("kind", BLANK_CHATS)
def test_blank_conversations_are_passed(tmp_path: Path, kind: str) -> None:
    data = [{"messages": [USER, {**ANSWER, "content": str(i)}], "response": "r"} for i in range(4)]
    data[1]["messages"] = BLANK_CHATS[kind]
    path = write(tmp_path / "r.jsonl", data)
    fmt = {"prompt_type": "messages", "apply_chat_template": True}
    for more in ({}, {"enable_concatenated_multi_turn": True}):
        rows = rows_of(path, **fmt, **more)
        assert answers(rows) == [["0", "2"], ["2", "3"]]
        assert rows.skipped == 1
        with pytest.raises(UnusableRow, match=r"r\.jsonl, row 1"):
            answers(rows_of(path, empty_rows="refuse", **fmt, **more))
    if kind != "an answer of nothing":  # a task does not need one
        assert drain(tasks_of(path, fmt={"prompt_type": "messages"})) == [[0, 2], [2, 3]]


def test_an_answer_that_only_calls_a_tool_is_learned(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    rows = rows_of(write(tmp_path / "r.jsonl", [{"messages": [USER, call]}] * 2),
                   prompt_type="messages")  # fmt: skip
    assert len(from_table(rows.read(2))) == 2
    assert rows.skipped == 0


def test_pairs_with_a_blank_side_are_passed(tmp_path: Path) -> None:
    pairs = [{"prompt": "q", "chosen": f"y{i}", "rejected": f"n{i}"} for i in range(2)]
    for blank in ({"rejected": ""}, {"chosen": " "}):
        path = write(tmp_path / "r.jsonl", [pairs[0] | blank, pairs[1]])
        batch = from_table(rows_of(path, "dpo").read(2))
        assert [e.response_text for e in batch] == ["y1", "n1"]


def test_a_pair_is_passed_as_a_whole(tmp_path: Path) -> None:
    pairs = [{"prompt": "q", "chosen": f"y{i}", "rejected": f"n{i}"} for i in range(3)]
    pairs[1]["rejected"] = "x" * 30
    path = write(tmp_path / "r.jsonl", pairs)
    rows = rows_of(path, "dpo", 12, long_rows="skip")
    batches = [from_table(rows.read(2)) for _ in range(3)]
    texts = [[e.response_text for e in batch] for batch in batches]
    assert texts == [["y0", "n0"], ["y2", "n2"], ["y2", "n2"]]
    groups = [{e.eid.tid for e in batch} for batch in batches]
    assert [len(group) for group in groups] == [1, 1, 1]
    assert len(set.union(*groups)) == 3  # two copies of a pair are no group of four


def test_no_usable_training_row_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [NO_ROOM] * 4)
    with pytest.raises(DataError, match="not one of its 4 rows can be used"):
        rows_of(path, limit=10).read(2)


# -- other data on resume --------------------------------------------------------------------
CHANGES = {
    "other rows": lambda rows: [row | {"prompt": "new " + row["prompt"]} for row in rows],
    "shuffled": lambda rows: rows[::-1],
    "one character": lambda rows: [*rows[:-1], rows[-1] | {"response": "8"}],
    "two rows swapped": lambda rows: [rows[1], rows[0], *rows[2:]],
    "fewer": lambda rows: rows[:-1],
    "more": lambda rows: [*rows, rows[0]],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "json"])
def test_other_data_is_seen_on_resume(
    tmp_path: Path, suffix: str, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    def save(rows: list[dict[str, Any]]) -> str:
        if suffix == "json":
            (tmp_path / "t.json").write_text(json.dumps(rows))
            return str(tmp_path / "t.json")
        return write(tmp_path / f"t.{suffix}", rows)

    path = save(numbered(8))
    tasks, rows = tasks_of(path), rows_of(path)
    tasks.read(), rows.read(2)
    states = json.loads(json.dumps([tasks.state_dict(), rows.state_dict()]))
    for same in (tasks_of(path, accept_other_data=False), rows_of(path)):
        same.load_state_dict(states[isinstance(same, RowFile)])
    assert not caplog.records
    save(CHANGES[change](numbered(8)))
    with pytest.raises(DataError, match=r"is not what it was .*buffer\.accept_other_data"):
        tasks_of(path, accept_other_data=False).load_state_dict(states[0])
    accepted = tasks_of(path)
    accepted.load_state_dict(states[0])
    assert "is not what it was" in caplog.text
    assert [task.index["index"] for task in accepted.read()] == [2, 3]


def test_the_same_rows_elsewhere_are_the_same(tmp_path: Path) -> None:
    state = tasks_of(write(tmp_path / "a.jsonl", numbered(8))).state_dict()
    (tmp_path / "moved").mkdir()
    moved = write(tmp_path / "moved/b.jsonl", numbered(8))
    tasks_of(moved, accept_other_data=False).load_state_dict(state)
    for before in ({"rows": 8, "read": 2, "selector": {"position": 2}},):  # saved without it
        tasks_of(moved, accept_other_data=False).load_state_dict(before)

"""Readers, selectors and tasksets: rows as they are, orders that resume exactly."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.buffer.data.readers import RowReader
from trinity_dask.buffer.data.selectors import SELECTORS
from trinity_dask.buffer.data.taskset import Taskset
from trinity_dask.buffer.errors import DataError, EndOfTasks
from trinity_dask.config.schema import FormatConfig, RolloutArgs, SelectorConfig, TasksetConfig

ROWS = [{"prompt": f"sort {i:03d}", "response": f"{i:03d}"} for i in range(5)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
    elif path.suffix == ".feather":
        pa.feather.write_feather(table, path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv", "feather", "arrow"])
def test_every_format_gives_the_rows_as_they_are(tmp_path: Path, suffix: str) -> None:
    reader = RowReader(str(write(tmp_path / f"x.{suffix}", ROWS)))
    assert [reader[i] for i in range(len(reader))] == ROWS
    with pytest.raises(IndexError):
        reader[5]


def test_json_lines_are_not_unified(tmp_path: Path) -> None:
    rows = [{"a": "2020-01-01", "t": {"x": 1}}, {"a": 5, "t": {"y": [None]}}, {"b": 1.5}]
    path = tmp_path / "x.jsonl"
    path.write_text("\r\n".join(json.dumps(row) for row in rows))
    reader = RowReader(str(path))
    assert [reader[i] for i in range(3)] == rows


@pytest.mark.parametrize(
    "layout",
    ["train.jsonl", "train-00000-of-00001.parquet", "data/train-0.jsonl", "train/anything.csv"],
)
def test_directories_by_split(tmp_path: Path, layout: str) -> None:
    write(tmp_path / layout, ROWS)
    write(tmp_path / "test.jsonl", ROWS[:1])
    assert len(RowReader(str(tmp_path), "train")) == 5
    assert len(RowReader(str(tmp_path), "test")) == 1
    with pytest.raises(DataError, match=r"no files of split 'val' .*test\.jsonl"):
        RowReader(str(tmp_path), "val")


def test_saved_datasets_directory(tmp_path: Path) -> None:
    """The layout of ``datasets.DatasetDict.save_to_disk``: shards in the order of its state."""
    shards = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    write(tmp_path / "train" / shards[0], ROWS[:3])
    write(tmp_path / "train" / shards[1], ROWS[3:])
    state = {"_data_files": [{"filename": name} for name in shards]}
    (tmp_path / "train" / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    reader = RowReader(str(tmp_path), "train")
    assert [reader[i] for i in range(len(reader))] == ROWS
    assert len(RowReader(str(tmp_path / "train"))) == 5


def test_missing_column_names_file_row_and_column(tmp_path: Path) -> None:
    rows = [ROWS[0], {"prompt": "x", "answer": "y"}]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"x\.jsonl, row 1: no value in column 'response' .*answer"):
        RowReader(str(path)).require(["prompt", "response"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"a": 1}\n\n{"a": ', r"line 3: not JSON"),
        ("x.jsonl", "[1, 2]", r"line 1: a row is a JSON object \(got list\)"),
        ("x.jsonl", "", "has no rows"),
        ("x.parquet", "not parquet", "cannot be read as parquet"),
        ("x.txt", "a", "known formats are"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        RowReader(str(tmp_path / name)).require(["a"])
    assert name in str(caught.value)


def test_a_missing_path_says_so() -> None:
    with pytest.raises(DataError, match="no file or directory 'org/dataset'"):
        RowReader("org/dataset")


def test_shuffle_golden_values() -> None:
    selector = SELECTORS.get("shuffle")(5, 42)
    assert [selector.get_indices(5) for _ in range(2)] == [[4, 2, 3, 1, 0], [4, 1, 2, 0, 3]]


def test_random_golden_values() -> None:
    selector = SELECTORS.get("random")(5, 42)
    assert [selector.get_indices(2) for _ in range(2)] == [[0, 3], [2, 0]]
    with pytest.raises(ValueError, match="draws 6 different rows of 5"):
        selector.get_indices(6)


def test_sequential_wraps() -> None:
    selector = SELECTORS.get("sequential")(5)
    assert [selector.get_indices(3) for _ in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_unknown_selector_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'shuffle'"):
        SELECTORS.get("shufle")


@settings(max_examples=50, deadline=None)
@given(
    kind=st.sampled_from(["sequential", "shuffle", "random"]),
    n=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 9), max_size=6),
    data=st.data(),
)
def test_a_selector_continues_from_any_position(kind: str, n: int, sizes: list[int], data: Any):
    sizes = [min(size, n) for size in sizes]
    cut = data.draw(st.integers(0, len(sizes)))
    whole, first, second = (SELECTORS.get(kind)(n, 7) for _ in range(3))
    expected = [whole.get_indices(size) for size in sizes]
    found = [first.get_indices(size) for size in sizes[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + [second.get_indices(size) for size in sizes[cut:]] == expected
    if kind == "shuffle" and sum(sizes) >= n:
        assert sorted([i for batch in expected for i in batch][:n]) == list(
            range(n)
        )  # an epoch has every row once


def taskset(path: Path, **kw: Any) -> Taskset:
    cfg = TasksetConfig(
        name="sort",
        path=str(path),
        workflow="simple_workflow",
        data_selector=SelectorConfig(kw.pop("selector", "shuffle"), 42),
        **kw.pop("cfg", {}),
    )
    return Taskset(cfg, **{"batch_size": 2, "total_epochs": 2, **kw})


def drain(tasks: Taskset) -> list[list[int]]:
    batches = []
    while True:
        try:
            batches.append([task.index["index"] for task in tasks.read()])
        except EndOfTasks:
            return batches


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tasks.jsonl", ROWS)


def test_training_reads_whole_batches_over_epochs(path: Path) -> None:
    tasks = taskset(path, batch_size=4)
    assert (tasks.total_batches, len(tasks)) == (2, 5)
    assert drain(tasks) == [[4, 2, 3, 1], [0, 4, 1, 2]]  # 10 rows: the last 2 make no batch


def test_total_steps_overrule_epochs(path: Path) -> None:
    assert len(drain(taskset(path, batch_size=4, total_steps=7))) == 7


def test_evaluation_reads_every_row_once_and_again(path: Path) -> None:
    tasks = taskset(path, batch_size=3, is_eval=True, selector="sequential", total_steps=9)
    assert tasks.total_batches == 2
    assert drain(tasks) == [[0, 1, 2], [3, 4]]
    tasks.reset()
    assert drain(tasks) == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("cut", range(6))
@pytest.mark.parametrize("selector", ["sequential", "shuffle", "random"])
def test_fault_35_resume_at_every_point_incl_the_epoch_edge(
    path: Path, selector: str, cut: int
) -> None:
    def new() -> Taskset:
        return taskset(path, batch_size=1, total_epochs=2, selector=selector)

    expected = drain(new())
    assert len(expected) == 10
    first, second = new(), new()
    head = [[t.index["index"] for t in first.read()] for _ in range(cut)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + drain(second) == expected


def test_a_finished_taskset_stays_finished_after_resume(path: Path) -> None:
    first, second = taskset(path), taskset(path)
    drain(first)
    second.load_state_dict(first.state_dict())
    with pytest.raises(EndOfTasks, match="gave all its 10 tasks"):
        second.read()


def test_tasks_carry_their_settings(path: Path) -> None:
    cfg = {"rollout_args": RolloutArgs(temperature=0.5), "workflow_args": {"a": {"b": 1}}}
    train = taskset(path, cfg=cfg, default_repeat_times=8, default_reward_fn="math", taskset_id=3)
    task, other = train.read()
    assert task.raw_task == ROWS[4]
    assert (task.task_desc, task.truth) == ("sort 004", "004")
    assert (task.workflow, task.reward_fn, task.repeat_times) == ("simple_workflow", "math", 8)
    assert task.rollout_args == {"temperature": 0.5}
    assert task.index == {"index": 4, "taskset_id": 3}
    task.workflow_args["a"]["b"] = 2
    assert other.workflow_args == {"a": {"b": 1}}
    evaluation = taskset(path, is_eval=True, default_repeat_times=8).read()[0]
    assert (evaluation.repeat_times, evaluation.is_eval) == (1, True)


def test_needed_columns_are_checked_up_front(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [{"question": "q"}])
    with pytest.raises(DataError, match=r"row 0: no value in column 'prompt'"):
        taskset(path)
    fmt = {"format": FormatConfig(prompt_key="question")}
    assert taskset(path, batch_size=1, cfg=fmt).read()[0].task_desc == "q"
    with pytest.raises(DataError, match="no value in column 'response'"):
        taskset(path, cfg=fmt, default_reward_fn="math")


def test_a_taskset_without_a_workflow_says_which_key(path: Path) -> None:
    with pytest.raises(DataError, match="default_workflow"):
        Taskset(TasksetConfig(path=str(path)), batch_size=1)

"""Tasks and training rows on S3: a real HTTP server that speaks the protocol."""

import gzip
import io
import json
import os
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from trinity_dask.buffer.data.readers import RowReader
from trinity_dask.buffer.data.row_file import RowFile
from trinity_dask.buffer.data.taskset import TasksetScheduler
from trinity_dask.buffer.errors import DataError
from trinity_dask.config.schema import ExperienceBufferConfig, FormatConfig, TasksetConfig
from trinity_dask.demo.tokenizer import ascii_tokenizer

LARGE_MB = int(os.environ.get("TASKSET_S3_MB", "96"))
ROWS = [{"prompt": f"q{i}", "response": f"{i}"} for i in range(6)]


@pytest.fixture
def bucket(s3: dict[str, Any], request: pytest.FixtureRequest) -> str:
    name = f"d{abs(hash(request.node.name))}"
    fsspec.filesystem("s3", **s3).mkdir(name)
    return name


def put(bucket: str, s3: dict[str, Any], name: str, data: bytes) -> None:
    fsspec.filesystem("s3", **s3).pipe_file(f"{bucket}/{name}", data)


def test_tasks_of_a_pattern_and_a_directory(bucket: str, s3: dict[str, Any]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    put(bucket, s3, "data/train-0.jsonl", lines)
    put(bucket, s3, "data/train-1.jsonl.gz", gzip.compress(lines))
    put(bucket, s3, "data/test-0.csv", b"prompt,response\na,b\n")
    for path, rows in (("data/train-*", 12), ("", 12), ("data/train-1.jsonl.gz", 6)):
        reader = RowReader(f"s3://{bucket}/{path}", storage_options=s3)
        assert [reader[i] for i in range(len(reader))] == ROWS * (rows // 6)
    cfg = TasksetConfig(path=f"s3://{bucket}", split="test", workflow="w", storage_options=s3)
    (task,) = TasksetScheduler([cfg], batch_size=1).read()
    assert task.source == f"s3://{bucket}/data/test-0.csv, row 0"
    with pytest.raises(DataError, match=f"s3://{bucket}/none"):
        RowReader(f"s3://{bucket}/none/x.jsonl", storage_options=s3)


def test_training_rows(bucket: str, s3: dict[str, Any]) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=2)
    put(bucket, s3, "rows.parquet", sink.getvalue().to_pybytes())
    cfg = ExperienceBufferConfig(
        path=f"s3://{bucket}/rows.parquet",
        storage_options=s3,
        format=FormatConfig(apply_chat_template=False),
    )
    rows = RowFile(cfg, ascii_tokenizer(), batch_size=6)
    assert rows.read(6)["response_text"].to_pylist() == [row["response"] for row in ROWS]


@pytest.mark.parametrize("groups", [1, 16])
def test_the_first_batch_of_a_large_file_needs_a_small_part_of_it(
    bucket: str, s3: dict[str, Any], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``TASKSET_S3_MB=1024`` for the size that people have; the share is smaller then."""
    n_rows = LARGE_MB * 64
    file = io.BytesIO()
    schema = pa.schema([("prompt", pa.string()), ("response", pa.string())])
    with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
        rows = [
            {"prompt": os.urandom(8192).hex(), "response": "1"} for _ in range(n_rows // groups)
        ]
        table = pa.Table.from_pylist(rows, schema)
        for _ in range(groups):
            writer.write_table(table, row_group_size=len(table))
    size = file.tell()
    file.seek(0)
    # the server joins the parts of a gigabyte for longer than a client waits, which asks again then
    patient = {"read_timeout": 600, "retries": {"total_max_attempts": 1}}
    upload = fsspec.filesystem("s3", **s3, config_kwargs=patient)
    with upload.open(f"{bucket}/large.parquet", "wb") as remote:
        while block := file.read(32 << 20):
            remote.write(block)

    fetched = 0
    fetch = s3fs.core.S3File._fetch_range

    def counted(self: Any, start: int, end: int) -> bytes:
        nonlocal fetched
        found = fetch(self, start, end)
        fetched += len(found)
        return found

    monkeypatch.setattr(s3fs.core.S3File, "_fetch_range", counted)
    cfg = TasksetConfig(path=f"s3://{bucket}/large.parquet", workflow="w", storage_options=s3)
    tasks = TasksetScheduler([cfg], batch_size=16)
    batch = tasks.read()
    assert [task.raw_task["prompt"] for task in batch] == [r["prompt"] for r in rows[:16]]
    print(f"{fetched / 1e6:.1f} MB of {size / 1e6:.1f} MB fetched in {groups} row group(s)")
    assert 0 < fetched < 40e6 < size

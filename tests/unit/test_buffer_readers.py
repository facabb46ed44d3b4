"""Wherever rows lie and however they are written, they are the rows; opening reads few of them."""

import bz2
import codecs
import gzip
import json
import lzma
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trinity_dask.buffer.data import parts
from trinity_dask.buffer.data.parts import SMALL_GROUP_BYTES, WINDOW_ROWS
from trinity_dask.buffer.data.readers import SAMPLE_ROWS, RowReader
from trinity_dask.buffer.data.sources import find_sources
from trinity_dask.buffer.data.taskset import Taskset
from trinity_dask.buffer.errors import DataError
from trinity_dask.config.schema import TasksetConfig

ROWS = [{"prompt": f"né {i}?", "response": f"{i:02d}"} for i in range(5)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
CSV = "prompt,response\n" + "".join(f"{r['prompt']},{r['response']}\n" for r in ROWS)


def zstd(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue().to_pybytes()


def ipc(rows: list[dict[str, Any]], **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pa.feather.write_feather(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue().to_pybytes()


def rows_of(path: Path | str, **given: Any) -> list[dict[str, Any]]:
    reader = RowReader(str(path), **given)
    return [reader[index] for index in range(len(reader))]


def put(path: Path, data: bytes | str = LINES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


# -- names and what is in them ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.ndjson", LINES.encode()),
        ("x.JSONL", LINES.encode()),
        ("x.jsonlines", LINES.encode()),
        ("x.tsv", CSV.replace(",", "\t").encode()),
        ("X.CSV", CSV.encode()),
        ("x.Json", json.dumps(ROWS, indent=1).encode()),
        ("x.json", LINES.encode()),
        ("x.PARQUET", parquet(ROWS)),
        ("x.pq", parquet(ROWS)),
        ("x.feather", ipc(ROWS, compression="lz4")),
        ("x.arrow", ipc(ROWS, compression="uncompressed", chunksize=2)),
    ],
)
@pytest.mark.parametrize("packed", [None, *PACKERS])
def test_a_suffix_says_format_and_compression(
    tmp_path: Path, name: str, data: bytes, packed: str | None
) -> None:
    if packed:
        name, data = f"{name}.{packed}", PACKERS[packed](data)
    assert rows_of(put(tmp_path / name, data)) == ROWS
    assert rows_of(put(tmp_path / name.upper(), data)) == ROWS


def test_several_streams_in_one_packed_file(tmp_path: Path) -> None:
    halves = [line.encode() for line in LINES.splitlines(keepends=True)]
    for suffix in ("gz", "zst", "bz2", "xz"):
        data = b"".join(PACKERS[suffix](half) for half in halves)
        assert rows_of(put(tmp_path / f"x.jsonl.{suffix}", data)) == ROWS


@pytest.mark.parametrize("code", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.jsonl", LINES),
        ("x.jsonl", LINES.replace("\n", "\r\n")),
        ("x.json", json.dumps(ROWS, ensure_ascii=False)),
        ("x.json", "\n\n " + json.dumps(ROWS, indent=2)),
        ("x.csv", CSV),
        ("x.tsv", CSV.replace(",", "\t").replace("\n", "\r\n")),
        ("x.jsonl.gz", LINES),
    ],
)
def test_a_byte_order_mark_says_how_to_read(
    tmp_path: Path, name: str, text: str, code: str
) -> None:
    data = text.encode(code)
    marks = {"utf-16-be": codecs.BOM_UTF16_BE, "utf-32-be": codecs.BOM_UTF32_BE}
    data = marks.get(code, b"") + data
    path = put(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    RowReader(str(path)).require(["prompt", "response"])
    assert rows_of(path) == ROWS


def test_a_mark_in_the_middle_of_joined_files_and_before_nothing(tmp_path: Path) -> None:
    part = codecs.BOM_UTF8 + LINES.encode()
    assert rows_of(put(tmp_path / "x.jsonl", part + part)) == ROWS + ROWS
    with pytest.raises(DataError, match="has no rows"):
        RowReader(str(put(tmp_path / "y.jsonl", codecs.BOM_UTF8)))


@pytest.mark.parametrize(
    "text",
    [
        "\n\n" + LINES,
        LINES + "\n   \t\n\r\n",
        LINES.replace("\n", "\n          \n"),
        LINES.rstrip("\n"),
        "".join(f"  {line}\n" for line in LINES.splitlines()),
    ],
)
def test_blank_lines_are_no_rows(tmp_path: Path, text: str) -> None:
    assert rows_of(put(tmp_path / "x.jsonl", text)) == ROWS


def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    reader = RowReader(str(put(tmp_path / "x.jsonl", b'\n{"a": 1}\n\n{"a": "\xff"}\n{"a":\n')))
    assert reader[0] == {"a": 1}
    for index, line in ((1, 4), (2, 5)):
        with pytest.raises(DataError, match=rf"x\.jsonl, line {line}: not JSON"):
            reader[index]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_lines_over_the_edges_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("trinity_dask.buffer.data.parts.BLOCK", size * 8)
    text = "\n" * size + LINES.replace("\n", "\n" * size)
    assert rows_of(put(tmp_path / "x.jsonl", text)) == ROWS
    assert rows_of(put(tmp_path / "x.jsonl.gz", gzip.compress(text.encode()))) == ROWS


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl.gz", LINES.encode()),
        ("x.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-20]),
        ("x.jsonl.zst", b"no zstd"),
        ("x.jsonl.xz", b"no xz"),
        ("x.parquet", parquet(ROWS)[:-9]),
        ("x.arrow", b"no arrow"),
        ("x.csv", b"a,b\n1,2,3\n"),
        ("x.json", b"[{]"),
    ],
)
def test_damage_names_the_file(tmp_path: Path, name: str, data: bytes) -> None:
    with pytest.raises(DataError, match=rf"{name} cannot be read as"):
        RowReader(str(put(tmp_path / name, data)))


# -- where it lies ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("pattern", "count"),
    [("*.jsonl", 2), ("**/*.jsonl", 3), ("*", 3), ("[ab].*", 3), ("?.jsonl.gz", 1)],
)
@pytest.mark.parametrize("scheme", ["", "memory://", "file://"])
def test_patterns(tmp_path: Path, scheme: str, pattern: str, count: int) -> None:
    root = f"{scheme}{tmp_path}"
    fs = fsspec.filesystem(scheme.removesuffix("://") or "file")
    for name in ("a.jsonl", "b.jsonl", "c/d.jsonl", "notes.txt"):
        fs.makedirs(f"{tmp_path}/c", exist_ok=True)
        fs.pipe_file(f"{tmp_path}/{name}", LINES.encode())
    fs.pipe_file(f"{tmp_path}/a.jsonl.gz", gzip.compress(LINES.encode()))
    assert len(find_sources(f"{root}/{pattern}")) == count
    assert rows_of(f"{root}/{pattern}") == ROWS * count
    with pytest.raises(DataError, match="no data file matches"):
        find_sources(f"{root}/*.parquet")


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.csv.gz", "x.arrow", "x.json"])
def test_rows_behind_a_url(name: str) -> None:
    data = {
        "x.jsonl": LINES.encode(),
        "x.parquet": parquet(ROWS),
        "x.csv.gz": gzip.compress(CSV.encode()),
        "x.arrow": ipc(ROWS),
        "x.json": json.dumps(ROWS).encode(),
    }[name]
    fsspec.filesystem("memory").pipe_file(f"/data/{name}", data)
    assert rows_of(f"memory://data/{name}") == ROWS
    cfg = TasksetConfig(path=f"memory://data/{name}", workflow="simple_workflow")
    (task,) = Taskset(cfg, batch_size=1).read()
    assert task.source == f"memory:///data/{name}, row 0"


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_folder_that_is_named_like_a_file(tmp_path: Path, scheme: str) -> None:
    """As Spark writes one: parts, and an empty file that says that all are there."""
    fs = fsspec.filesystem("memory" if scheme else "file")
    root = f"{tmp_path}/table.parquet"
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(f"{root}/_SUCCESS", b"")
    for number in range(2):
        fs.pipe_file(f"{root}/part-0000{number}-c000.snappy.parquet", parquet(ROWS))
    assert rows_of(f"{scheme}{root}") == ROWS * 2


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_map_is_an_object(tmp_path: Path, suffix: str) -> None:
    kind = pa.map_(pa.string(), pa.string())
    table = pa.table({"arguments": pa.array([[("a", "1"), ("b", None)], None], kind)})
    if suffix == "parquet":
        pq.write_table(table, tmp_path / "x.parquet")
    else:
        pa.feather.write_feather(table, tmp_path / "x.arrow")
    expected = [{"arguments": {"a": "1", "b": None}}, {"arguments": None}]
    assert rows_of(tmp_path / f"x.{suffix}") == expected


def test_a_web_server_gives_a_file_with_a_query(tmp_path: Path) -> None:
    put(tmp_path / "x.jsonl")
    put(tmp_path / "x.parquet", parquet(ROWS))
    code = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=0, bind='127.0.0.1')"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().split("port ")[1].split()[0]
        try:
            assert rows_of(f"http://127.0.0.1:{port}/x.jsonl?download=true") == ROWS
            assert rows_of(f"http://127.0.0.1:{port}/x.parquet") == ROWS
            with pytest.raises(DataError, match=r"y\.jsonl"):
                RowReader(f"http://127.0.0.1:{port}/y.jsonl")
        finally:
            server.kill()


def test_an_unknown_place_says_so(tmp_path: Path) -> None:
    for path in ("memory://nothing", str(tmp_path / "nothing"), "org/name"):
        with pytest.raises(DataError, match="no file or directory"):
            RowReader(path)
    with pytest.raises(DataError, match=r"known formats are .*jsonl"):
        RowReader(str(put(tmp_path / "x.doc")))


# -- directories as on the hub ---------------------------------------------------------------
CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/a-*.jsonl
  - split: test
    path: [main/b.jsonl, other/b.jsonl]
- config_name: socratic
  data_files: other/*.jsonl
---
# A data set
"""


@pytest.mark.parametrize(
    ("files", "split", "chosen"),
    [
        (["data/train-0-of-2.jsonl", "data/train-1-of-2.jsonl", "data/test-0.jsonl"],
         "train", [0, 1]),
        (["default/train/0000.jsonl", "default/test/0000.jsonl"], "test", [1]),
        (["my_train_file.jsonl", "my-dev-file.jsonl"], "validation", [1]),
        (["gsm8k.train.jsonl", "gsm8k.eval.jsonl"], "test", [1]),
        (["a.jsonl", "b.jsonl.gz", "notes.md"], "train", [0, 1]),
        (["data/training/a.jsonl", "data/val/a.jsonl"], "train", [0]),
        (["training_notes/restrained.jsonl", "test.jsonl"], "train", [0]),
        (["x/trainer.jsonl", "x/y.jsonl", ".cache/z.jsonl"], "train", [0, 1]),
        (["extra/extra.jsonl", "train.jsonl"], "extra", [0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_splits_by_name(
    tmp_path: Path, scheme: str, files: list[str], split: str, chosen: list[int]
) -> None:
    fs = fsspec.filesystem("memory" if scheme else "file")
    for number, name in enumerate(files):
        fs.makedirs(f"{tmp_path}/{name}".rpartition("/")[0], exist_ok=True)
        line = json.dumps({"from": number}).encode()
        fs.pipe_file(f"{tmp_path}/{name}", gzip.compress(line) if "gz" in name else line)
    found = rows_of(f"{scheme}{tmp_path}", split=split)
    assert [row["from"] for row in found] == chosen


def test_a_readme_says_which_files(tmp_path: Path) -> None:
    put(tmp_path / "README.md", CARD)
    for name in ("main/a-1.jsonl", "main/a-2.jsonl", "main/b.jsonl", "other/b.jsonl"):
        put(tmp_path / name, json.dumps({"from": name}))

    def found(**given: Any) -> list[str]:
        return [row["from"] for row in rows_of(tmp_path, **given)]

    assert found(subset="main") == ["main/a-1.jsonl", "main/a-2.jsonl"]
    assert found(subset="main", split="test") == ["main/b.jsonl", "other/b.jsonl"]
    assert found(subset="socratic") == ["other/b.jsonl"]
    for subset in (None, "none"):
        with pytest.raises(DataError, match=r"subsets main, socratic .*set subset_name"):
            RowReader(str(tmp_path), subset=subset)
    put(tmp_path / "README.md", "# No data files\n")
    assert len(found()) == 4


def test_a_name_on_the_hub_is_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    revision = "a" * 40
    put(tmp_path / "hub/datasets--org--name/refs/main", revision)
    put(tmp_path / f"hub/datasets--org--name/snapshots/{revision}/data/train-0.jsonl")
    assert rows_of("org/name") == ROWS
    with pytest.raises(DataError, match="no files of split 'test'"):
        RowReader("org/name", "test")
    prepared = tmp_path / "datasets/org___other/default/0.0.0/abc"
    put(prepared / "other-train-00000-of-00002.arrow", ipc(ROWS[:3]))
    put(prepared / "other-train-00001-of-00002.arrow", ipc(ROWS[3:]))
    put(prepared / "other-train_extra.arrow", ipc(ROWS))
    assert rows_of("org/other") == ROWS
    put(tmp_path / "datasets/org___other/more/0.0.0/abc/other-train.arrow", ipc(ROWS[:1]))
    with pytest.raises(DataError, match="subsets default, more; set subset_name"):
        RowReader("org/other")
    assert rows_of("org/other", subset="more") == ROWS[:1]


def test_a_mistyped_file_is_no_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data/tran.jsonl", "tran.parquet", "data/tran.csv.gz"):
        with pytest.raises(DataError, match=f"^no file or directory '{name}'$"):
            RowReader(name)


def test_a_hub_that_cannot_be_reached_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as hub

    class Unreachable(fsspec.AbstractFileSystem):
        def isfile(self, path: str) -> bool:
            raise RuntimeError("connection refused")  # what the client raises is its own

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setitem(import_module("fsspec.registry")._registry, "hf", Unreachable)
    with pytest.raises(DataError, match=r"'org/none'.*RuntimeError: connection refused"):
        RowReader("org/none")


def test_a_cell_of_several_megabytes(tmp_path: Path) -> None:
    rows = [{"prompt": "q" * (3 << 20), "response": "1"}, {"prompt": "q", "response": "2"}]
    text = "prompt,response\n" + "".join(f"{r['prompt']},{r['response']}\n" for r in rows)
    assert rows_of(put(tmp_path / "x.csv", text)) == rows
    assert rows_of(put(tmp_path / "x.tsv", text.replace(",", "\t"))) == rows


def test_cards_as_others_write_them(tmp_path: Path) -> None:
    for name in ("en/train.jsonl", "en/test.jsonl", "de/train.jsonl"):
        put(tmp_path / name, json.dumps({"from": name}))
    card = (
        "---\nconfigs:\n- config_name: en\n  data_dir: en\n- config_name: de\n  data_dir: ./de\n"
        "---\n"
    )
    for text in (card, card.replace("\n", "\r\n")):
        put(tmp_path / "README.md", text)
        assert rows_of(tmp_path, subset="en") == [{"from": "en/train.jsonl"}]
        assert rows_of(tmp_path, split="test", subset="en") == [{"from": "en/test.jsonl"}]
        assert rows_of(tmp_path, subset="de") == [{"from": "de/train.jsonl"}]
        with pytest.raises(DataError, match=r"subsets en, de .*set subset_name"):
            RowReader(str(tmp_path))
    for other in ("---\n- a\n- b\n---\n", "---\nconfigs: [a, 1]\n---\n", "---\nconfigs: x\n---\n"):
        put(tmp_path / "README.md", other)  # the files' names decide
        assert len(rows_of(tmp_path)) == 2


def test_files_about_the_data_are_no_data(tmp_path: Path) -> None:
    put(tmp_path / "rows.jsonl")
    for name in ("dataset_infos.json", "dataset_info.json", "config.json", ".hidden.json"):
        put(tmp_path / name, "{}")
    assert rows_of(tmp_path) == ROWS


# -- databases -------------------------------------------------------------------------------
@pytest.fixture
def database(tmp_path: Path) -> str:
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute('CREATE TABLE "my tasks" (prompt TEXT, response TEXT, level INTEGER)')
        connection.executemany(
            'INSERT INTO "my tasks" VALUES (?, ?, ?)',
            [(r["prompt"], r["response"], n or None) for n, r in enumerate(ROWS)],
        )
    return f"sqlite:///{tmp_path}/t.db"


def test_a_database_is_read_by_its_url(database: str) -> None:
    levels = [{"level": n or None} for n in range(5)]
    whole = [{**row, **level} for row, level in zip(ROWS, levels, strict=True)]
    assert rows_of(database) == whole  # integers stay integers beside a null
    query = 'SELECT prompt, response FROM "my tasks" WHERE level > 2 ORDER BY level DESC'
    assert rows_of(database, query=query) == [ROWS[4], ROWS[3]]
    assert rows_of(database, query='"my tasks"') == whole
    cfg = TasksetConfig(path=database, query=query, workflow="simple_workflow")
    assert Taskset(cfg, batch_size=2).read()[0].raw_task == ROWS[4]


def test_numbers_of_a_database_are_what_is_stored(tmp_path: Path) -> None:
    numbers = [0.1234567890123456789, 1e-12, 1e300, float("inf"), None]
    with sqlite3.connect(tmp_path / "n.db") as connection:
        connection.execute("CREATE TABLE n (x REAL, big INTEGER)")
        connection.executemany("INSERT INTO n VALUES (?, ?)", [(x, 2**60 + 1) for x in numbers])
    found = rows_of(f"sqlite:///{tmp_path}/n.db")
    assert found == [{"x": x, "big": 2**60 + 1} for x in numbers]


@pytest.mark.parametrize(
    ("url", "query", "message"),
    [
        ("{}", "SELECT prompt FROM tasks", "no such table: tasks"),
        ("{}", "SELECT prompt FROM \"my tasks\" WHERE prompt = ''", "has no rows"),
        ("{}x", None, "unable to open"),
        ("postgresql://u@127.0.0.1:1/d", "t", "postgresql://u@127.0.0.1:1/d"),
        ("mysql+pymysql://u@127.0.0.1:1/d", None, "mysql"),
    ],
)
def test_what_a_database_refuses_is_told(
    database: str, url: str, query: str | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        RowReader(url.format(database), query=query)
    if url == "{}":
        with (
            sqlite3.connect(database.removeprefix("sqlite:///")) as connection,
        ):
            connection.execute("CREATE TABLE second (a)")
        with pytest.raises(DataError, match="tables my tasks, second; set query"):
            RowReader(database)


# -- how much is read ------------------------------------------------------------------------
def wide(count: int, size: int) -> list[dict[str, Any]]:
    import random

    draw = random.Random(7)
    return [{"prompt": f"{i} {draw.randbytes(size).hex()}"} for i in range(count)]


@pytest.mark.parametrize("group_rows", [1, 64, WINDOW_ROWS - 1, 2500])
def test_parquet_rows_in_any_order(tmp_path: Path, group_rows: int) -> None:
    rows = wide(2500, 4)
    reader = RowReader(str(put(tmp_path / "x.parquet", parquet(rows, row_group_size=group_rows))))
    for order in (range(2500), range(2499, -1, -7), [0, 2499, 1, 1200, 0, 1100, 1023, 1024]):
        for index in order:
            assert reader[index] == rows[index]


def test_a_large_row_group_is_not_decoded_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_dask.buffer.data.parts.SMALL_GROUP_BYTES", 1000)
    assert SMALL_GROUP_BYTES > 1000
    rows = wide(3 * WINDOW_ROWS, 4)
    reader = RowReader(str(put(tmp_path / "x.parquet", parquet(rows))))
    for index in (3 * WINDOW_ROWS - 1, 0, 2 * WINDOW_ROWS, 5):
        assert reader[index] == rows[index]
    (part,) = (part for _, part in reader._parts)
    assert list(part._on_disk) == [0]  # type: ignore[attr-defined]


def test_checks_are_made_on_a_sample_of_a_large_file(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": str(i)} for i in range(10 * SAMPLE_ROWS)]
    rows[3] = {"prompt": None}
    reader = RowReader(str(put(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))))
    reader.require(["prompt"])  # row 3 is not among them; it is checked when it is read
    assert len(reader.sample()) == SAMPLE_ROWS
    assert {0, len(rows) - 1} < set(reader.sample())
    rows[-1] = {"prompt": None}
    put(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=f"row {len(rows) - 1}: no value in column 'prompt'"):
        RowReader(str(tmp_path / "x.jsonl")).require(["prompt"])


def test_a_million_rows_are_not_held_in_memory(tmp_path: Path) -> None:
    """Opened in a process of its own: 150 MB of rows; time is the benchmark's business."""
    line = json.dumps({"prompt": "x" * 120, "response": "1"}) + "\n"
    put(tmp_path / "x.jsonl", line * 1_000_000)
    code = f"""
from pathlib import Path
from trinity_dask.buffer.data.taskset import Taskset
from trinity_dask.config.schema import TasksetConfig
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
before = peak()
cfg = TasksetConfig(path={str(tmp_path / "x.jsonl")!r}, workflow="w")
tasks = Taskset(cfg, batch_size=8)
assert len(tasks) == 1_000_000 and len(tasks.read()) == 8
print((peak() - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 130


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('{"a": 1}\n{"a": 2.5}', [1, 2.5]),
        ('\n{"a": 1, "b": {"a": 7}}\n\n  {"b": 3}\n', [1, None]),
        ('{"a": "1"}\n{"a": 2}', ["1", 2]),
        ('{"a": null}\n{"a": true}', [None, True]),
        ('{"a": 1}\n{"b": "' + "x" * (3 << 20) + '", "a": 2}', [1, 2]),
        ("\ufeff" + '{"a": 1}\n' + "\ufeff" + '{"a": 2}', [1, 2]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_column_of_lines(tmp_path: Path, text: str, values: list[Any], packed: bool) -> None:
    data = gzip.compress(text.encode()) if packed else text
    reader = RowReader(str(put(tmp_path / f"x.jsonl{'.gz' * packed}", data)))
    assert reader.column("a") == values


# -- directories as strangers have them ------------------------------------------------------
def card(*configs: str) -> str:
    return "---\nconfigs:\n" + "".join(f"- {each}\n" for each in configs) + "---\n"


EN, DE = '{config_name: en, data_files: "en/*"}', '{config_name: de, data_files: "de/*"}'


@pytest.mark.parametrize(
    ("configs", "chosen"),
    [
        ([EN, DE.replace("de,", "de, default: true,", 1)], "de"),
        ([EN, DE.replace("name: de", "name: default")], "de"),
        ([EN.replace("en,", "en, default: true,", 1), DE], "en"),
        ([EN, "{config_name: default}"], None),  # it takes every file
        ([EN, DE], DataError),
        ([EN.replace("en,", "en, default: true,", 1), DE.replace("name: de", "name: default")],
         DataError),
        ([EN, DE.replace("de,", "de, default: false,", 1)], DataError),
    ],
)  # fmt: skip
def test_the_default_of_several_subsets(tmp_path: Path, configs: list[str], chosen: Any) -> None:
    put(tmp_path / "README.md", card(*configs))
    for name in ("en", "de"):
        put(tmp_path / name / "rows.jsonl", json.dumps({"from": name}))
    if chosen is DataError:
        with pytest.raises(DataError, match="set subset_name"):
            RowReader(str(tmp_path))
        return
    found = [row["from"] for row in rows_of(tmp_path)]
    assert found == ([chosen] if chosen else ["de", "en"])
    assert rows_of(tmp_path, subset="en") == [{"from": "en"}]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("data/train", 2), ("data/tr*", 2), ("./data/train/", 2), ("data/train/*", 1),
        ("data/train/**", 2), ("data/*/*/b*", 1), ("*", 1), ("data", 3), ("notes/*", DataError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_readme_may_pick_folders(tmp_path: Path, scheme: str, pattern: str, count: Any) -> None:
    root = f"{scheme}{tmp_path}"
    files = {"data/train/a.jsonl": "1", "data/train/deep/b.jsonl": "2", "data/test/c.jsonl": "3",
             "top.jsonl": "4", "notes/x.txt": "?"}  # fmt: skip
    readme = card(f'{{config_name: x, data_files: [{{split: train, path: "{pattern}"}}]}}')
    for name, text in {**files, "README.md": readme}.items():
        with fsspec.open(f"{root}/{name}", "w", auto_mkdir=True) as file:
            file.write(text if name.endswith(".md") else f'{{"n": {text}}}')
    if count is DataError:
        with pytest.raises(DataError, match="no files of split 'train'"):
            RowReader(root)
    else:
        assert len(RowReader(root)) == count


def test_a_folder_that_is_a_link_is_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere/part/a.jsonl")
    root = tmp_path / "set"
    (root / "train/more").mkdir(parents=True)
    (root / "test").symlink_to(tmp_path / "elsewhere")
    (root / "train/rows").symlink_to(tmp_path / "elsewhere/part")
    (root / "train/more/again").symlink_to(root)  # what it lies in
    assert rows_of(root, split="test") == ROWS
    assert rows_of(root) == ROWS
    assert rows_of(f"{root}/*/part/*.jsonl") == ROWS
    put(root / "README.md", card('{config_name: x, data_files: "train/*/*.jsonl"}'))
    assert rows_of(root) == ROWS


@pytest.mark.parametrize(
    "state",
    ["{}", "[]", "no", '{"_data_files": 3}', '{"_data_files": [{}]}', '{"_data_files": ["x"]}',
     '{"step": 4, "loss": 0.1}', "[" * 100_000],
)  # fmt: skip
def test_a_state_that_is_not_that_of_a_saved_data_set(tmp_path: Path, state: str) -> None:
    put(tmp_path / "state.json", state)
    put(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"state\.json is not what .*save_to_disk writes"):
        RowReader(str(tmp_path))


def test_a_state_that_names_a_file_which_is_gone(tmp_path: Path) -> None:
    put(tmp_path / "state.json", '{"_data_files": [{"filename": "gone.arrow"}]}')
    with pytest.raises(DataError, match=r"gone\.arrow"):
        RowReader(str(tmp_path))


# -- what Python has no value for ------------------------------------------------------------
@pytest.mark.parametrize("kind", [pa.timestamp("s"), pa.date32(), pa.date64(), pa.timestamp("us")])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_date_after_the_year_9999_names_its_row(tmp_path: Path, kind: Any, suffix: str) -> None:
    per_day = {"s": 86_400, "us": 86_400_000_000, "ms": 86_400_000}
    day = per_day.get(str(kind)[10:-1], 1) * (86_400_000 if kind == pa.date64() else 1)
    width = pa.int32() if kind == pa.date32() else pa.int64()
    when = pa.array([day * 365, day * 365 * 20_000], width).cast(kind)
    table = pa.table({"prompt": ["a", "b"], "when": when})
    path = tmp_path / f"x.{suffix}"
    (pq.write_table if suffix == "parquet" else pa.feather.write_feather)(table, str(path))
    reader = RowReader(str(path))
    assert reader[0]["prompt"] == "a"
    with pytest.raises(DataError, match=rf"x\.{suffix}, row 1 cannot be read"):
        reader[1]
    with pytest.raises(DataError, match="column 'when' cannot be read"):
        reader.column("when")


@pytest.mark.parametrize(("name", "before"), [("x.jsonl", ""), ("x.json", "["), ("y.json", "")])
def test_a_hundred_thousand_brackets_are_a_bad_row(tmp_path: Path, name: str, before: str) -> None:
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    reader = RowReader(str(put(tmp_path / name, before + deep + "]" * len(before))))
    with pytest.raises(DataError, match=rf"{name}, (line 1|row 0): not JSON .*recursion"):
        reader[0]


@pytest.mark.parametrize("empty", ["", "\ufeff", "\n", "\n\n"])
def test_a_file_without_a_row_among_others(tmp_path: Path, empty: str) -> None:
    for number, text in enumerate(["", LINES, empty, CSV.split("\n")[0], CSV]):
        put(tmp_path / f"{number}.{'jsonl' if number < 2 else 'csv'}", text)
    assert rows_of(f"{tmp_path}/*") == ROWS * 2
    with pytest.raises(DataError, match="has no rows"):
        RowReader(f"{tmp_path}/[23].csv")


# -- arrays ----------------------------------------------------------------------------------
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.sampled_from('a"\\{}[],:\n é'), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.sampled_from('k"\\]'), max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=2), values, max_size=3), min_size=1, max_size=5),
    indent=st.sampled_from([None, 0, 2]),
    is_ascii=st.booleans(),
    bom=st.booleans(),
    piece=st.integers(1, 40),
    block=st.integers(1, 60),
)
def test_an_array_is_what_json_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any, indent: Any, is_ascii: bool,
    bom: bool, piece: int, block: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(parts, "PIECE", piece)
    monkeypatch.setattr(parts, "BLOCK", block)
    text = "\ufeff" * bom + json.dumps(rows, indent=indent, ensure_ascii=is_ascii) + " \n" * bom
    assert rows_of(put(tmp_path / "x.json", text)) == rows


@pytest.mark.parametrize(
    "text",
    ['[{"a": 1}', '[{"a": 1},]', '[{"a": 1} {"a": 2}]', '[{"a": 1}, 2]', '[1, 2]', '["x"]',
     '[{"a": 1}]]', '[{"a": 1}] x', '[{"a": 1}, , {"a": 2}]', '[, {"a": 1}]', '[{"a": "1}]',
     '[{"a": 1}x, {"a": 2}]', '[[1], [2]]', '[{"a": 1}, [2]]', '[{"a" 1}]', "[null]",
     '[{"a": 1}][{"a": 2}]'],
)  # fmt: skip
def test_what_is_no_array_of_objects_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"x\.json.*(not one JSON array|not JSON|a row is a JSON)"):
        rows_of(put(tmp_path / "x.json", text))


def test_an_array_is_not_held_in_memory(tmp_path: Path) -> None:
    with open(tmp_path / "x.json", "w") as file:
        file.write("[")
        for number in range(60_000):
            file.write(f'{"," * bool(number)}{{"prompt": "{number} {"x" * 1000}"}}')
        file.write("]")
    code = f"""
from trinity_dask.buffer.data.readers import RowReader
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
before = peak()
reader = RowReader({str(tmp_path / "x.json")!r})
assert len(reader) == 60_000 and reader[59_999]["prompt"].startswith("59999 x")
print((peak() - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60  # of 61 MB, in blocks of 16


# -- databases, further ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("query", "count"),
    [
        ('-- all of them\nSELECT * FROM "my tasks"', 5),
        ('/* those\n with */ -- a level\n  select * from "my tasks" where level > 1', 3),
        ("(SELECT 1 AS a) -- one", None),
        ("my tasks", 5),
        (" my tasks ", 5),
        ("[my tasks]", 5),
        ("WITH t AS (SELECT 1 AS a) SELECT a FROM t", 1),
        ("values", 1),  # a table of this name
        ('say "hi"', 1),
        ("their tasks", None),
    ],
)
def test_a_query_or_a_table_by_its_name(database: str, query: str, count: int | None) -> None:
    with sqlite3.connect(database.removeprefix("sqlite:///")) as connection:
        for name in ('"values"', '"say ""hi"""'):
            connection.execute(f"CREATE TABLE {name} (a)")
            connection.execute(f"INSERT INTO {name} VALUES (1)")
    if count is None:
        with pytest.raises(DataError, match="cannot be read"):
            RowReader(database, query=query)
    else:
        assert len(RowReader(database, query=query)) == count


def test_a_duckdb_file_is_read_by_its_url(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    url = f"duckdb:///{tmp_path}/t.duckdb"
    put(tmp_path / "rows.jsonl")
    with duckdb.connect(f"{tmp_path}/t.duckdb") as connection:
        connection.execute(f"CREATE TABLE \"my tasks\" AS FROM '{tmp_path}/rows.jsonl'")
    assert rows_of(url) == ROWS
    assert rows_of(url, query="my tasks") == ROWS
    assert rows_of(url, query='-- two\nFROM "my tasks" LIMIT 2') == ROWS[:2]
    with pytest.raises(DataError, match="absent"):
        RowReader(url, query="SELECT * FROM absent")

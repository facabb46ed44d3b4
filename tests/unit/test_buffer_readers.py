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
        ("x.jsonl.gz", gzip.compress(LINES.encode())[:-20]),
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

"""The store: a batch is committed once and whole, or not at all."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest

from trinity_dask.buffer.errors import CorruptFileError, StoreError
from trinity_dask.buffer.store.experience_store import ExperienceStore, serialise
from trinity_dask.buffer.store.manifest import RowRef, batch_key
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import from_table, to_table


def rows(batch: int | str, n: int) -> pa.Table:
    return to_table(
        [Experience(tokens=[1, 2, 3 + i], eid=EID(batch, i), reward=i / 2) for i in range(n)]
    )


@pytest.fixture(params=["path", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}/store"
    else:
        yield ("file://" if request.param == "file" else "") + str(tmp_path / "store")


def test_commit_and_read_back(url: str) -> None:
    store = ExperienceStore(url)
    manifest = store.commit(3, rows(3, 5), {"accounts": {"committed": np.int64(5)}, "t": [1, "x"]})
    assert (manifest.batch_id, manifest.rows, manifest.order) == (3, 5, 0)
    assert manifest.meta == {"accounts": {"committed": 5}, "t": [1, "x"]}
    again = ExperienceStore(url)
    assert again.get_manifest(3) == manifest
    assert again.manifests() == [manifest]
    in_parts = again.read([manifest.ref(3, 5), manifest.ref(0, 3)])
    assert [e.reward for e in from_table(in_parts)] == [1.5, 2.0, 0.0, 0.5, 1.0]
    assert again.verify() == []


def test_second_commit_changes_nothing(url: str) -> None:
    store = ExperienceStore(url)
    first = store.commit(1, rows(1, 2), {"who": "first"})
    assert store.commit(1, rows(1, 9), {"who": "second"}) == first
    assert ExperienceStore(url).commit(1, rows(1, 9), {"who": "third"}) == first
    assert store.sweep(0) == 0  # losers left nothing behind


def test_concurrent_commits_have_one_winner(url: str) -> None:
    stores = [ExperienceStore(url) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda k: stores[k].commit(1, rows(1, k + 1), {"writer": k}), range(8))
        )
    assert len({m.path for m in results}) == 1
    store = ExperienceStore(url)
    assert store.manifests() == [results[0]]
    assert store.read([results[0].ref()]).num_rows == results[0].meta["writer"] + 1
    assert store.sweep(0) == 0


def test_manifests_are_in_numeric_order(url: str) -> None:
    store = ExperienceStore(url)
    for batch in (10, 9, "b", 100, "a", -1):
        store.commit(batch, rows(batch, 1), {})
    ids = [m.batch_id for m in ExperienceStore(url).manifests()]
    assert ids == [-1, 9, 10, 100, "b", "a"]


def test_int_and_text_ids_are_different_batches(url: str) -> None:
    store = ExperienceStore(url)
    assert store.commit(7, rows(7, 1), {}).path != store.commit("7", rows("7", 2), {}).path
    store.commit("../../x", rows("../../x", 1), {})
    assert [m.rows for m in store.manifests()] == [1, 2, 1]
    assert batch_key("../x") == "s~..%2Fx"


def test_empty_batch_is_a_batch(url: str) -> None:
    store = ExperienceStore(url)
    manifest = store.commit(1, rows(1, 0), {"reason": "all filtered"})
    assert manifest.rows == 0
    assert store.read([manifest.ref()]).num_rows == 0


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compression_round_trips(tmp_path: Path, compression: str) -> None:
    store = ExperienceStore(str(tmp_path), compression=compression)
    manifest = store.commit(1, rows(1, 50), {})
    back = from_table(ExperienceStore(str(tmp_path)).read([manifest.ref()]))
    assert [e.tokens.tolist() for e in back] == [[1, 2, 3 + i] for i in range(50)]


def test_only_exclusive_file_systems_and_known_compressions() -> None:
    with pytest.raises(ValueError, match="exclusive create"):
        ExperienceStore("http://host/store")
    with pytest.raises(ValueError, match="'lz4' or 'zstd'"):
        ExperienceStore("x", compression="gzip")


def test_meta_must_be_json(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    with pytest.raises(ValueError, match="meta of a batch must be JSON"):
        store.commit(1, rows(1, 1), {"x": {1}})
    assert store.manifests() == []


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "foreign bytes":
        path.write_bytes(b"PK not arrow" * 99)
    elif how == "foreign table":
        path.write_bytes(serialise(pa.table({"a": [1, 2, 3, 4]})))
    else:
        path.write_bytes(serialise(rows(1, 2)))


@pytest.mark.parametrize(
    "how", ["missing", "empty", "truncated", "foreign bytes", "foreign table", "fewer rows"]
)
def test_damaged_file_is_named_and_skipped_only_on_request(tmp_path: Path, how: str) -> None:
    store = ExperienceStore(str(tmp_path))
    bad, good = store.commit(1, rows(1, 4), {}), store.commit(2, rows(2, 3), {})
    damage(tmp_path / bad.path, how)
    refs = [bad.ref(), good.ref()]
    with pytest.raises(CorruptFileError, match=bad.path):
        store.read(refs)
    tolerant = ExperienceStore(str(tmp_path), skip_corrupt=True)
    assert tolerant.read(refs).num_rows == 3
    assert tolerant.skipped_files == {bad.path}
    assert tolerant.skipped_rows == 4
    assert len(store.verify()) == 1
    assert "batch 1" in store.verify()[0]


def test_verify_sees_one_flipped_bit(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    path = tmp_path / store.commit(1, rows(1, 4), {}).path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "sha256" in store.verify()[0]


def test_damaged_manifest_is_named(tmp_path: Path) -> None:
    ExperienceStore(str(tmp_path)).commit(1, rows(1, 1), {})
    (tmp_path / "commit/1.json").write_text("{}")
    with pytest.raises(CorruptFileError, match=r"commit/1\.json is no manifest"):
        ExperienceStore(str(tmp_path)).manifests()


def test_a_ref_beyond_the_file_is_refused(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    manifest = store.commit(1, rows(1, 4), {})
    with pytest.raises(CorruptFileError, match="has 4 rows"):
        store.read([RowRef(1, manifest.path, 2, 5)])


COMMIT_WITH_FILE_SIZE_LIMIT = """
import resource, sys
from trinity_dask.buffer.errors import StoreError
from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.experience import Experience
from trinity_dask.experience.schema import to_table
table = to_table([Experience(tokens=range(500)) for _ in range(100)])
store = ExperienceStore(sys.argv[1])
store.commit(1, table.slice(0, 1), {})
soft = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
try:
    store.commit(2, table, {"padding": "x" * 5000})
except StoreError as error:
    print("refused:", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("left:", [m.batch_id for m in store.manifests()], store.sweep(0))
print("later:", store.commit(2, table, {}).rows)
"""


def run_script(script: str, *args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        **kwargs,  # type: ignore[call-overload]
    )


def test_a_write_that_the_system_refuses_commits_nothing(tmp_path: Path) -> None:
    done = run_script(COMMIT_WITH_FILE_SIZE_LIMIT, str(tmp_path / "s"), "4096")
    assert done.returncode == 0, done.stderr
    refused, left, later = done.stdout.splitlines()
    assert "batch 2 is not committed" in refused
    assert "File too large" in refused
    assert str(tmp_path / "s" / "data") in refused
    assert left == "left: [1] 0"  # no manifest, and no half-written file to sweep
    assert later == "later: 100"


FILL_A_SMALL_DISK = """
import os, sys
from trinity_dask.buffer.errors import StoreError
from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.experience import Experience
from trinity_dask.experience.schema import to_table
table = to_table([Experience(tokens=range(500)) for _ in range(100)])
store = ExperienceStore(sys.argv[1])
done = 0
try:
    while True:
        done = store.commit(done + 1, table, {}).batch_id
except StoreError as error:
    print("refused:", error)
print("left:", len(store.manifests()) == done, store.verify(), store.sweep(0))
os.unlink(os.path.join(sys.argv[1], store.manifests()[0].path))
print("later:", store.commit(done + 1, table, {}).rows)
"""


def mount_small_disk(path: Path) -> bool:
    """Mount a 2 MiB file system; needs root."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


def test_a_full_disk_commits_nothing_and_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    if not mount_small_disk(disk):
        pytest.skip("mounting a small file system needs root")
    try:
        done = run_script(FILL_A_SMALL_DISK, str(disk))
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=60)
    assert done.returncode == 0, done.stderr
    refused, left, later = done.stdout.splitlines()
    assert "No space left on device" in refused
    assert left == "left: True [] 0"
    assert later == "later: 100"


KILLED_WRITER = """
import os, signal, sys
from trinity_dask.buffer.store import experience_store as store
from trinity_dask.experience import Experience
from trinity_dask.experience.schema import to_table
table = to_table([Experience(tokens=[1, 2]) for _ in range(4)])
s = store.ExperienceStore(sys.argv[1])
s.commit(1, table, {})
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
def after(function):
    def call(*args):
        function(*args)
        die()
    return call
point = sys.argv[2]
if point == "during data":
    store.fsync = die
elif point == "before manifest":
    os.link = die
elif point == "after manifest":
    os.link = after(os.link)
elif point == "before rename":
    os.rename = die
s.commit(2, table, {})
"""


@pytest.mark.parametrize(
    ("point", "committed"),
    [("during data", 1), ("before manifest", 1), ("after manifest", 2), ("before rename", 2)],
)
def test_fault_39_killed_in_mid_commit(tmp_path: Path, point: str, committed: int) -> None:
    done = run_script(KILLED_WRITER, str(tmp_path), point)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = ExperienceStore(str(tmp_path))
    store.finish_commits()
    assert [m.batch_id for m in store.manifests()] == list(range(1, committed + 1))
    assert store.verify() == []
    # what a user sees in the data folder is exactly what is committed
    dataset = pyarrow.dataset.dataset(tmp_path / "data", format="ipc")
    assert dataset.count_rows() == 4 * committed
    store.sweep(0)
    assert store.commit(2, rows(2, 4), {}).rows == 4
    assert store.verify() == []
    assert len(os.listdir(tmp_path / "data")) == 2
    assert sorted(os.listdir(tmp_path / "commit")) == ["1.json", "2.json"]


def test_sweep_keeps_young_and_committed_files(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    manifest = store.commit(1, rows(1, 1), {})
    orphan = tmp_path / "data" / ".2-dead.arrow"
    orphan.write_bytes(b"x")
    assert store.sweep(3600) == 0
    os.utime(orphan, (1, 1))
    assert store.sweep(3600) == 1
    assert store.read([manifest.ref()]).num_rows == 1


def test_manifest_files_are_readable_json(tmp_path: Path) -> None:
    ExperienceStore(str(tmp_path)).commit(1, rows(1, 2), {"step": 1})
    record = json.loads((tmp_path / "commit/1.json").read_text())
    assert record["rows"] == 2
    assert record["meta"] == {"step": 1}


def test_users_open_a_store_in_two_lines(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    store = ExperienceStore(str(tmp_path))
    store.commit(1, rows(1, 4), {})
    store.commit("eval", rows("eval", 2), {})
    dataset = pyarrow.dataset.dataset(tmp_path / "data", format="ipc")
    assert dataset.to_table().num_rows == 6
    query = "select batch, count(*), max(reward) from dataset group by batch order by batch"
    assert duckdb.sql(query).fetchall() == [("1", 4, 1.5), ("eval", 2, 0.5)]
    frame = dataset.to_table().to_pandas()
    assert frame["tokens"].str.len().tolist() == [3] * 6


def test_reads_are_memory_mapped(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    manifest = store.commit(1, rows(1, 1000), {})
    before = pa.total_allocated_bytes()
    table = store.read([manifest.ref()])
    assert table.nbytes > 50_000
    assert pa.total_allocated_bytes() - before < 10_000


def test_unwritable_store_says_so(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the directory should be")
    with pytest.raises(StoreError, match="NotADirectoryError"):
        ExperienceStore(str(tmp_path / "store")).commit(1, rows(1, 1), {})


def test_a_store_from_before_a_column_existed_stays_readable(tmp_path: Path) -> None:
    store = ExperienceStore(str(tmp_path))
    manifest = store.commit(1, to_table([Experience(tokens=[1, 2, 3])]), {})
    path = tmp_path / manifest.path
    older = pa.ipc.open_file(path.read_bytes()).read_all().drop_columns(["teacher_logprobs"])
    with pa.ipc.new_file(str(path), older.schema) as writer:
        writer.write_table(older)
    (read,) = from_table(ExperienceStore(str(tmp_path)).read([manifest.ref()]))
    assert read.teacher_logprobs is None
    assert read.tokens.tolist() == [1, 2, 3]

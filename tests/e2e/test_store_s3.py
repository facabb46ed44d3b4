"""The store on S3: a real HTTP server that speaks the protocol, started by the test."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from records_support import a_batch, a_job, experiences, trained

from trinity_dask import rollouts
from trinity_dask.buffer.errors import CorruptFileError, StoreError
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.config import save
from trinity_dask.config.schema import ExperienceBufferConfig
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import from_table, to_table
from trinity_dask.records.writer import Recorder


@pytest.fixture
def url(s3: dict[str, Any], request: pytest.FixtureRequest) -> str:
    bucket = f"b{abs(hash(request.node.name))}"
    fsspec.filesystem("s3", **s3).mkdir(bucket)
    return f"s3://{bucket}/runs/experience"


def rows(batch: int, n: int) -> pa.Table:
    return to_table([Experience(tokens=[batch, i], eid=EID(batch, i)) for i in range(n)])


def test_commit_read_verify(url: str, s3: dict[str, Any]) -> None:
    store = ExperienceStore(url, s3)
    assert store.manifests() == []
    committed = [store.commit(batch, rows(batch, batch), {"b": batch}) for batch in (2, 10, 1)]
    other = ExperienceStore(url, s3)
    assert [m.batch_id for m in other.manifests()] == [1, 2, 10]
    assert other.commit(2, rows(2, 7), {}) == committed[0]
    table = other.read([committed[1].ref(4, 6), committed[0].ref()])
    assert [e.tokens.tolist() for e in from_table(table)] == [[10, 4], [10, 5], [2, 0], [2, 1]]
    assert other.verify() == []
    assert other.sweep(0) == 0


def test_concurrent_commits_have_one_winner(url: str, s3: dict[str, Any]) -> None:
    stores = [ExperienceStore(url, s3) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda k: stores[k].commit(1, rows(1, k + 1), {"k": k}), range(6)))
    assert len({m.path for m in results}) == 1
    store = ExperienceStore(url, s3)
    assert store.read([results[0].ref()]).num_rows == results[0].meta["k"] + 1
    assert store.sweep(0) == 0


def test_a_damaged_object_is_named(url: str, s3: dict[str, Any]) -> None:
    store = ExperienceStore(url, s3)
    manifest = store.commit(1, rows(1, 3), {})
    fsspec.filesystem("s3", **s3).pipe_file(f"{url.removeprefix('s3://')}/{manifest.path}", b"cut")
    with pytest.raises(CorruptFileError, match=manifest.path):
        store.read([manifest.ref()])


def test_orphans_are_swept_by_age(url: str, s3: dict[str, Any]) -> None:
    store = ExperienceStore(url, s3)
    manifest = store.commit(1, rows(1, 3), {})
    fs = fsspec.filesystem("s3", **s3)
    fs.pipe_file(f"{url.removeprefix('s3://')}/data/9-dead.arrow", b"x")
    assert store.sweep(3600) == 0
    # an age of -2 s: the server's time stamps are whole seconds
    assert store.sweep(-2) == 1
    assert store.read([manifest.ref()]).num_rows == 3


def test_a_missing_bucket_is_an_error_not_an_empty_batch(s3: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="no-such-bucket/x/"):
        ExperienceStore("s3://no-such-bucket/x", s3).commit(1, rows(1, 1), {})


def test_the_buffer_resumes_from_s3(url: str, s3: dict[str, Any], tmp_path: Path) -> None:
    cfg = ExperienceBufferConfig(path=url, storage_options=s3, compression="zstd")

    async def scenario() -> int:
        first = ExperienceBuffer(cfg)
        await first.prepare()
        await first.commit(1, rows(1, 4), {})
        await first.commit(2, rows(2, 4), {})
        lease = await first.lease(6, 10)
        assert lease is not None
        await first.ack(lease.lease_id)
        second = ExperienceBuffer(cfg)
        await second.prepare(await first.state_dict())
        rest = await second.lease(2, 10)
        assert rest is not None
        return ExperienceStore(url, s3).read(rest.refs).num_rows

    assert asyncio.run(asyncio.wait_for(scenario(), 120)) == 2


def test_records_lie_beside_the_store(url: str, s3: dict[str, Any], tmp_path: Path) -> None:
    """And are read from there, by the job's directory or by the store's address alone."""
    cfg = a_job(tmp_path)
    buffer = cfg.buffer.trainer_input.experience_buffer
    buffer.path, buffer.storage_options = url, s3
    save(cfg, tmp_path / "config.yaml")
    kept = a_batch(cfg, 1)
    recorder = Recorder(cfg)
    recorder.train_step(1, 0, 1, trained(kept, -0.5), 4)
    recorder.evaluation(1, 7, "held/out", experiences("1/held/out", 1), 9)
    expected = ["trained"] * 4 + ["filtered"] * 3 + ["failed"] + ["eval"] * 2
    for found in (rollouts(tmp_path), rollouts(url, storage_options=s3)):
        assert found.table(["status"])["status"].to_pylist() == expected
        numbers = found.where(status="trained").table(["train_logprobs"]).to_pylist()
        assert numbers == [{"train_logprobs": [-0.5] * 4}] * 4
    assert recorder.sweep(ExperienceStore(url, s3).manifests()) == 0

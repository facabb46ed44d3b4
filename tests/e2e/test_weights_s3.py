"""Weights of method ``checkpoint`` on S3: a real HTTP server that speaks the protocol."""

import asyncio
from typing import Any

import fsspec
import pytest
import torch

from trinity_dask.models.fake_engine import FakeEngine
from trinity_dask.models.protocol import EngineSpec, WeightReceipt, WeightUpdate
from trinity_dask.sync.shelf import Published, WeightShelf
from trinity_dask.weights.checksum import checksum
from trinity_dask.weights.files import MARKER_SUFFIX, IncompleteWeights, write_weights


@pytest.fixture(scope="module")
def options(s3: dict[str, Any]) -> dict[str, Any]:
    fsspec.filesystem("s3", **s3).mkdir("runs")
    return s3


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [("w", torch.randn(1000, 300, generator=generator)), ("b", torch.ones(seed))]


def receive(path: str, options: dict[str, Any], version: int = 1) -> WeightReceipt:
    """What an engine reports that reads ``path``."""
    engine = FakeEngine(EngineSpec("engine-0", "fake", ""))
    update = WeightUpdate(version, "checkpoint", path=path, storage_options=options)
    return asyncio.run(engine.update_weights(update))


def test_fault_17_the_same_url_twice_gives_the_second_content(options: dict[str, Any]) -> None:
    url = "s3://runs/twice/weights-1.safetensors"
    for seed in (1, 2, 3):
        sent = write_weights(url, weights(seed), options)
        assert receive(url, options).checksum == sent.value == checksum(weights(seed))


def test_fault_39_half_an_upload_is_no_version(options: dict[str, Any]) -> None:
    url = "s3://runs/half/weights-1.safetensors"
    fs = fsspec.filesystem("s3", **options)
    with pytest.raises(FileNotFoundError, match="no complete weights"):
        receive(url, options)
    write_weights(url, weights(1), options)
    name = next(n for n in fs.find("runs/half") if not n.endswith(MARKER_SUFFIX))
    fs.pipe_file(name, fs.cat_file(name)[:-4])
    with pytest.raises(IncompleteWeights, match="changed or cut"):
        receive(url, options)
    fs.rm_file(f"runs/half/weights-1.safetensors{MARKER_SUFFIX}")
    with pytest.raises(FileNotFoundError, match="no complete weights"):
        receive(url, options)


def test_a_version_that_is_wanted_stays_and_at_the_end_nothing_is_left(
    options: dict[str, Any],
) -> None:
    shelf = WeightShelf.for_run("checkpoint", "/nowhere", "run-1", "s3://runs/shelf", options)
    sums = {}
    for version in (1, 2, 3):
        path = shelf.path(version)
        digest = write_weights(path, weights(version), shelf.storage_options)
        receipt = WeightReceipt(version, digest.value, digest.n_bytes, 0.0)
        shelf.put(Published(version, path, receipt))
        sums[version] = digest.value
    shelf.sweep({1})
    assert shelf.versions == [1, 3]
    for version in shelf.versions:
        published = shelf.get(version)
        assert published is not None
        assert receive(published.path, options, version).checksum == sums[version]
    assert (asyncio.run(shelf.bare_bytes_per_s(1000)) or 0) > 0  # its sample goes again
    shelf.remove_all()
    assert fsspec.filesystem("s3", **options).find("runs/shelf") == []


def test_a_misspelt_bucket_is_an_error_and_is_not_made(options: dict[str, Any]) -> None:
    with pytest.raises(OSError, match="no-such-bucket"):
        write_weights("s3://no-such-bucket/x.safetensors", weights(1), options)
    assert not fsspec.filesystem("s3", **options).exists("no-such-bucket")

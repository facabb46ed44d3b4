"""Weights at a URL: a whole version behind a marker, or nothing."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from trinity_dask.models.protocol import WeightReceipt, WeightUpdate
from trinity_dask.sync.shelf import Published, WeightShelf
from trinity_dask.weights.checksum import Digest, checksum
from trinity_dask.weights.files import (
    IncompleteWeights,
    fetched,
    local_path,
    read_safetensors,
    remove_weights,
    write_weights,
)


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [("b", torch.randn(3, 5, generator=generator)), ("a", torch.arange(4))]


def read(path: str) -> dict[str, torch.Tensor]:
    digest = Digest()
    with fetched(WeightUpdate(1, "checkpoint", path=path)) as here:
        found = {n: t.clone() for n, t in read_safetensors(str(here.path), digest)}
    assert digest.value == checksum(found.items())
    return found


def objects(url: str) -> list[str]:
    fs, root = fsspec.url_to_fs(url)
    folder = root.rpartition("/")[0]
    return sorted(name.rpartition("/")[2] for name in fs.ls(folder, detail=False))


def expect(path: str, seed: int) -> None:
    found = read(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(seed))


@pytest.fixture(params=["memory", "file", "plain"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = f"{uuid.uuid4().hex}/weights-1.safetensors"
    bases = {"memory": "memory://", "file": f"file://{tmp_path}", "plain": str(tmp_path)}
    return f"{bases[request.param]}/{name}"


@pytest.fixture
def memory_url() -> str:
    return f"memory://{uuid.uuid4().hex}/weights-1.safetensors"


def test_fault_17_a_url_written_twice_gives_the_second_content(url: str) -> None:
    for seed in (1, 2, 3, 4):
        assert write_weights(url, weights(seed)).value == checksum(weights(seed))
        expect(url, seed)
    assert len(objects(url)) == (3 if "memory" in url else 1)  # marker, newest, the one before
    remove_weights(url)
    remove_weights(url)
    with pytest.raises(FileNotFoundError):
        read(url)


def test_fault_39_without_its_marker_an_object_does_not_exist(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that dies at each of its steps: the old version, or none, is what is there."""
    fs, root = fsspec.url_to_fs(memory_url)

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for step in ("put_file", "pipe_file"):
        with monkeypatch.context() as patched:
            patched.setattr(fs, step, dies)
            with pytest.raises(KeyboardInterrupt):
                write_weights(memory_url, weights(1))
        fs.pipe_file(root.removesuffix(".safetensors") + "-dead.safetensors", b"half")  # kill -9
        with pytest.raises(FileNotFoundError, match=r"its marker '\.complete\.json' is not there"):
            read(memory_url)
    write_weights(memory_url, weights(1))
    for step in ("put_file", "pipe_file"):
        with monkeypatch.context() as patched:
            patched.setattr(fs, step, dies)
            with pytest.raises(KeyboardInterrupt):
                write_weights(memory_url, weights(2))
        expect(memory_url, 1)


def test_a_cut_object_is_no_version(memory_url: str) -> None:
    write_weights(memory_url, weights(1))
    fs, root = fsspec.url_to_fs(memory_url)
    (name,) = fs.glob(root.removesuffix(".safetensors") + "-*.safetensors")
    fs.pipe_file(name, fs.cat_file(name)[:-8])
    with pytest.raises(IncompleteWeights, match="it was changed or cut"):
        read(memory_url)


def test_a_reader_that_began_before_two_overwrites_gets_a_whole_version(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weights(memory_url, weights(1))
    fs, _ = fsspec.url_to_fs(memory_url)
    get_file, overwrites = fs.get_file, [2, 3]

    def late(name: str, file: str) -> None:
        while overwrites:  # between the reader's look at the marker and its read
            write_weights(memory_url, weights(overwrites.pop(0)))
        get_file(name, file)

    monkeypatch.setattr(fs, "get_file", late)
    expect(memory_url, 3)


def test_only_local_files_are_paths() -> None:
    assert local_path("file:///a/b") == local_path("/a/b") == "/a/b"
    assert local_path("s3://a/b") == "s3://a/b"


# the shelf --------------------------------------------------------------------------------
def publish(shelf: WeightShelf, version: int) -> str:
    path = shelf.path(version)
    digest = write_weights(path, weights(version), shelf.storage_options)
    receipt = WeightReceipt(version, digest.value, digest.n_bytes, 0.0)
    shelf.put(Published(version, path, receipt))
    return path


@pytest.mark.parametrize("base", ["memory://{}", "{}"])
def test_the_shelf_keeps_what_is_wanted_and_leaves_nothing(base: str, tmp_path: Path) -> None:
    where = base.format(tmp_path if base == "{}" else uuid.uuid4().hex)
    shelf = WeightShelf.for_run("checkpoint", "/nowhere", "run-1", where)
    paths = [publish(shelf, version) for version in (1, 2, 3, 4)]
    assert paths[0].startswith(f"{where}/run-1/")
    shelf.sweep({2})
    assert shelf.versions == [2, 4]
    expect(paths[1], 2)
    expect(paths[3], 4)
    with pytest.raises(FileNotFoundError):
        read(paths[2])
    shelf.users.add("explorer")
    shelf.leave("explorer")
    fs, root = fsspec.url_to_fs(where)
    assert fs.find(root) == []
    assert not os.path.exists(tmp_path / "run-1")


@pytest.mark.parametrize("as_directory", [False, True])
def test_what_others_remove_stays_on_the_shelf(tmp_path: Path, as_directory: bool) -> None:
    source = tmp_path / "theirs" / "model.safetensors"
    write_weights(str(source), weights(1))
    shelf = WeightShelf(tmp_path / "ours")
    for _ in range(2):  # the same version again, as after a retry
        path = shelf.take(1, str(source.parent if as_directory else source)).path
    shelf.put(Published(1, path, WeightReceipt(1, 0, 0, 0.0)))
    source.unlink()
    expect(path, 1)
    shelf.remove_all()
    assert not (tmp_path / "ours").exists()

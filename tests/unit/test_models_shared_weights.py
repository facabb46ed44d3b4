"""Files in shared memory that are written again: never under a reader."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trinity_dask.models.protocol import WeightReceipt, WeightUpdate
from trinity_dask.sync.shelf import Published, WeightShelf
from trinity_dask.weights.checksum import checksum
from trinity_dask.weights.files import fetched, looking_at, read_safetensors, write_safetensors
from trinity_dask.weights.memory import SharedFiles, set_free


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (8, 4), "k": (2, 4), "empty": (0, 3), "one": (), "big": (300, 1000)}
    named = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    return [*named, ("half", torch.ones(7, dtype=torch.bfloat16) * seed)]


def same(found: list[tuple[str, torch.Tensor]], seed: int) -> bool:
    expected = weights(seed)
    names = [name for name, _ in found] == [name for name, _ in expected]
    return names and all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


def inode(path: str) -> int:
    return os.stat(path).st_ino


def test_a_version_is_a_safetensors_file(tmp_path: Path) -> None:
    path = str(tmp_path / "v1.safetensors")
    assert SharedFiles().write(path, weights(1)).value == checksum(weights(1))
    found = load_file(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(1))
    assert same(list(read_safetensors(path)), 1)
    look = SharedFiles().look(path)
    assert same(look.tensors(), 1)
    look.end()
    look.end()


def test_the_file_of_a_swept_version_is_written_again(tmp_path: Path) -> None:
    writer, reader = SharedFiles(), SharedFiles()
    shelf = WeightShelf(tmp_path / "shelf", in_memory=True)
    inodes = []
    for version in range(1, 7):
        path = shelf.path(version)
        writer.write(path, weights(version))
        shelf.put(Published(version, path, WeightReceipt(version, 0, 0, 0.0)))
        shelf.sweep({version - 1})  # somebody serves it still
        look = reader.look(path)
        assert same(look.tensors(), version)
        look.end()
        inodes.append(inode(path))
    assert len(set(inodes)) == 3
    shelf.remove_all()
    assert not (tmp_path / "shelf").exists()


def test_fault_17_what_is_looked_at_is_not_written(tmp_path: Path) -> None:
    """Freed by mistake while somebody reads: the next version takes another file."""
    writer, reader = SharedFiles(), SharedFiles()
    path = str(tmp_path / "v.safetensors")
    writer.write(path, weights(1))
    look, first = reader.look(path), inode(path)
    set_free(path)
    writer.write(path, weights(2))
    assert inode(path) != first
    assert same(look.tensors(), 1)
    look.end()
    set_free(path)
    writer.write(path, weights(3))
    again = reader.look(path)
    assert same(again.tensors(), 3)
    again.end()


def test_the_lock_of_a_dead_reader_is_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "v.safetensors")
    writer = SharedFiles()
    writer.write(path, weights(1))
    first = inode(path)
    code = f"import fcntl, os; fcntl.flock(os.open({path!r}, 0), fcntl.LOCK_SH); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    set_free(path)
    writer.write(path, weights(2))
    assert inode(path) == first


def test_an_update_holds_its_file_while_it_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "v.safetensors")
    writer = SharedFiles()
    writer.write(path, weights(1))
    first = inode(path)
    with fetched(WeightUpdate(1, "memory", path=path)):
        set_free(path)
        writer.write(path, weights(2))
        assert inode(path) != first
    with pytest.raises(FileNotFoundError), looking_at(str(tmp_path / "nothing")):
        pass


def test_a_write_that_fails_leaves_the_old_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "v.safetensors")
    writer = SharedFiles()
    writer.write(path, weights(1))
    with pytest.raises(ValueError, match="complex64"):
        writer.write(path, [("c", torch.ones(2, dtype=torch.complex64))])

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"the weights need .* --shm-size"):
        writer.write(path, weights(2))
    assert same(list(read_safetensors(path)), 1)
    assert os.listdir(tmp_path) == ["v.safetensors"]


def test_other_sizes_do_not_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "v.safetensors")
    writer = SharedFiles()
    writer.write(path, weights(1))
    for _ in range(4):
        set_free(path)
        writer.write(path, weights(1)[:2])
        assert [name for name, _ in read_safetensors(path)] == ["q", "k"]
        set_free(path)
        writer.write(path, weights(2))
        assert same(list(read_safetensors(path)), 2)
    assert len(os.listdir(tmp_path)) <= 3
    write_safetensors(path, weights(5))  # over it, as any other file
    assert same(list(read_safetensors(path)), 5)


def test_no_other_user_of_the_machine_can_read_the_weights(tmp_path: Path) -> None:
    """Shared memory is everybody's, and a umask may be wide."""
    before = os.umask(0)
    try:
        shelf = WeightShelf(tmp_path / "shelf", in_memory=True)
        path = shelf.path(1)
        SharedFiles().write(path, weights(1))
        SharedFiles().write(str(tmp_path / "early" / "v1.safetensors"), weights(1))
    finally:
        os.umask(before)
    for each in (path, tmp_path / "early" / "v1.safetensors"):
        assert os.stat(each).st_mode & 0o077 == 0
        assert os.stat(os.path.dirname(each)).st_mode & 0o077 == 0

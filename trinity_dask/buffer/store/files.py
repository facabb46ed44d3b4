"""The few file operations that the experience store needs, on a disk and on fsspec.

Invariant: a file appears under its final name whole or not at all, and
:meth:`StoreFiles.create` succeeds for exactly one of any number of concurrent callers.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

# schemes whose exclusive create is known to be honoured
_CONDITIONAL_CREATE = {"memory", "s3", "s3a"}
_PARALLEL_READS = 16


@dataclass(frozen=True)
class FileInfo:
    n_bytes: int
    modified: float  # Unix seconds
    staged: bool = False


class StoreFiles(Protocol):
    """Paths are relative to the store's root and use ``/``."""

    root: str

    def stage(self, path: str, data: pa.Buffer) -> None:
        """Write ``data`` durably; readers of the folder need not see it yet."""

    def reveal(self, path: str) -> None:
        """Give a staged file its final name. Doing it twice is allowed."""

    def create(self, path: str, data: bytes) -> bool:
        """Create ``path`` with ``data``; false when it exists already."""

    def discard(self, path: str) -> None:
        """Remove a file, staged or final; a missing one is no error."""

    def read(self, path: str) -> pa.Buffer:
        """All bytes of a final or staged file. Raises ``FileNotFoundError``."""

    def read_many(self, paths: Sequence[str]) -> list[pa.Buffer | Exception]:
        """Like :meth:`read` for several files at once, errors in their place."""

    def list(self, folder: str) -> dict[str, FileInfo]:
        """Files directly in ``folder`` by final path; ``staged`` tells the hidden ones."""


def _fsync_dir(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_durably(path: str, data: Any) -> None:
    """Write a new file and fsync it; on any error nothing is left behind."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(fd, "wb", buffering=0) as file:
            view = memoryview(data).cast("B")
            while view:
                view = view[file.write(view) :]
            os.fsync(fd)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(path)
        raise


class LocalFiles:
    """A directory. Staged files are hidden by a leading dot, which pyarrow and shells skip.

    So a data set opened over the data folder of a running run shows committed files only.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def _final(self, path: str) -> str:
        return os.path.join(self.root, path)

    def _staged(self, path: str) -> str:
        folder, name = os.path.split(self._final(path))
        return os.path.join(folder, "." + name)

    def stage(self, path: str, data: pa.Buffer) -> None:
        staged = self._staged(path)
        os.makedirs(os.path.dirname(staged), exist_ok=True)
        _write_durably(staged, data)
        _fsync_dir(os.path.dirname(staged))

    def reveal(self, path: str) -> None:
        final = self._final(path)
        try:
            os.rename(self._staged(path), final)
        except FileNotFoundError:
            if not os.path.exists(final):
                raise

    def create(self, path: str, data: bytes) -> bool:
        final = self._final(path)
        folder = os.path.dirname(final)
        os.makedirs(folder, exist_ok=True)
        temporary = os.path.join(folder, f".{uuid.uuid4().hex}")
        _write_durably(temporary, data)
        try:
            # a link either makes the name with its whole content or fails: no reader can
            # see half a manifest, and no second writer can replace the first
            os.link(temporary, final)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        _fsync_dir(folder)
        return True

    def discard(self, path: str) -> None:
        for name in (self._staged(path), self._final(path)):
            with suppress(FileNotFoundError):
                os.unlink(name)

    def read(self, path: str) -> pa.Buffer:
        try:
            file = pa.memory_map(self._final(path))
        except FileNotFoundError:
            if not os.path.exists(self._staged(path)):
                raise
            # the writer died after its manifest and before the rename: finish it
            self.reveal(path)
            file = pa.memory_map(self._final(path))
        with file:
            return file.read_buffer()

    def read_many(self, paths: Sequence[str]) -> list[pa.Buffer | Exception]:
        results: list[pa.Buffer | Exception] = []
        for path in paths:
            try:
                results.append(self.read(path))
            except OSError as error:
                results.append(error)
        return results

    def list(self, folder: str) -> dict[str, FileInfo]:
        found = {}
        with suppress(FileNotFoundError), os.scandir(self._final(folder)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    stat = entry.stat()
                    name = entry.name.removeprefix(".")
                    info = FileInfo(stat.st_size, stat.st_mtime, name != entry.name)
                    found[f"{folder}/{name}"] = info
        return found


class FsspecFiles:
    """An object store or memory: one PUT makes a file, whole, so staging is writing."""

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/")

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}"

    def stage(self, path: str, data: pa.Buffer) -> None:
        self.fs.pipe_file(self._full(path), data.to_pybytes())

    def reveal(self, path: str) -> None:
        """Nothing to do: the staged name is the final one."""

    def create(self, path: str, data: bytes) -> bool:
        try:
            self.fs.pipe_file(self._full(path), data, mode="create")
        except FileExistsError:
            return False
        return True

    def discard(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(self._full(path))

    def read(self, path: str) -> pa.Buffer:
        return pa.py_buffer(self.fs.cat_file(self._full(path)))

    def read_many(self, paths: Sequence[str]) -> list[pa.Buffer | Exception]:
        def read(path: str) -> pa.Buffer | Exception:
            try:
                return self.read(path)
            except OSError as error:
                return error

        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            return list(pool.map(read, paths))

    def list(self, folder: str) -> dict[str, FileInfo]:
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(self._full(folder), detail=True)
        except FileNotFoundError:
            return {}
        found = {}
        for entry in entries:
            if entry["type"] == "file":
                path = f"{folder}/{entry['name'].rsplit('/', 1)[1]}"
                found[path] = FileInfo(entry["size"], self._modified(entry))
        return found

    def _modified(self, entry: dict[str, Any]) -> float:
        stamp = entry.get("LastModified") or self.fs.modified(entry["name"])
        return stamp.timestamp() if hasattr(stamp, "timestamp") else float(stamp)


def open_files(url: str, storage_options: dict[str, Any] | None) -> StoreFiles:
    """The file operations for a path or URL.

    Raises:
        ValueError: a scheme whose exclusive create is not known to be exclusive.
    """
    fs, root = fsspec.url_to_fs(url, **(storage_options or {}))
    if isinstance(fs, LocalFileSystem):
        return LocalFiles(root)
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if not protocols & _CONDITIONAL_CREATE:
        raise ValueError(
            f"an experience store cannot live on {url!r}: the commit needs a file system "
            "with exclusive create; use a path, file://, memory:// or s3://"
        )
    return FsspecFiles(fs, root)

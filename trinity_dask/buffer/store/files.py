"""The few file operations that the experience store needs, on a disk and on fsspec.

Invariant: a file appears under its final name whole or not at all, and ``create`` succeeds
for exactly one of any number of concurrent callers. Paths are relative to the store's root
and use ``/``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from trinity_dask.files import create_durably, fsync, write_durably

# schemes whose exclusive create is known to be honoured
_CONDITIONAL_CREATE = {"memory", "s3", "s3a"}
_PARALLEL_READS = 16


@dataclass(frozen=True)
class FileInfo:
    n_bytes: int
    modified: float  # Unix seconds
    staged: bool = False


class LocalFiles:
    """A directory. Staged files are hidden by a leading dot, which pyarrow and shells skip.

    So a data set opened over the data folder of a running run shows committed files only.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def _names(self, path: str) -> tuple[Path, Path]:
        """The staged and the final name of a file."""
        final = Path(self.root, path)
        return final.with_name("." + final.name), final

    def stage(self, path: str, data: pa.Buffer) -> None:
        """Write ``data`` durably; readers of the folder do not see it yet."""
        staged, _ = self._names(path)
        staged.parent.mkdir(parents=True, exist_ok=True)
        write_durably(staged, data)
        fsync(staged.parent)

    def reveal(self, path: str) -> None:
        """Give a staged file its final name. Doing it twice is allowed."""
        staged, final = self._names(path)
        try:
            os.rename(staged, final)
        except FileNotFoundError:
            if not final.exists():
                raise

    def create(self, path: str, data: bytes) -> bool:
        """Create ``path`` with ``data``; false when it exists already."""
        return create_durably(Path(self.root, path), data)

    def discard(self, path: str) -> None:
        """Remove a file, staged or final; a missing one is no error."""
        for name in self._names(path):
            name.unlink(missing_ok=True)

    def read(self, paths: Sequence[str]) -> list[pa.Buffer | Exception]:
        """All bytes of several files, final or staged; errors in their place."""
        results: list[pa.Buffer | Exception] = []
        for path in paths:
            staged, final = self._names(path)
            try:
                if not final.exists() and staged.exists():
                    # the writer died after its manifest and before the rename: finish it
                    self.reveal(path)
                with pa.memory_map(str(final)) as file:
                    results.append(file.read_buffer())
            except OSError as error:
                results.append(error)
        return results

    def list(self, folder: str) -> dict[str, FileInfo]:
        """Files directly in ``folder`` by final path; ``staged`` tells the hidden ones."""
        found = {}
        with suppress(FileNotFoundError), os.scandir(Path(self.root, folder)) as entries:
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

    def stage(self, path: str, data: pa.Buffer) -> None:
        self.fs.pipe_file(f"{self.root}/{path}", data.to_pybytes())

    def reveal(self, path: str) -> None:
        """Nothing to do: the staged name is the final one."""

    def create(self, path: str, data: bytes) -> bool:
        try:
            self.fs.pipe_file(f"{self.root}/{path}", data, mode="create")
        except FileExistsError:
            return False
        return True

    def discard(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.root}/{path}")

    def read(self, paths: Sequence[str]) -> list[pa.Buffer | Exception]:
        def read(path: str) -> pa.Buffer | Exception:
            try:
                return pa.py_buffer(self.fs.cat_file(f"{self.root}/{path}"))
            except OSError as error:
                return error

        if len(paths) == 1:
            return [read(paths[0])]
        with ThreadPoolExecutor(_PARALLEL_READS) as pool:
            return list(pool.map(read, paths))

    def list(self, folder: str) -> dict[str, FileInfo]:
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(f"{self.root}/{folder}", detail=True)
        except FileNotFoundError:
            return {}
        found = {}
        for entry in entries:
            if entry["type"] == "file":
                path = f"{folder}/{entry['name'].rsplit('/', 1)[1]}"
                stamp = entry.get("LastModified") or self.fs.modified(entry["name"])
                modified = stamp.timestamp() if hasattr(stamp, "timestamp") else float(stamp)
                found[path] = FileInfo(entry["size"], modified)
        return found


def open_files(url: str, storage_options: dict[str, Any] | None) -> LocalFiles | FsspecFiles:
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

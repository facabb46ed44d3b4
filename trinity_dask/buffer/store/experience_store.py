"""The experience store: batches of experiences as Arrow files, each made real by a manifest.

Invariant: a batch exists exactly when ``commit/<batch>.json`` does; that file is created
exclusively and only after its data is durable, so a batch is committed once and whole or
not at all, whoever dies when. Readers list manifests, never data files. A file appears under its
final name whole or not at all, and of any number of concurrent commits exactly one makes the
manifest.

Layout: ``data/<batch>-<uuid>.arrow`` (Arrow IPC file format, one record batch) and
``commit/<batch>.json``. Any Arrow reader can open the data folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from trinity_dask.buffer.errors import CorruptFileError, StoreError
from trinity_dask.buffer.store.manifest import SUFFIX, Manifest, RowRef, batch_key
from trinity_dask.experience.schema import SCHEMA, check_schema, conform, plain
from trinity_dask.files import create_durably, fsync, replacing, write_durably

log = logging.getLogger(__name__)

DATA = "data"
COMMIT = "commit"
COMPRESSIONS = (None, "lz4", "zstd")
# schemes whose exclusive create is known to be honoured
_CONDITIONAL_CREATE = {"memory", "s3", "s3a"}
_PARALLEL_READS = 16


class ExperienceStore:
    """Committed batches under one path or URL (``file``, ``memory`` or ``s3``).

    ``compression`` (None, ``lz4``, ``zstd``) applies to new files; None keeps local
    reads zero-copy. With ``skip_corrupt`` a damaged data file is logged, counted in
    :attr:`skipped_files` / :attr:`skipped_rows` and left out of :meth:`read`; otherwise
    it raises :class:`CorruptFileError`. Safe to use from several threads and processes.
    """

    def __init__(
        self,
        url: str,
        storage_options: dict[str, Any] | None = None,
        compression: str | None = None,
        skip_corrupt: bool = False,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression is None, 'lz4' or 'zstd' (got {compression!r})")
        self.url = url
        self.compression = compression
        self.skip_corrupt = skip_corrupt
        self.skipped_files: set[str] = set()
        self.skipped_rows = 0
        self._files = open_files(url, storage_options)
        self._next_order = 0
        self._lock = threading.Lock()

    # -- commit ---------------------------------------------------------------------

    def commit(self, batch_id: int | str, table: pa.Table, meta: dict[str, Any]) -> Manifest:
        """Commit ``table`` as ``batch_id``; the first commit of a batch wins.

        A later commit changes nothing and returns the first manifest. On a local disk
        the data is fsynced before the manifest appears.

        Raises:
            StoreError: the file system failed (disk full, no permission, unreachable);
                the batch is not visible.
            ValueError: ``table`` has not the schema of experiences, or ``meta`` is no JSON.
        """
        check_schema(table)
        existing = self.get_manifest(batch_id)
        if existing is not None:
            return existing
        data = serialise(table.select(SCHEMA.names).cast(SCHEMA), self.compression)
        try:
            meta = json.loads(json.dumps(meta, default=plain))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the meta of a batch must be JSON: it holds {error}") from error
        if self._next_order == 0:
            self.manifests()  # continue the numbering of an earlier process
        with self._lock:
            order, self._next_order = self._next_order, self._next_order + 1
        path = f"{DATA}/{batch_key(batch_id)}-{uuid.uuid4().hex}.arrow"
        with ThreadPoolExecutor(1) as pool:  # the digest is computed while the disk is busy
            digest = pool.submit(lambda: hashlib.sha256(data).hexdigest())
            try:
                self._files.stage(path, data)
            except Exception as error:
                raise self._write_error(batch_id, path, error) from error
        mine = Manifest(
            batch_id, path, table.num_rows, data.size, digest.result(), meta, time.time(), order
        )
        # An answer can get lost after the file was made (a retried PUT then finds its own
        # file), so neither an error nor "exists already" proves that this commit lost: what
        # is there decides.
        failure: Exception = FileNotFoundError("the manifest vanished after it was written")
        manifest = f"{COMMIT}/{batch_key(batch_id)}{SUFFIX}"
        try:
            self._files.publish(path, manifest, mine.to_json())
        except Exception as error:
            failure = error
        winner = self.get_manifest(batch_id)
        if winner is None or winner.path != path:
            self._files.discard(path)
        if winner is None:
            raise self._write_error(batch_id, manifest, failure) from failure
        return winner

    def _write_error(self, batch_id: int | str, path: str, error: Exception) -> StoreError:
        return StoreError(
            f"batch {batch_id!r} is not committed: writing {self._files.root}/{path} failed with "
            f"{type(error).__name__}: {error}. Free space or repair the path, then resume."
        )

    # -- manifests ------------------------------------------------------------------

    def get_manifest(self, batch_id: int | str) -> Manifest | None:
        """The manifest of a batch, or None when it is not committed."""
        path = f"{COMMIT}/{batch_key(batch_id)}{SUFFIX}"
        try:
            return self._read_manifests([path])[0]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._read_error(path, error) from error

    def manifests(self) -> list[Manifest]:
        """All committed batches: integer ids in numeric order, then names by commit order."""
        try:
            listed = [p for p in self._files.list(COMMIT) if p.endswith(SUFFIX)]
            return sorted(self._read_manifests(listed), key=lambda m: m.sort_key)
        except OSError as error:
            raise self._read_error(COMMIT, error) from error

    def _read_manifests(self, paths: list[str]) -> list[Manifest]:
        """Not kept here: a long job has many. Raises the OSError of the first failure."""
        found = []
        for path, data in zip(paths, self._files.read(paths), strict=True):
            if isinstance(data, Exception):
                raise data
            try:
                found.append(Manifest.from_json(data.to_pybytes()))
            except (ValueError, TypeError) as error:
                raise CorruptFileError(
                    f"{self._files.root}/{path} is no manifest of this store ({error}); "
                    "restore it, or remove it to forget that batch"
                ) from error
        with self._lock:
            self._next_order = max([self._next_order, *(m.order + 1 for m in found)])
        return found

    def _read_error(self, path: str, error: Exception) -> StoreError:
        return StoreError(
            f"reading {self._files.root}/{path} failed with {type(error).__name__}: {error}"
        )

    # -- rows -----------------------------------------------------------------------

    def read(self, refs: Sequence[RowRef], skip_corrupt: bool | None = None) -> pa.Table:
        """The referenced rows in order; memory-mapped, without a copy, on a local disk.

        Raises:
            CorruptFileError: a file is missing, cut short, foreign, or has too few rows,
                and ``skip_corrupt`` (the store's, when None) is off.
        """
        skip = self.skip_corrupt if skip_corrupt is None else skip_corrupt
        paths = list(dict.fromkeys(ref.path for ref in refs))
        opened = dict(zip(paths, self._files.read(paths), strict=True))
        tables: list[pa.Table] = []
        decoded: dict[str, pa.Table] = {}
        for ref in refs:
            try:
                if ref.path not in decoded:
                    decoded[ref.path] = self._decode(ref.path, opened[ref.path])
                table = decoded[ref.path]
                if not 0 <= ref.start <= ref.stop <= table.num_rows:
                    raise CorruptFileError(
                        f"{self._files.root}/{ref.path} has {table.num_rows} rows, but rows "
                        f"{ref.start}..{ref.stop} of batch {ref.batch_id!r} were committed; it "
                        "was replaced after its commit"
                    )
                tables.append(table.slice(ref.start, ref.rows))
            except CorruptFileError as error:
                if not skip:
                    raise
                with self._lock:
                    self.skipped_files.add(ref.path)
                    self.skipped_rows += ref.rows
                log.warning("skipped %d rows of batch %r: %s", ref.rows, ref.batch_id, error)
        return pa.concat_tables(tables) if tables else SCHEMA.empty_table()

    def _decode(self, path: str, data: pa.Buffer | Exception) -> pa.Table:
        try:
            if isinstance(data, Exception):
                raise data
            table = conform(pa.ipc.open_file(pa.BufferReader(data)).read_all())
            table.validate()
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise CorruptFileError(
                f"{self._files.root}/{path} is missing, cut short or not a file of this store "
                f"({type(error).__name__}: {error}). Restore it, or set skip_corrupt=true to "
                "go on without its rows."
            ) from error
        return table

    # -- upkeep ---------------------------------------------------------------------

    def verify(self) -> list[str]:
        """Read every data file in full; one line per batch whose file is not as committed."""
        problems = []
        for manifest in self.manifests():
            name = f"batch {manifest.batch_id!r}: {manifest.path}"
            data = self._files.read([manifest.path])[0]
            if isinstance(data, Exception):
                problems.append(f"{name} cannot be read ({type(data).__name__}: {data})")
            elif data.size != manifest.n_bytes:
                problems.append(f"{name} has {data.size} bytes instead of {manifest.n_bytes}")
            elif hashlib.sha256(data).hexdigest() != manifest.sha256:
                problems.append(f"{name} differs from what was committed (sha256)")
        return problems

    def sweep(self, older_than_s: float) -> int:
        """Remove files that no manifest names and that are older than ``older_than_s``.

        Such files are left by writers that died between data and manifest. The age must
        exceed the longest commit in progress, or a live writer loses its data.
        Returns the number of removed files.
        """
        # data is listed before manifests: a batch committed in between is then not an orphan
        candidates = {**self._files.list(DATA), **self._files.list(COMMIT)}
        committed = {m.path for m in self.manifests()}
        limit = time.time() - older_than_s
        orphans = [
            path
            for path, info in candidates.items()
            if path not in committed and not path.endswith(SUFFIX) and info.modified <= limit
        ]
        for path in orphans:
            self._files.discard(path)
        return len(orphans)

    def finish_commits(self) -> list[Manifest]:
        """Give every committed file its visible name (a writer may have died just before).

        Returns :meth:`manifests`.
        """
        listed, committed = self._files.list(DATA), self.manifests()
        for manifest in committed:
            info = listed.get(manifest.path)
            if info is not None and info.staged:
                self._files.reveal(manifest.path)
        return committed


def serialise(table: pa.Table, compression: str | None = None) -> pa.Buffer:
    """The table as one Arrow IPC file with at most one record batch."""
    table = table.combine_chunks()
    options = pa.ipc.IpcWriteOptions(compression=compression)

    def write(sink: pa.NativeFile) -> None:
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table)

    if compression is None:
        # the size is known without writing; a buffer that need not grow is twice as fast
        size = pa.MockOutputStream()
        write(size)
        buffer = pa.allocate_buffer(size.size())
        write(pa.FixedSizeBufferWriter(buffer))
        return buffer
    sink = pa.BufferOutputStream()
    write(sink)
    return sink.getvalue()


# -- files: paths are relative to the root of the store and use / ---------------------


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

    def publish(self, path: str, manifest: str, text: bytes) -> None:
        """Create ``manifest`` with ``text``, and give the staged file its final name. Where it
        exists already nothing changes."""
        staged, final = self._names(path)
        if create_durably(Path(self.root, manifest), text):
            with suppress(FileNotFoundError):  # a reader that saw the manifest has done it
                os.rename(staged, final)

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

    def put(self, path: str, data: pa.Buffer) -> None:
        """Make or replace a file, durably and whole."""
        with replacing(Path(self.root, path)) as partial:
            write_durably(partial, data)

    def open(self, path: str) -> pa.NativeFile:
        """For reading parts of a file. Raises OSError when there is none."""
        return pa.memory_map(str(Path(self.root, path)))

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

    def publish(self, path: str, manifest: str, text: bytes) -> None:
        with suppress(FileExistsError):
            self.fs.pipe_file(f"{self.root}/{manifest}", text, mode="create")

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

    def put(self, path: str, data: pa.Buffer) -> None:
        self.fs.pipe_file(f"{self.root}/{path}", data.to_pybytes())

    def open(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self.fs.open(f"{self.root}/{path}", "rb"), mode="r")

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

"""The versions that lie in files: written once, leased by readers, then removed.

Invariant: a file on the shelf is whole (it was renamed into place, or its marker was written
after it, and its checksum is known), and it is removed only when it is neither the newest nor
wanted by anyone who said so. What others publish is held by links of the shelf's own, so that
their removing it takes it from no reader. The bare speed of the place is measured once, with a
sample, and given up at a deadline: a run starts no later for it, and without it runs all the same.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from trinity_dask.models.protocol import WeightReceipt, WeightUpdate
from trinity_dask.weights.checksum import Digest
from trinity_dask.weights.files import (
    fetched,
    is_url,
    local_path,
    read_safetensors,
    remove_weights,
    write_weights,
)
from trinity_dask.weights.memory import SHARED, disown, own, remove_free, set_free

log = logging.getLogger("trinity_dask.weights")

SAMPLE_BYTES = 16 << 20
MEASURE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Probe:
    """Log-probs of fixed sequences under the trainer's weights: float32, in nats."""

    sequences: list[list[int]]
    logprobs: list[np.ndarray]


@dataclass(frozen=True)
class Published:
    """One version in a file, with what proves that a reader got it."""

    version: int
    path: str
    receipt: WeightReceipt
    probe: Optional[Probe] = None


class WeightShelf:
    """The published versions of one trainer, in ``base``: a directory, or a URL with fsspec's
    ``storage_options``."""

    def __init__(
        self,
        base: str | Path,
        storage_options: Optional[Mapping[str, Any]] = None,
        in_memory: bool = False,
    ) -> None:
        base = local_path(str(base)).rstrip("/")
        # other processes that read here may work in another directory
        self.is_local = not is_url(base)
        self.base = os.path.abspath(base) if self.is_local else base
        self.storage_options = dict(storage_options or {})
        self.in_memory = in_memory  # its files are written again, see weights/memory.py
        self.users: set[str] = set()
        self._owned: Optional[int] = None  # what holds the directory, see weights/memory.py
        self._held: dict[int, Published] = {}
        self._bare: Optional[float] = None
        self._is_measured = False

    @classmethod
    def for_run(
        cls,
        method: str,
        job_dir: str,
        run_id: str,
        path: Optional[str] = None,
        storage_options: Optional[Mapping[str, Any]] = None,
    ) -> WeightShelf:
        """In shared memory for method ``memory``; else below ``path``, or in the job directory."""
        if method == "memory":
            shelf = cls(SHARED / f"trinity-dask-{os.getuid()}-{run_id}", in_memory=True)
            shelf._owned = own(shelf.base)
            return shelf
        if method == "checkpoint" and path:
            return cls(f"{path.rstrip('/')}/{run_id}", storage_options)
        return cls(Path(job_dir) / "weights")

    def path(self, version: int) -> str:
        """Where ``version`` is to be written; a local directory exists afterwards."""
        if self.is_local:
            self._make_base()
        return f"{self.base}/weights-{version}.safetensors"

    def _make_base(self) -> None:
        """In shared memory, which all users of the machine see, for its owner alone."""
        os.makedirs(self.base, mode=0o700 if self.in_memory else 0o777, exist_ok=True)

    def take(self, version: int, weights: Mapping[str, Any] | str) -> Published:
        """Write tensors by name, or hold a file or directory of them so that it stays until it is
        swept, whatever becomes of it; reads it for its checksum.

        Raises:
            FileNotFoundError: there is nothing at the path.
        """
        options, start = self.storage_options, time.perf_counter()
        if isinstance(weights, str):
            path, digest = self._hold(version, weights), Digest()
            update = WeightUpdate(version, "checkpoint", path=path, storage_options=options)
            with fetched(update) as here:
                for _ in read_safetensors(str(here.path), digest):
                    pass
        else:
            path = self.path(version)
            digest = write_weights(path, weights.items(), options)
        seconds = time.perf_counter() - start
        receipt = WeightReceipt(version, digest.value, digest.n_bytes, seconds)
        return Published(version, path, receipt)

    def _hold(self, version: int, source: str) -> str:
        if is_url(source) or not self.is_local:
            return source  # its own name is all that there is
        is_dir = os.path.isdir(source)
        target = f"{self.base}/weights-{version}" if is_dir else self.path(version)
        self._discard(target)
        self._make_base()
        if is_dir:
            shutil.copytree(source, target, copy_function=_link)
        else:
            _link(source, target)
        return target

    async def bare_bytes_per_s(self, n_bytes: int) -> Optional[float]:
        """Of a copy in memory, or of a write and a read where the versions lie, when nothing is
        done with the bytes; measured at the first call. None if that took too long or failed."""
        if not self._is_measured:
            self._is_measured = True
            sample = max(min(n_bytes, SAMPLE_BYTES), 1)
            try:
                async with asyncio.timeout(MEASURE_TIMEOUT_S):
                    seconds = await asyncio.to_thread(self._timed_copy, sample)
                self._bare = sample / max(seconds, 1e-9)
            except Exception as error:
                log.info("the bare speed of %s is not known: %r", self.base, error)
        return self._bare

    def _timed_copy(self, n_bytes: int) -> float:
        data = np.ones(n_bytes, dtype=np.uint8)
        if self.in_memory:
            target = np.zeros_like(data)  # its pages are there before the clock runs
            start = time.perf_counter()
            target[:] = data
            return time.perf_counter() - start
        import fsspec

        content = data.tobytes()
        start = time.perf_counter()
        if self.is_local:
            self._make_base()
        fs, root = fsspec.url_to_fs(f"{self.base}/.speed", **self.storage_options)
        try:
            fs.pipe_file(root, content)
            fs.cat_file(root)
            return time.perf_counter() - start
        finally:
            with suppress(FileNotFoundError):
                fs.rm_file(root)

    def put(self, published: Published) -> None:
        self._held[published.version] = published

    def get(self, version: int) -> Optional[Published]:
        return self._held.get(version)

    @property
    def versions(self) -> list[int]:
        return sorted(self._held)

    def sweep(self, wanted: Collection[int]) -> None:
        """Remove what is older than the newest and not in ``wanted``."""
        for version in self.versions[:-1]:
            if version not in wanted:
                self._remove(version)

    def leave(self, user: str) -> None:
        """``user`` reads and writes here no more; the last one's leaving empties the shelf."""
        self.users.discard(user)
        if not self.users:
            self.remove_all()

    def remove_all(self) -> None:
        """Remove every file, and the directory if nothing else is in it. Idempotent."""
        for version in self.versions:
            self._remove(version)
        if self.in_memory:
            remove_free(self.base)
        if self.is_local:
            with suppress(OSError):  # there is something else in it, or it is gone
                os.rmdir(self.base)
        if self._owned is not None:
            disown(self.base, self._owned)
            self._owned = None

    def _remove(self, version: int) -> None:
        path = self._held.pop(version).path
        if path.rpartition("/")[0] == self.base:  # a URL that somebody else published is not ours
            self._discard(path)

    def _discard(self, path: str) -> None:
        if self.is_local and os.path.isdir(path):
            shutil.rmtree(path)
        elif self.in_memory:
            set_free(path)
        else:
            remove_weights(path, self.storage_options)


def _link(source: str, target: str) -> str:
    """A second name of the file, or a copy where there is no such thing."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
    return target

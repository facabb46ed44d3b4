"""The versions that lie in files: written once, leased by readers, then removed.

Invariant: a file on the shelf is whole (it was renamed into place and its checksum is known),
and it is removed only when it is neither the newest nor wanted by anyone who said so.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np

from trinity_dask.models.protocol import WeightReceipt


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
    """The published versions of one trainer."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.users: set[str] = set()
        self._held: dict[int, Published] = {}

    @classmethod
    def for_run(cls, method: str, job_dir: str, run_id: str) -> WeightShelf:
        """In shared memory for method ``memory``, else in the job directory."""
        if method == "memory":
            return cls(Path("/dev/shm") / f"trinity-dask-{os.getuid()}-{run_id}")
        return cls(Path(job_dir) / "weights")

    def path(self, version: int) -> Path:
        """Where ``version`` is to be written; the directory exists afterwards."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return self.directory / f"weights-{version}.safetensors"

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
        if self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def _remove(self, version: int) -> None:
        path = Path(self._held.pop(version).path)
        if path.parent == self.directory:  # a file that somebody else published is not ours
            path.unlink(missing_ok=True)

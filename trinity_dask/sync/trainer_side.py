"""Trainer rank 0 as the weights' source: what it can be asked, and what it proves.

Invariant: every call has a deadline; probe sequences and tensor metadata are asked for once,
since they do not change during a run.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np

from trinity_dask.cluster.rpc import ActorHandle, rpc
from trinity_dask.models.protocol import TensorMeta, WeightReceipt
from trinity_dask.sync.shelf import Probe, Published, WeightShelf

N_PROBES = 8
PROBE_TOKENS = 12


def probe_sequences(vocab_size: int) -> list[list[int]]:
    """Eight fixed token sequences, the same in every process and run."""
    generator = np.random.default_rng(20_240_229)
    return generator.integers(0, vocab_size, size=(N_PROBES, PROBE_TOKENS)).tolist()


class TrainerSide:
    """Rank 0 of the trainer; ``rank0`` is replaced when the ranks are rebuilt."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.rank0: Optional[ActorHandle] = None
        self._meta: Optional[tuple[TensorMeta, ...]] = None
        self._sequences: Optional[list[list[int]]] = None

    @property
    def handle(self) -> ActorHandle:
        if self.rank0 is None:
            raise RuntimeError("no trainer rank is attached to the weight transport")
        return self.rank0

    async def call(self, method: str, *args: Any) -> Any:
        return await rpc(self.handle, method, *args, timeout=self.timeout_s)

    def set_meta(self, meta: tuple[TensorMeta, ...]) -> None:
        self._meta = meta

    async def tensor_meta(self) -> tuple[TensorMeta, ...]:
        if self._meta is None:
            self._meta = tuple(await self.call("weight_meta"))
        return self._meta

    async def probe(self) -> Probe:
        """The trainer's log-probs of the fixed sequences, with the weights it has now."""
        sequences = await self.sequences()
        return Probe(sequences, await self.call("probe_logprobs", sequences))

    async def sequences(self) -> list[list[int]]:
        """Those that both sides score."""
        if self._sequences is None:
            self._sequences = probe_sequences(await self.call("vocab_size"))
        return self._sequences

    async def publish(self, shelf: WeightShelf, version: int, probe: bool) -> Published:
        """Write the current weights to the shelf as ``version``; the trainer stands still."""
        path, options = shelf.path(version), shelf.storage_options
        receipt: WeightReceipt = await self.call(
            "write_weights", path, version, *([options] if options else [])
        )
        published = Published(version, path, receipt, await self.probe() if probe else None)
        shelf.put(published)
        return published

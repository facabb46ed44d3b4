"""Which engines the log-prob probe after a weight update asks."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.models.protocol import WeightReceipt
from trinity_dask.sync.link_floor import FileFloor
from trinity_dask.sync.shelf import Probe, Published, WeightShelf
from trinity_dask.sync.transport import WeightMismatch, WeightTransport


class Engines(WeightTransport):
    """A transport whose engines answer here: their receipts are given, log-probs are all 0."""

    def __init__(self, *receipts: WeightReceipt) -> None:
        self.cfg = SynchronizerConfig(sync_method="memory")
        self.receipts = dict(enumerate(receipts))
        self.asked: list[Any] = []
        self.shelf, self._floor = WeightShelf("nowhere", in_memory=True), FileFloor()

    async def _call(self, slot: Any, method: str, *args: Any) -> Any:
        if method == "update_weights":
            return self.receipts[slot]
        assert method == "logprobs_of"
        self.asked.append(slot)
        return [np.zeros(1, dtype=np.float32) for _ in args[0]]

    async def moved(self, logprob: float) -> dict[str, float]:
        probe = Probe([[1, 2]], [np.full(1, logprob, dtype=np.float32)])
        published = Published(1, "file", WeightReceipt(1, 7, 4, 0.0), probe)
        return await self.load(published, list(self.receipts))


def test_an_engine_without_a_model_is_checked_by_its_checksum_alone() -> None:
    real, fake = WeightReceipt(1, 7, 4, 0.0), WeightReceipt(1, 7, 4, 0.0, has_logprobs=False)
    engines = Engines(fake)
    assert "sync/probe_max_abs_diff" not in asyncio.run(engines.moved(-5.0))
    assert engines.asked == []
    with pytest.raises(WeightMismatch, match="checksum"):
        asyncio.run(Engines(WeightReceipt(1, 8, 4, 0.0, has_logprobs=False)).moved(0.0))
    both = Engines(fake, real)
    assert asyncio.run(both.moved(0.0))["sync/probe_max_abs_diff"] == 0.0
    assert both.asked == [1]
    with pytest.raises(WeightMismatch, match="nats"):
        asyncio.run(Engines(real).moved(-5.0))

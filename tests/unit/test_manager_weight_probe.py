"""Which engines the log-prob probe after a weight update asks."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.engines.pool import WeightMismatch
from trinity_dask.models.protocol import WeightReceipt
from trinity_dask.sync import transfer
from trinity_dask.sync.shelf import Probe, Published, WeightShelf
from trinity_dask.sync.state import SyncState
from trinity_dask.sync.transfer import WeightTransfers


class Engines:
    """A pool whose engines answer here: their receipts are given, log-probs are all 0."""

    losses = 0

    def __init__(self, *receipts: WeightReceipt) -> None:
        self.receipts = dict(enumerate(receipts))
        self.asked: list[Any] = []

    def slots(self) -> list[Any]:
        return list(self.receipts)

    def handle(self, slot: Any) -> Any:
        return self, slot

    async def wait_present(self, timeout_s: float) -> None:
        assert timeout_s > 0

    def took_weights(self, slots: list[Any], version: int) -> None:
        assert set(slots) <= self.receipts.keys()

    def answer(self, slot: Any, method: str, *args: Any) -> Any:
        if method == "update_weights":
            return self.receipts[slot]
        assert method == "logprobs_of"
        self.asked.append(slot)
        return [np.zeros(1, dtype=np.float32) for _ in args[0]]

    async def moved(self, logprob: float) -> dict[str, float]:
        """What a transfer tells of itself, and the share of it that the bare way would take."""
        state, shelf = SyncState(method="memory"), WeightShelf("nowhere", in_memory=True)
        transfers = WeightTransfers(SynchronizerConfig(sync_method="memory"), state, shelf)
        transfers.attach("e", self, "gloo")  # type: ignore[arg-type]
        probe = Probe([[1, 2]], [np.full(1, logprob, dtype=np.float32)])
        shelf.put(Published(1, "file", WeightReceipt(1, 7, 4, 2.0), probe))
        await transfers.load("e", 1)
        bare = await shelf.bare_bytes_per_s(4)
        assert bare is not None
        share = 4 / bare / transfers.metrics["sync/seconds"]
        assert transfers.metrics["sync/floor_share"] == pytest.approx(share)
        assert transfers.metrics["sync/seconds"] >= 2.0  # the writing is part of it
        return transfers.metrics


@pytest.fixture(autouse=True)
def no_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rpc(handle: Any, method: str, *args: Any, timeout: float) -> Any:
        engines, slot = handle
        return engines.answer(slot, method, *args)

    monkeypatch.setattr(transfer, "rpc", rpc)


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

"""The speed of the bare way: measured once, never in the way of a run."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from trinity_dask.sync import shelf as shelf_module
from trinity_dask.sync.shelf import WeightShelf


def measured(shelf: WeightShelf, times: int = 1) -> list[Any]:
    async def body() -> list[Any]:
        return [await shelf.bare_bytes_per_s(10_000) for _ in range(times)]

    return asyncio.run(asyncio.wait_for(body(), 60))


def test_it_is_measured_once_and_leaves_nothing(tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    shelves = [
        WeightShelf(tmp_path / "shelf"),
        WeightShelf(tmp_path / "shm", in_memory=True),
        WeightShelf(url),
    ]
    for shelf in shelves:
        first, second = measured(shelf, times=2)
        assert first > 0
        assert second is first
        shelf.remove_all()
    assert list(tmp_path.iterdir()) == []
    assert fsspec.filesystem("memory").find(url) == []


def test_what_cannot_be_measured_stays_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert measured(WeightShelf(tmp_path / "file" / "below")) == [None]
    monkeypatch.setattr(shelf_module, "MEASURE_TIMEOUT_S", 0.0)
    assert measured(WeightShelf(tmp_path / "slow"), times=2) == [None, None]

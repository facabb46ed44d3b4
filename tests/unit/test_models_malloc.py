"""Large memory is ordinary memory."""

from __future__ import annotations

import gc

import pytest
import torch

from trinity_dask.weights.memory import HUGE_PAGE_BYTES, large_buffer


@pytest.mark.parametrize("n_bytes", [0, 1, HUGE_PAGE_BYTES - 1, 3 * HUGE_PAGE_BYTES + 64])
def test_it_holds_what_is_written_for_as_long_as_a_view_lives(n_bytes: int) -> None:
    memory = large_buffer(n_bytes)
    assert memory.dtype == torch.uint8
    assert memory.shape == (n_bytes,)
    assert memory.data_ptr() % 64 == 0
    memory.copy_(torch.arange(n_bytes) % 251)
    view = memory[n_bytes // 2 :]
    del memory
    gc.collect()
    assert torch.equal(view, (torch.arange(n_bytes) % 251)[n_bytes // 2 :].to(torch.uint8))


def test_another_device_has_its_own_memory() -> None:
    assert large_buffer(HUGE_PAGE_BYTES, "meta").device.type == "meta"

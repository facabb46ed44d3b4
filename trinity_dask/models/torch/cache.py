"""The key/value cache of the batched sampler.

Invariant: all rows of the batch have the same length in the cache, because prompts are
padded on the left; memory for the longest possible answer is reserved once per batch.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class ReservedLayer(CacheLayerMixin):
    """Keys and values of one layer: ``[rows, heads, capacity, head_dim]``."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, head_dim = key_states.shape
        self.keys = key_states.new_empty(rows, heads, self.capacity, head_dim)
        self.values = value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select(self, index: torch.Tensor) -> None:
        """Keep, repeat or drop rows: row ``i`` becomes the old row ``index[i]``."""
        assert self.keys is not None
        assert self.values is not None
        self.keys = self._gathered(self.keys, index)
        self.values = self._gathered(self.values, index)

    def _gathered(self, old: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        new = old.new_empty(len(index), *old.shape[1:])
        # only what is filled is copied
        filled = new[:, :, : self.length]
        torch.index_select(old[:, :, : self.length], 0, index, out=filled)
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class ReservedCache(Cache):
    """One :class:`ReservedLayer` per decoder layer, ``capacity`` tokens per row."""

    def __init__(self, n_layers: int, capacity: int) -> None:
        self.reserved = [ReservedLayer(capacity) for _ in range(n_layers)]
        super().__init__(layers=list(self.reserved))

    def select(self, index: torch.Tensor) -> None:
        for layer in self.reserved:
            layer.select(index)

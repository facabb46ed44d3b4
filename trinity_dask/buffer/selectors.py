"""The order in which the rows of a file are read.

Invariant: the indices are a function of (rows, seed, position) alone, and the position is
the number of indices given so far. So restoring the position restores the order exactly,
at an epoch edge too, and changing the batch size does not reshuffle (``random`` excepted).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from trinity_dask.algorithm.registry import Registry

SELECTORS: Registry = Registry("selector")


class Selector(Protocol):
    def get_indices(self, batch_size: int) -> list[int]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Positioned:
    """State that all selectors share. ``n_rows`` must be at least 1."""

    def __init__(self, n_rows: int, seed: int = 42) -> None:
        if n_rows < 1:
            raise ValueError(f"a selector needs at least one row (got {n_rows})")
        self.n_rows = n_rows
        self.seed = seed
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])


@SELECTORS.register_module("sequential")
class SequentialSelector(_Positioned):
    """Rows in file order, again from the start at the end."""

    def get_indices(self, batch_size: int) -> list[int]:
        start = self.position
        self.position += batch_size
        return [i % self.n_rows for i in range(start, self.position)]


@SELECTORS.register_module("shuffle")
class ShuffleSelector(_Positioned):
    """Epoch ``e`` is the permutation of ``default_rng(seed + e)``."""

    def get_indices(self, batch_size: int) -> list[int]:
        indices: list[int] = []
        while len(indices) < batch_size:
            epoch, offset = divmod(self.position, self.n_rows)
            order = np.random.default_rng(self.seed + epoch).permutation(self.n_rows)
            part = order[offset : offset + batch_size - len(indices)].tolist()
            indices += part
            self.position += len(part)
        return indices


@SELECTORS.register_module("random")
class RandomSelector(_Positioned):
    """Each batch is a draw without replacement by ``default_rng(seed + position)``."""

    def get_indices(self, batch_size: int) -> list[int]:
        if batch_size > self.n_rows:
            raise ValueError(
                f"selector 'random' draws {batch_size} different rows of {self.n_rows}; "
                "lower the batch size, or use 'shuffle'"
            )
        rng = np.random.default_rng(self.seed + self.position)
        self.position += batch_size
        return rng.choice(self.n_rows, batch_size, replace=False).tolist()

"""The order in which the rows of a file are read.

Invariant: the indices are a function of (rows, seed, state) alone; the state is the position
(the number of indices given so far) and, where a selector learns, all that it has learned.
So restoring the state restores the order exactly, at an epoch edge too, and changing the
batch size does not reshuffle (``random`` and ``difficulty_based`` excepted).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from trinity_dask.buffer.data.readers import RowReader
from trinity_dask.buffer.errors import DataError
from trinity_dask.config.schema import SelectorConfig
from trinity_dask.registry import Registry, build

SELECTORS: Registry[Any] = Registry(
    "selector", {"difficulty_based": "trinity_dask.buffer.data.difficulty:DifficultySelector"}
)


class Selector(Protocol):
    """Made of ``(n_rows, seed, **kwargs)``, and of ``features`` where it declares them.

    ``features`` is float64 ``[rows, keys]``, the columns ``data_selector.feature_keys``.
    """

    def get_indices(self, batch_size: int) -> list[int]: ...

    def update(self, indices: Sequence[int], values: Sequence[float]) -> None:
        """Learn from what was observed: ``values`` (as pass rates) of rows ``indices``."""

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

    def update(self, indices: Sequence[int], values: Sequence[float]) -> None:
        """What was observed changes nothing here."""

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


@SELECTORS.register_module("offline_easy2hard")
class EasyToHardSelector(SequentialSelector):
    """Rows sorted once by (features…, index), the largest first; then in that order, round.

    With pass rates as features the easy rows come first.
    """

    def __init__(self, n_rows: int, seed: int = 42, *, features: np.ndarray) -> None:
        super().__init__(n_rows, seed)
        keys = [(*map(float, row), index) for index, row in enumerate(features)]
        self._order = [int(key[-1]) for key in sorted(keys, reverse=True)]

    def get_indices(self, batch_size: int) -> list[int]:
        return [self._order[place] for place in super().get_indices(batch_size)]


def make_selector(cfg: SelectorConfig, reader: RowReader) -> Selector:
    """The selector that ``cfg`` describes, for the rows of ``reader``.

    Raises:
        ValueError: an unknown selector or argument, or features too few or too many.
        DataError: a row has no number in a feature column.
    """
    factory = SELECTORS.get(cfg.selector_type)
    args: dict[str, Any] = {**cfg.kwargs, "n_rows": len(reader), "seed": cfg.seed}
    if _needs_features(factory):
        if not cfg.feature_keys:
            raise ValueError(
                f"data_selector.selector_type={cfg.selector_type} needs feature_keys: the number "
                "columns that say how hard a row is"
            )
        args["features"] = read_features(reader, cfg.feature_keys)
    return build(f"selector {cfg.selector_type!r}", factory, args)


def _needs_features(factory: Any) -> bool:
    return "features" in inspect.signature(factory).parameters


def read_features(reader: RowReader, keys: Sequence[str]) -> np.ndarray:
    """float64 ``[rows, keys]``. Raises DataError: file, row and column of what is no number."""
    features = np.empty((len(reader), len(keys)))
    for index in range(len(reader)):
        row = reader[index]
        for place, key in enumerate(keys):
            features[index, place] = _number(row.get(key), reader, index, key)
    return features


def _number(value: Any, reader: RowReader, index: int, key: str) -> float:
    try:
        number = float(value)  # csv cells are text
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{reader.where(index)}: feature column {key!r} holds {value!r}, not a number. "
            "Name the right columns in data_selector.feature_keys."
        )
    return number

"""Rows that show what a step trains on.

Invariant: the same rows always give the same examples.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Optional

import numpy as np
import pyarrow as pa

from trinity_dask.experience.schema import column


@dataclass(frozen=True)
class Example:
    """One row for people to read; ``which`` is ``min_reward``, ``max_reward`` or ``random``."""

    which: str
    prompt: Optional[str]
    response: Optional[str]
    reward: Optional[float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def representative_examples(table: pa.Table, seed: int = 42) -> list[Example]:
    """The rows with the lowest and the highest reward; a random one when none has a reward.

    The first of equals; rewards that are no numbers do not count.
    """
    if table.num_rows == 0:
        return []
    rewards = column(table, "reward").to_numpy(zero_copy_only=False).astype(np.float64)
    if np.isnan(rewards).all():
        return [_example(table, int(np.random.default_rng(seed).integers(table.num_rows)))]
    low, high = int(np.nanargmin(rewards)), int(np.nanargmax(rewards))
    return [_example(table, low, "min_reward"), _example(table, high, "max_reward")]


def _example(table: pa.Table, row: int, which: str = "random") -> Example:
    cells = (table[name][row].as_py() for name in ("prompt_text", "response_text", "reward"))
    return Example(which, *cells)

"""What one optimizer update needs around its loss: counts, sums over passes and ranks.

Invariant: counts are taken over all ranks and *before* any rule rejects a token, so what is
left of a mini-batch weighs what it weighed in the whole; sums are plain sums.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Optional, TypeVar

import numpy as np
import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator
from trinity_dask.algorithm.rollout_correction import ratio_metrics
from trinity_dask.trainer.ranks.gradients import GradientGroup
from trinity_dask.trainer.step.step_rows import StepRows

Number = TypeVar("Number", float, Tensor)


def add_into(totals: dict[str, Number], values: dict[str, Number]) -> None:
    """Add ``values`` to ``totals`` by name."""
    for name, value in values.items():
        totals[name] = totals[name] + value if name in totals else value


def sum_over_ranks(group: GradientGroup, sums: dict[str, Tensor]) -> dict[str, float]:
    """Metrics of this rank's part, summed to those of the mini-batch."""
    return group.sum_values({name: float(value) for name, value in sums.items()})


def counted(
    rows: StepRows, updates: Sequence[np.ndarray], response_tokens: Optional[int] = None
) -> list[Denominator]:
    """Counts of every mini-batch over all ranks, by one all-reduce.

    ``response_tokens``: the response budget, for the modes that divide by it.
    """
    mask = rows.mask.cpu()
    expert = rows.batch.get("expert_mask")
    expert = torch.zeros_like(mask) if expert is None else expert.cpu() & mask
    counts = torch.stack([_count(mask, expert, update, rows.unit) for update in updates])
    counts = rows.group.sum_(counts.to(rows.group.device))
    width = None if response_tokens is None else float(response_tokens)
    return [
        Denominator(t, r, expert_tokens, expert_rows, pairs if rows.unit == 2 else None, width)
        for t, r, expert_tokens, expert_rows, pairs in counts.tolist()
    ]


def _count(mask: Tensor, expert: Tensor, update: np.ndarray, unit: int) -> Tensor:
    index = torch.from_numpy(update)
    of_rows, of_experts = mask[index].sum(dim=1), expert[index].sum(dim=1)
    whole = (of_rows > 0).reshape(-1, unit).all(dim=1)  # a unit with a row left
    counts = [
        of_rows.sum(),
        (of_rows > 0).sum(),
        of_experts.sum(),
        (of_experts > 0).sum(),
        whole.sum(),
    ]
    return torch.stack(counts).double()


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds inside as ``time/<name>``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        metrics[f"time/{name}"] = time.perf_counter() - start


def ratios(log_ratios: list[Tensor]) -> dict[str, float]:
    """``update/*``: raw ratios of the policy to its "old" log-probs, before any clipping."""
    values = torch.cat(log_ratios)[None] if log_ratios else torch.empty(1, 0)
    mask = torch.ones_like(values, dtype=torch.bool)
    return ratio_metrics(values, torch.zeros_like(values), mask, "update")

"""From per-token losses to one number: the only place where a loss is normalised.

Invariant: the divisor is counted over the *global* mini-batch and handed in, so partial
results simply add up: over micro-batches, and over ranks with a plain sum of gradients.
Rows without a valid token count nowhere, neither in the numerator nor in the divisor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trinity_dask.algorithm.registry import nearest

TOKEN_MEAN = "token-mean"  # Σ m·ℓ / Σ m (DAPO, arXiv 2503.14476)
SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"  # mean_i Σ m·ℓ / Σ m (GRPO, arXiv 2402.03300)
SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"  # mean_i Σ m·ℓ
AGGREGATION_MODES = (TOKEN_MEAN, SEQ_MEAN_TOKEN_MEAN, SEQ_MEAN_TOKEN_SUM)


@dataclass(frozen=True)
class Denominator:
    """Valid tokens, and rows with a valid token, of a whole mini-batch."""

    tokens: float
    rows: float

    @classmethod
    def count(cls, mask: Tensor) -> Denominator:
        """Of one mask ``[B, R]``, when it is the whole mini-batch."""
        return cls(float(mask.sum()), float(mask.any(dim=1).sum()))


def check_mode(mode: str) -> str:
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"unknown loss_agg_mode {mode!r}{nearest(mode, AGGREGATION_MODES)}")
    return mode


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Σ of ``values`` where ``mask``; what is outside may be anything, NaN too."""
    return torch.where(mask, values, 0.0).sum()


def token_share(values: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """This part's addend to the token mean of the mini-batch; 0 when that has no token."""
    return masked_sum(values, mask) / max(denominator.tokens, 1.0)


def aggregate(values: Tensor, mask: Tensor, mode: str, denominator: Denominator) -> Tensor:
    """This part's addend to the mini-batch loss.

    Args:
        values: per-token losses, float ``[B, R]``.
        mask: valid tokens, bool ``[B, R]``.
        mode: one of :data:`AGGREGATION_MODES`.
        denominator: counts of the global mini-batch.

    Returns:
        A scalar attached to the graph of ``values``, also when nothing is valid.
    """
    if mode == TOKEN_MEAN:
        return token_share(values, mask, denominator)
    rows = torch.where(mask, values, 0.0).sum(dim=1)
    if check_mode(mode) == SEQ_MEAN_TOKEN_MEAN:
        rows = rows / mask.sum(dim=1).clamp(min=1)
    return rows.sum() / max(denominator.rows, 1.0)

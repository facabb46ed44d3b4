"""From per-token losses to one number: the only place where a loss is normalised.

Invariant: the divisor is counted over the *global* mini-batch and handed in, so partial
results simply add up: over micro-batches, and over ranks with a plain sum of gradients.
Rows without a valid token count nowhere, neither in the numerator nor in the divisor.
A token that is rejected by its importance weight stays in the divisor: the mask that is
counted is the action mask, before any rejection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from trinity_dask.lazy import torch
from trinity_dask.registry import nearest

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_MEAN = "token-mean"  # Σ m·ℓ / Σ m (DAPO, arXiv 2503.14476)
SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"  # mean_i Σ m·ℓ / Σ m (GRPO, arXiv 2402.03300)
SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"  # mean_i Σ m·ℓ
DR_GRPO = "dr-grpo"  # Σ m·ℓ / (B·L), arXiv 2503.20783
SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"  # the same, by verl's name for it
AGGREGATION_MODES = (TOKEN_MEAN, SEQ_MEAN_TOKEN_MEAN, SEQ_MEAN_TOKEN_SUM)
# these divide by a length that no mask tells: ``Denominator.width``
WIDTH_MODES = (SEQ_MEAN_TOKEN_SUM_NORM, DR_GRPO)
ALL_MODES = AGGREGATION_MODES + WIDTH_MODES


@dataclass(frozen=True)
class Denominator:
    """What a loss is divided by, counted over a whole mini-batch (all ranks).

    ``tokens``: valid tokens; ``rows``: rows with one. ``expert_tokens``, ``expert_rows``:
    those of them that are demonstrations (mixed batches). ``pairs``: preference pairs; None
    stands for half of the rows. ``width``: the length L in tokens of the modes
    :data:`WIDTH_MODES`, the response budget, equal for every mini-batch of a run.
    """

    tokens: float
    rows: float
    expert_tokens: float = 0.0
    expert_rows: float = 0.0
    pairs: Optional[float] = None
    width: Optional[float] = None

    @classmethod
    def count(cls, mask: Tensor, expert_mask: Optional[Tensor] = None) -> Denominator:
        """Of one mask ``[B, R]``, when it is the whole mini-batch; then L = R.

        ``expert_mask`` bool ``[B]`` or ``[B, R]`` marks demonstrations.
        """
        tokens, rows = float(mask.sum()), float(mask.any(dim=1).sum())
        width = float(mask.shape[1])
        if expert_mask is None:
            return cls(tokens, rows, width=width)
        expert = mask & as_token_mask(expert_mask, mask)
        of_expert = (float(expert.sum()), float(expert.any(dim=1).sum()))
        return cls(tokens, rows, *of_expert, width=width)

    @property
    def usual(self) -> Denominator:
        """Of the rows that are no demonstrations."""
        tokens, rows = self.tokens - self.expert_tokens, self.rows - self.expert_rows
        return Denominator(tokens, rows, width=self.width)

    @property
    def expert(self) -> Denominator:
        """Of the demonstrations alone."""
        return Denominator(self.expert_tokens, self.expert_rows, width=self.width)

    @property
    def n_pairs(self) -> float:
        return self.rows / 2 if self.pairs is None else self.pairs


def as_token_mask(row_mask: Tensor, like: Tensor) -> Tensor:
    """A mask ``[B]`` or ``[B, R]`` as bool ``[B, R]``."""
    mask = row_mask.bool()
    return (mask[:, None] if mask.dim() == 1 else mask).expand_as(like)


def check_mode(mode: str) -> str:
    """``mode`` itself. Raises ValueError for an unknown one, naming the nearest."""
    if mode not in ALL_MODES:
        raise ValueError(f"unknown loss_agg_mode {mode!r}{nearest(mode, ALL_MODES)}")
    return mode


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Σ of ``values`` where ``mask``; what is outside may be anything, NaN too."""
    return torch.where(mask, values, 0.0).sum()


def token_share(values: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """This part's addend to the token mean of the mini-batch; 0 when that has no token."""
    return masked_sum(values, mask) / max(denominator.tokens, 1.0)


def row_share(values: Tensor, mask: Tensor, denominator: Denominator) -> Tensor:
    """This part's addend to the mean over rows; values ``[B]``, mask ``[B, R]``."""
    return masked_sum(values, mask.any(dim=1)) / max(denominator.rows, 1.0)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's valid tokens: ``[B]``, 0 for a row without one."""
    return torch.where(mask, values, 0.0).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def aggregate(values: Tensor, mask: Tensor, mode: str, denominator: Denominator) -> Tensor:
    """This part's addend to the mini-batch loss.

    Args:
        values: per-token losses, float ``[B, R]``.
        mask: valid tokens, bool ``[B, R]``.
        mode: one of :data:`ALL_MODES`.
        denominator: counts of the global mini-batch.

    Returns:
        A scalar attached to the graph of ``values``, also when nothing is valid.

    Raises:
        ValueError: an unknown mode, or one that needs ``denominator.width`` without it.
    """
    if mode == TOKEN_MEAN:
        return token_share(values, mask, denominator)
    rows = torch.where(mask, values, 0.0).sum(dim=1)
    if check_mode(mode) == SEQ_MEAN_TOKEN_MEAN:
        rows = rows / mask.sum(dim=1).clamp(min=1)
    total = rows.sum() / max(denominator.rows, 1.0)
    if mode not in WIDTH_MODES:
        return total
    if not denominator.width:
        raise ValueError(
            f"loss_agg_mode {mode!r} divides by the response budget, and the denominator has no "
            "width; set model.max_response_tokens"
        )
    return total / denominator.width

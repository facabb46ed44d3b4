"""The critic's loss: squared error of the values, moved at most ±ε per step.

Invariant: like every loss here it is an addend, normalised by the global mini-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from trinity_dask.algorithm.aggregate import Denominator, masked_sum, token_share
from trinity_dask.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    denominator: Optional[Denominator] = None,
    clip_range: Optional[float] = 0.5,
) -> tuple[Tensor, dict[str, Tensor]]:
    """½·max((V−R)², (clip(V, V_old ± ε)−R)²), token mean (arXiv 1707.06347, clipped values).

    All tensors ``[b, R]``; ``clip_range`` None turns the clipping off. Returns this part's
    addend to the mini-batch's loss, and metrics that add up in the same way.
    """
    denominator = Denominator.count(mask) if denominator is None else denominator
    values = torch.where(mask, values, 0.0)
    plain = (values - returns).square()
    worst, clipped = plain, torch.zeros_like(mask)
    if clip_range is not None:
        held = torch.minimum(
            torch.maximum(values, old_values - clip_range), old_values + clip_range
        )
        bounded = (held - returns).square()
        worst, clipped = torch.maximum(plain, bounded), bounded > plain
    loss = 0.5 * masked_sum(worst, mask) / max(denominator.tokens, 1.0)
    with torch.no_grad():
        metrics = {
            "vf_loss": loss.detach(),
            "vf_clipfrac": token_share(clipped.float(), mask, denominator),
            "vpred_mean": token_share(values.detach(), mask, denominator),
        }
    return loss, metrics

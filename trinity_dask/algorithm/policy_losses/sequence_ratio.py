"""GSPO: one importance ratio for the whole answer."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import (
    SEQ_MEAN_TOKEN_MEAN,
    Denominator,
    row_mean,
    row_share,
)
from trinity_dask.algorithm.policy_losses.base import (
    POLICY_LOSS_FN,
    LossResult,
    PolicyLoss,
    clip_ranges,
    counted,
    log_ratio,
    shares,
)

MAX_LOG_SEQUENCE_RATIO = 10.0


def sequence_log_ratio(logprob: Tensor, old_logprob: Tensor, mask: Tensor) -> Tensor:
    """Mean log(π/π_old) of each row's valid tokens, without gradient: ``[B, 1]``."""
    return row_mean(log_ratio(logprob.detach(), old_logprob, mask), mask)[:, None]


@POLICY_LOSS_FN.register_module("gspo")
class GSPOLoss(PolicyLoss):
    """−min(sA, clip(s)·A) with s = exp(mean_t log ρ_t), arXiv 2507.18071.

    Each token's gradient is s·A/|y|: the value of s is the row's, its gradient the token's
    own. Sequence means are the default aggregation; a token mean would weigh answers by
    their length.
    """

    default_agg_mode = SEQ_MEAN_TOKEN_MEAN

    def __init__(
        self,
        clip_range_low: float = 0.0003,
        clip_range_high: float = 0.0004,
        loss_agg_mode: Optional[str] = None,
    ) -> None:
        super().__init__(loss_agg_mode)
        self.low, self.high = clip_ranges(0.0, clip_range_low, clip_range_high, "0.0003")

    def __call__(
        self,
        *,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        denominator: Optional[Denominator] = None,
        weights: Optional[Tensor] = None,
        loss_agg_mode: Optional[str] = None,
        **_: Any,
    ) -> LossResult:
        denominator = counted(denominator, action_mask)
        of_row = sequence_log_ratio(logprob, old_logprob, action_mask)
        own = torch.where(action_mask, logprob - logprob.detach(), 0.0)
        ratio = (own + of_row).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
        plain = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.low, 1 + self.high)
        losses = torch.maximum(plain, clipped)
        loss = self.total(losses, action_mask, denominator, loss_agg_mode, weights)
        values = {
            "pg_clipfrac": (clipped > plain).float(),
            "ppo_kl": -log_ratio(logprob.detach(), old_logprob, action_mask),
        }
        metrics = shares(values, action_mask, denominator)
        metrics["ppo_kl_seq"] = row_share(-of_row[:, 0], action_mask, denominator)
        return loss, metrics | {"pg_loss": loss.detach()}

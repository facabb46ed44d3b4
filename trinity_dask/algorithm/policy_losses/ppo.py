"""The clipped surrogate of PPO, with dual clip and masking of drifted sequences."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator, row_share
from trinity_dask.algorithm.policy_losses.base import (
    MAX_LOG_RATIO,
    POLICY_LOSS_FN,
    LossResult,
    Metrics,
    PolicyLoss,
    clip_ranges,
    counted,
    shares,
)


@POLICY_LOSS_FN.register_module("ppo")
class PPOLoss(PolicyLoss):
    """−min(ρA, clip(ρ, 1−low, 1+high)·A), arXiv 1707.06347; clip-higher 2503.14476.

    ``clip_range`` is both sides unless ``clip_range_low`` / ``clip_range_high`` is given.
    ``clip_ratio_c`` (dual clip, arXiv 1912.09729) bounds the loss of a token with A < 0 by
    −c·A; null turns it off. ``weights`` (detached) multiply the token's loss: decoupled PPO,
    arXiv 2110.00641.

    ``enable_sequence_masking`` drops the tokens with A < 0 of a row whose mean −log ρ is
    above ``delta_sequence_masking`` (arXiv 2512.02556). ``fallback_to_policy_gradient``
    takes ρ = π/sg(π): the gradient of A·log π, whatever the old log-probs.
    """

    def __init__(
        self,
        clip_range: float = 0.2,
        clip_range_low: Optional[float] = None,
        clip_range_high: Optional[float] = None,
        clip_ratio_c: Optional[float] = 3.0,
        enable_sequence_masking: bool = False,
        delta_sequence_masking: float = 0.1,
        fallback_to_policy_gradient: bool = False,
        loss_agg_mode: Optional[str] = None,
    ) -> None:
        super().__init__(loss_agg_mode)
        self.low, self.high = clip_ranges(clip_range, clip_range_low, clip_range_high)
        self.dual = clip_ratio_c
        self.sequence_masking = enable_sequence_masking
        self.delta = delta_sequence_masking
        self.fallback = fallback_to_policy_gradient
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"clip_ratio_c must be > 1 or null (got {self.dual}); 3.0 is usual")

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
        old = logprob.detach() if self.fallback else old_logprob
        # cut here, not only in the sum: 0 x NaN of a padded place would be a NaN gradient
        log_ratio = torch.where(action_mask, logprob - old, 0.0)
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        plain = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.low, 1 + self.high)
        losses, bounded = self._dual_clip(torch.maximum(plain, clipped), advantages)
        extra: Metrics = {}
        if self.sequence_masking:
            dropped, extra = self._drifted(log_ratio, advantages, action_mask, denominator)
            losses = torch.where(dropped, 0.0, losses)
        loss = self.total(losses, action_mask, denominator, loss_agg_mode, weights)
        with torch.no_grad():
            values = {
                "pg_clipfrac": (clipped > plain).float(),
                "pg_clipfrac_lower": bounded,
                "ppo_kl": -log_ratio.detach(),
            }
            metrics = shares(values, action_mask, denominator)
        return loss, metrics | {"pg_loss": loss.detach()} | extra

    def _dual_clip(self, losses: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        if self.dual is None:
            return losses, torch.zeros_like(losses)
        bound = -advantages * self.dual
        acts = (advantages < 0) & (losses > bound)
        return torch.where(acts, bound, losses), acts.float()

    @torch.no_grad()
    def _drifted(
        self, log_ratio: Tensor, advantages: Tensor, mask: Tensor, denominator: Denominator
    ) -> tuple[Tensor, Metrics]:
        """Tokens with A < 0 of rows that drifted; masked places of log_ratio are 0."""
        row_kl = -log_ratio.sum(dim=1) / (mask.sum(dim=1) + 1e-10)
        dropped = (row_kl > self.delta)[:, None] & (advantages < 0)
        return dropped, {
            "seq_mask/mean_sequence_kl": row_share(row_kl, mask, denominator),
            **shares({"seq_mask/masked_tokens": dropped.float()}, mask, denominator),
        }

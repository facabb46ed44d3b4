"""Losses of the form −sg(weight)·A·log π: cispo, topr, opmd.

Invariant: the weight carries no gradient, so every token that is kept learns.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator
from trinity_dask.algorithm.policy_losses.base import (
    POLICY_LOSS_FN,
    LossResult,
    PolicyLoss,
    clip_ranges,
    counted,
    log_ratio,
    shares,
)


@POLICY_LOSS_FN.register_module("cispo")
class CISPOLoss(PolicyLoss):
    """−sg(clip(ρ, 1−low, 1+high))·A·log π, arXiv 2506.13585.

    ``clip_range_high`` is a distance from 1; ``ratio_cap`` may give the cap itself instead
    (others call that epsilon_high). With ``enable_mask_clip`` tokens with ρ > 1+mask_high
    and A > 0, or ρ < 1−mask_low and A < 0, are dropped.
    """

    def __init__(
        self,
        clip_range_low: float = 1.0,
        clip_range_high: float = 0.28,
        enable_mask_clip: bool = False,
        mask_clip_range_low: float = 1.0,
        mask_clip_range_high: float = 0.28,
        ratio_cap: Optional[float] = None,
        loss_agg_mode: Optional[str] = None,
    ) -> None:
        super().__init__(loss_agg_mode)
        if ratio_cap is not None and ratio_cap < 1:
            raise ValueError(f"ratio_cap must be >= 1 or null (got {ratio_cap}); 5.0 is usual")
        high = clip_range_high if ratio_cap is None else ratio_cap - 1.0
        self.low, self.high = clip_ranges(0.0, clip_range_low, high, "1.0 and 0.2")
        self.mask_clip = enable_mask_clip
        self.mask_low, self.mask_high = clip_ranges(0.0, mask_clip_range_low, mask_clip_range_high)

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
        log_rho = log_ratio(logprob.detach(), old_logprob, action_mask)
        ratio = log_rho.exp()
        kept = self._kept(ratio, advantages)
        weight = ratio.clamp(1 - self.low, 1 + self.high) * kept
        losses = -advantages * weight * torch.where(action_mask, logprob, 0.0)
        loss = self.total(losses, action_mask, denominator, loss_agg_mode, weights)
        values = {
            "ppo_kl": -log_rho,
            "unmasked_frac": kept,
            "clipfrac": ((ratio < 1 - self.low) | (ratio > 1 + self.high)).float(),
        }
        return loss, {"cispo_loss": loss.detach(), **shares(values, action_mask, denominator)}

    def _kept(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        if not self.mask_clip:
            return torch.ones_like(ratio)
        above = (ratio > 1 + self.mask_high) & (advantages > 0)
        below = (ratio < 1 - self.mask_low) & (advantages < 0)
        return (~(above | below)).float()


@POLICY_LOSS_FN.register_module("topr")
class TOPRLoss(PolicyLoss):
    """−sg(α)·A·log π with α = clip(ρ, 0, 1) where A ≤ threshold, else 1: arXiv 2503.14286."""

    def __init__(
        self, advantage_threshold: float = 0.0, loss_agg_mode: Optional[str] = None
    ) -> None:
        super().__init__(loss_agg_mode)
        self.threshold = advantage_threshold

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
        ratio = log_ratio(logprob.detach(), old_logprob, action_mask).exp()
        alpha = torch.where(advantages <= self.threshold, ratio.clamp(0.0, 1.0), 1.0)
        losses = -advantages * alpha * torch.where(action_mask, logprob, 0.0)
        loss = self.total(losses, action_mask, denominator, loss_agg_mode, weights)
        metrics = shares({"avg_alpha": alpha, "avg_ratio": ratio}, action_mask, denominator)
        return loss, {"topr_loss": loss.detach(), **metrics}


@POLICY_LOSS_FN.register_module("opmd")
class OPMDLoss(PolicyLoss):
    """−A·log π/(1 + tau): policy mirror descent off policy, arXiv 2505.17826."""

    def __init__(self, tau: float = 1.0, loss_agg_mode: Optional[str] = None) -> None:
        super().__init__(loss_agg_mode)
        if tau < 0:
            raise ValueError(f"tau must be >= 0 (got {tau}); 1.0 is usual")
        self.tau = tau

    def __call__(
        self,
        *,
        logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        denominator: Optional[Denominator] = None,
        loss_agg_mode: Optional[str] = None,
        **_: Any,
    ) -> LossResult:
        denominator = counted(denominator, action_mask)
        losses = -advantages * torch.where(action_mask, logprob, 0.0)
        loss = self.total(losses, action_mask, denominator, loss_agg_mode) / (1.0 + self.tau)
        return loss, {"opmd_loss": loss.detach()}

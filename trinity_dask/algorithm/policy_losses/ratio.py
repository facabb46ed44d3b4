"""Other losses of the token ratio: importance_sampling, sapo, sppo."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator
from trinity_dask.algorithm.policy_losses.base import (
    POLICY_LOSS_FN,
    LossResult,
    PolicyLoss,
    counted,
    log_ratio,
    shares,
)


@POLICY_LOSS_FN.register_module("importance_sampling")
class ImportanceSamplingLoss(PolicyLoss):
    """−A·ρ, nothing clipped."""

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
        log_rho = log_ratio(logprob, old_logprob, action_mask)
        ratio = log_rho.exp()
        losses = -advantages * ratio
        loss = self.total(losses, action_mask, denominator, loss_agg_mode, weights)
        values = {"ratio/mean": ratio, "approx_kl": -log_rho}
        return loss, {"pg_loss": loss.detach(), **shares(values, action_mask, denominator)}


@POLICY_LOSS_FN.register_module("sapo")
class SAPOLoss(PolicyLoss):
    """−A·(4/τ)·σ(τ(ρ−1)), arXiv 2511.20347: the clip becomes a soft gate.

    The gradient flows through the gate, so a token's weight is 4σ(1−σ)·ρ: 1 on policy, and
    fading on both sides of it. ``tau_neg`` ≥ ``tau_pos``: tokens with A ≤ 0 fade sooner.
    """

    def __init__(
        self, tau_pos: float = 1.0, tau_neg: float = 1.05, loss_agg_mode: Optional[str] = None
    ) -> None:
        super().__init__(loss_agg_mode)
        if not 0 < tau_pos <= tau_neg:
            raise ValueError(
                f"sapo needs 0 < tau_pos <= tau_neg (got {tau_pos} and {tau_neg}); "
                "1.0 and 1.05 are usual"
            )
        self.tau_pos, self.tau_neg = tau_pos, tau_neg

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
        log_rho = log_ratio(logprob, old_logprob, action_mask)
        ratio = log_rho.exp()
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg)
        gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
        losses = -advantages * gate
        loss = self.total(losses, action_mask, denominator, loss_agg_mode, weights)
        values = {
            "ppo_kl": -log_rho,
            "avg_soft_gate": gate,
            "avg_ratio": ratio,
            "pos_adv_frac": (advantages > 0).float(),
        }
        return loss, {"sapo_loss": loss.detach(), **shares(values, action_mask, denominator)}


@POLICY_LOSS_FN.register_module("sppo")
class SPPOLoss(PolicyLoss):
    """−A·log ρ where 1/(1+ε) ≤ ρ ≤ 1+ε, else nothing: arXiv 2108.05828."""

    def __init__(self, epsilon: float = 0.3, loss_agg_mode: Optional[str] = None) -> None:
        super().__init__(loss_agg_mode)
        if not epsilon > 0:
            raise ValueError(f"epsilon must be > 0 (got {epsilon}); 0.3 is usual")
        self.bound = math.log1p(epsilon)

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
        log_rho = log_ratio(logprob, old_logprob, action_mask)
        inside = log_rho.detach().abs() <= self.bound
        losses = torch.where(inside, -advantages * log_rho, 0.0)
        loss = self.total(losses, action_mask, denominator, loss_agg_mode, weights)
        metrics = shares({"pg_clipfrac": (~inside).float()}, action_mask, denominator)
        return loss, {"pg_loss": loss.detach(), **metrics}

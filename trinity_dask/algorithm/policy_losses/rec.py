"""REC: REINFORCE with a choice of clip, weight and regulariser."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import SEQ_MEAN_TOKEN_MEAN, Denominator
from trinity_dask.algorithm.policy_losses.base import (
    MAX_LOG_RATIO,
    POLICY_LOSS_FN,
    LossResult,
    PolicyLoss,
    clip_ranges,
    counted,
    log_ratio,
    shares,
)
from trinity_dask.algorithm.policy_losses.sequence_ratio import sequence_log_ratio
from trinity_dask.registry import nearest

CLIP_MODES = ("none", "one-side", "two-side", "ring", "gspo-one-side")
WEIGHTS = ("none", "importance_sampling", "gspo_importance_sampling", "advantage")
REGULARIZERS = ("none", "k2", "forward-kl")


@POLICY_LOSS_FN.register_module("rec")
class RECLoss(PolicyLoss):
    """−A'·K·log π (+ regulariser), arXiv 2509.24203; ρ and K carry no gradient.

    ``clip_mode``: K = 1 inside [1−low, 1+high] (two-side); where A ≥ 0 and ρ ≤ 1+high, or
    A ≤ 0 and ρ ≥ 1−low (one-side); the same with the row's ratio and sequence means
    (gspo-one-side); two-side, and beyond the primed bounds where A pulls back (ring).
    ``weight``: A' = A, A·ρ, A times the row's ratio, or A·exp(A/temp). ``regularizer``:
    k2 adds c·(log ρ)², forward-kl −c·log π.
    """

    def __init__(
        self,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        epsilon_low_prime: float = 0.6,
        epsilon_high_prime: float = 2.0,
        clip_mode: str = "none",
        weight: str = "none",
        regularizer: str = "none",
        regularizer_coef: float = 0.0,
        temp: float = 1.0,
        loss_agg_mode: Optional[str] = None,
    ) -> None:
        for name, value, allowed in (
            ("clip_mode", clip_mode, CLIP_MODES),
            ("weight", weight, WEIGHTS),
            ("regularizer", regularizer, REGULARIZERS),
        ):
            if value not in allowed:
                raise ValueError(f"unknown {name} {value!r}{nearest(value, allowed)}")
        if regularizer_coef < 0 or not temp > 0:
            raise ValueError(
                f"rec needs regularizer_coef >= 0 and temp > 0 (got {regularizer_coef}, {temp})"
            )
        own = SEQ_MEAN_TOKEN_MEAN if clip_mode == "gspo-one-side" else None
        super().__init__(loss_agg_mode or own)
        self.low, self.high = clip_ranges(0.0, epsilon_low, epsilon_high)
        self.low_prime, self.high_prime = clip_ranges(0.0, epsilon_low_prime, epsilon_high_prime)
        self.clip_mode, self.weight = clip_mode, weight
        self.regularizer, self.coef, self.temp = regularizer, regularizer_coef, temp

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
        logprob = torch.where(action_mask, logprob, 0.0)
        advantages = torch.where(action_mask, advantages, 0.0)
        log_rho = log_ratio(logprob, old_logprob, action_mask)
        ratio = log_rho.detach().exp()
        of_row = sequence_log_ratio(logprob, old_logprob, action_mask).exp()
        kept = self._kept(of_row if self.clip_mode == "gspo-one-side" else ratio, advantages)
        weighted = self._weighted(advantages, ratio, of_row)
        losses = -weighted * kept * logprob + self._regulariser(logprob, log_rho)
        loss = self.total(losses, action_mask, denominator, loss_agg_mode, weights)
        clipped = (kept == 0).float().expand_as(logprob)
        metrics = shares({"pg_clipfrac": clipped}, action_mask, denominator)
        return loss, {"pg_loss": loss.detach(), **metrics}

    def _kept(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """K as 0 and 1."""
        low, high = ratio >= 1 - self.low, ratio <= 1 + self.high
        if self.clip_mode == "none":
            return torch.ones_like(advantages)
        if self.clip_mode in ("one-side", "gspo-one-side"):
            return (((advantages >= 0) & high) | ((advantages <= 0) & low)).float()
        inside = low & high
        if self.clip_mode == "ring":
            inside = inside | ((advantages >= 0) & (ratio <= 1 - self.low_prime))
            inside = inside | ((advantages <= 0) & (ratio >= 1 + self.high_prime))
        return inside.float()

    def _weighted(self, advantages: Tensor, ratio: Tensor, of_row: Tensor) -> Tensor:
        if self.weight == "importance_sampling":
            # the row's ratio is the one that gspo-one-side is about
            return advantages * (of_row if self.clip_mode == "gspo-one-side" else ratio)
        if self.weight == "gspo_importance_sampling":
            return advantages * of_row
        if self.weight == "advantage":
            return advantages * (advantages / self.temp).clamp(max=MAX_LOG_RATIO).exp()
        return advantages

    def _regulariser(self, logprob: Tensor, log_rho: Tensor) -> Tensor:
        if self.regularizer == "k2":
            return self.coef * log_rho.square()
        if self.regularizer == "forward-kl":
            return -self.coef * logprob
        return torch.zeros_like(logprob)

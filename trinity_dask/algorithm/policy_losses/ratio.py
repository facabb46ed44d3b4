"""Losses of log π and an advantage: with the token's ratio ρ = π/π_old, the row's, or none.

Invariant: where a weight stands before log π, it carries no gradient, so every token that is
kept learns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Optional

from trinity_dask.algorithm.aggregate import SEQ_MEAN_TOKEN_MEAN
from trinity_dask.algorithm.policy_losses.base import (
    MAX_LOG_RATIO,
    POLICY_LOSS_FN,
    LossInputs,
    Metrics,
    PolicyLoss,
    clip_ranges,
)
from trinity_dask.lazy import torch
from trinity_dask.registry import nearest

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_SEQUENCE_RATIO = 10.0
RATIO_LEVELS = ("sequence", "token")
CLIP_MODES = ("none", "one-side", "two-side", "ring", "gspo-one-side")
WEIGHTS = ("none", "importance_sampling", "gspo_importance_sampling", "advantage")
REGULARIZERS = ("none", "k2", "forward-kl")


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

    reads = ("old_logprob", "advantages")

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

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        log_ratio = x.log_ratio
        if self.fallback:
            log_ratio = x.logprob - x.logprob.detach()
        ratio = log_ratio.exp()
        plain = -x.advantages * ratio
        clipped = -x.advantages * ratio.clamp(1 - self.low, 1 + self.high)
        losses = torch.maximum(plain, clipped)
        bounded = torch.zeros_like(x.action_mask)
        if self.dual is not None:
            bound = -x.advantages * self.dual
            bounded = (x.advantages < 0) & (losses > bound)
            losses = torch.where(bounded, bound, losses)
        values = {
            "pg_clipfrac": (clipped > plain).float(),
            "pg_clipfrac_lower": bounded.float(),
            "ppo_kl": -log_ratio,
        }
        if self.sequence_masking:
            row_kl = -log_ratio.detach().sum(dim=1) / (x.action_mask.sum(dim=1) + 1e-10)
            drifted = (row_kl > self.delta)[:, None] & (x.advantages < 0)
            losses = torch.where(drifted, 0.0, losses)
            values["seq_mask/mean_sequence_kl"] = row_kl
            values["seq_mask/masked_tokens"] = drifted.float()
        return losses, values


@POLICY_LOSS_FN.register_module("importance_sampling")
class ImportanceSamplingLoss(PolicyLoss):
    """−A·ρ, nothing clipped."""

    reads = ("old_logprob", "advantages")

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio = x.log_ratio.exp()
        return -x.advantages * ratio, {"ratio/mean": ratio, "approx_kl": -x.log_ratio}


@POLICY_LOSS_FN.register_module("sapo")
class SAPOLoss(PolicyLoss):
    """−A·(4/τ)·σ(τ(ρ−1)), arXiv 2511.20347: the clip becomes a soft gate.

    The gradient flows through the gate, so a token's weight is 4σ(1−σ)·ρ: 1 on policy, and
    fading on both sides of it. ``tau_neg`` ≥ ``tau_pos``: tokens with A ≤ 0 fade sooner.
    """

    reads = ("old_logprob", "advantages")
    metric = "sapo_loss"

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

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio = x.log_ratio.exp()
        tau = torch.where(x.advantages > 0, self.tau_pos, self.tau_neg)
        gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
        return -x.advantages * gate, {
            "ppo_kl": -x.log_ratio,
            "avg_soft_gate": gate,
            "avg_ratio": ratio,
            "pos_adv_frac": (x.advantages > 0).float(),
        }


@POLICY_LOSS_FN.register_module("sppo")
class SPPOLoss(PolicyLoss):
    """−A·log ρ where 1/(1+ε) ≤ ρ ≤ 1+ε, else nothing: arXiv 2108.05828."""

    reads = ("old_logprob", "advantages")

    def __init__(self, epsilon: float = 0.3, loss_agg_mode: Optional[str] = None) -> None:
        super().__init__(loss_agg_mode)
        if not epsilon > 0:
            raise ValueError(f"epsilon must be > 0 (got {epsilon}); 0.3 is usual")
        self.bound = math.log1p(epsilon)

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        inside = x.log_ratio.detach().abs() <= self.bound
        losses = torch.where(inside, -x.advantages * x.log_ratio, 0.0)
        return losses, {"pg_clipfrac": (~inside).float()}


@POLICY_LOSS_FN.register_module("gspo")
class GSPOLoss(PolicyLoss):
    """−min(sA, clip(s)·A) with s = exp(mean_t log ρ_t), arXiv 2507.18071.

    Each token's gradient is s·A/|y|: the value of s is the row's, its gradient the token's
    own. Sequence means are the default aggregation; a token mean would weigh answers by
    their length.
    """

    reads = ("old_logprob", "advantages")
    default_agg_mode = SEQ_MEAN_TOKEN_MEAN

    def __init__(
        self,
        clip_range_low: float = 0.0003,
        clip_range_high: float = 0.0004,
        loss_agg_mode: Optional[str] = None,
    ) -> None:
        super().__init__(loss_agg_mode)
        self.low, self.high = clip_ranges(0.0, clip_range_low, clip_range_high, "0.0003")

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        own = x.logprob - x.logprob.detach()
        ratio = (own + x.row_log_ratio).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
        plain = -x.advantages * ratio
        clipped = -x.advantages * ratio.clamp(1 - self.low, 1 + self.high)
        return torch.maximum(plain, clipped), {
            "pg_clipfrac": (clipped > plain).float(),
            "ppo_kl": -x.log_ratio,
            "ppo_kl_seq": -x.row_log_ratio[:, 0],
        }


@POLICY_LOSS_FN.register_module("cispo")
class CISPOLoss(PolicyLoss):
    """−sg(clip(ρ, 1−low, 1+high))·A·log π, arXiv 2506.13585.

    ``clip_range_high`` is a distance from 1; ``ratio_cap`` may give the cap itself instead
    (others call that epsilon_high). With ``enable_mask_clip`` tokens with ρ > 1+mask_high
    and A > 0, or ρ < 1−mask_low and A < 0, are dropped.
    """

    reads = ("old_logprob", "advantages")
    metric = "cispo_loss"

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

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio = x.log_ratio.detach().exp()
        kept = torch.ones_like(ratio)
        if self.mask_clip:
            above = (ratio > 1 + self.mask_high) & (x.advantages > 0)
            below = (ratio < 1 - self.mask_low) & (x.advantages < 0)
            kept = (~(above | below)).float()
        weight = ratio.clamp(1 - self.low, 1 + self.high) * kept
        return -x.advantages * weight * x.logprob, {
            "ppo_kl": -x.log_ratio,
            "unmasked_frac": kept,
            "clipfrac": ((ratio < 1 - self.low) | (ratio > 1 + self.high)).float(),
        }


@POLICY_LOSS_FN.register_module("topr")
class TOPRLoss(PolicyLoss):
    """−sg(α)·A·log π with α = clip(Πρ, 0, 1) where A ≤ threshold, else 1: arXiv 2503.14286.

    Πρ is the ratio of the whole answer, the product over its valid tokens, as the paper
    truncates it; ``ratio_level="token"`` takes each token's own ρ.
    """

    reads = ("old_logprob", "advantages")
    metric = "topr_loss"

    def __init__(
        self,
        advantage_threshold: float = 0.0,
        ratio_level: str = "sequence",
        loss_agg_mode: Optional[str] = None,
    ) -> None:
        super().__init__(loss_agg_mode)
        if ratio_level not in RATIO_LEVELS:
            raise ValueError(
                f"unknown ratio_level {ratio_level!r}{nearest(ratio_level, RATIO_LEVELS)}"
            )
        self.threshold, self.ratio_level = advantage_threshold, ratio_level

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        log_ratio = x.log_ratio.detach()
        if self.ratio_level == "sequence":
            product = log_ratio.sum(dim=1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            log_ratio = product.expand_as(log_ratio)
        ratio = log_ratio.exp()
        alpha = torch.where(x.advantages <= self.threshold, ratio.clamp(0.0, 1.0), 1.0)
        return -x.advantages * alpha * x.logprob, {"avg_alpha": alpha, "avg_ratio": ratio}


@POLICY_LOSS_FN.register_module("opmd")
class OPMDLoss(PolicyLoss):
    """−A·log π/(1 + tau): policy mirror descent off policy, arXiv 2505.17826."""

    reads = ("advantages",)
    metric = "opmd_loss"

    def __init__(self, tau: float = 1.0, loss_agg_mode: Optional[str] = None) -> None:
        super().__init__(loss_agg_mode)
        if tau < 0:
            raise ValueError(f"tau must be >= 0 (got {tau}); 1.0 is usual")
        self.tau = tau

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        return -x.advantages * x.logprob / (1.0 + self.tau), {}


@POLICY_LOSS_FN.register_module("rec")
class RECLoss(PolicyLoss):
    """−A'·K·log π (+ regulariser), arXiv 2509.24203; ρ and K carry no gradient.

    ``clip_mode``: K = 1 inside [1−low, 1+high] (two-side); where A ≥ 0 and ρ ≤ 1+high, or
    A ≤ 0 and ρ ≥ 1−low (one-side); the same with the row's ratio and sequence means
    (gspo-one-side); two-side, and beyond the primed bounds where A pulls back (ring).
    ``weight``: A' = A, A·ρ, A times the row's ratio, or A·exp(A/temp). ``regularizer``:
    k2 adds c·(log ρ)², forward-kl −c·log π.
    """

    reads = ("old_logprob", "advantages")

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

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        ratio, of_row = x.log_ratio.detach().exp(), x.row_log_ratio.exp()
        by_row = self.clip_mode == "gspo-one-side"
        kept = self._kept(of_row if by_row else ratio, x.advantages)
        weighted = x.advantages
        if self.weight == "gspo_importance_sampling" or (
            # the row's ratio is the one that gspo-one-side is about
            self.weight == "importance_sampling" and by_row
        ):
            weighted = x.advantages * of_row
        elif self.weight == "importance_sampling":
            weighted = x.advantages * ratio
        elif self.weight == "advantage":
            tilt = (x.advantages / self.temp).clamp(max=MAX_LOG_RATIO).exp()
            weighted = x.advantages * tilt
        losses = -weighted * kept * x.logprob
        if self.regularizer == "k2":
            losses = losses + self.coef * x.log_ratio.square()
        elif self.regularizer == "forward-kl":
            losses = losses - self.coef * x.logprob
        return losses, {"pg_clipfrac": (kept == 0).float().expand_as(losses)}

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

"""Policy losses: per-token terms of one micro-batch, aggregated once.

Invariant: a loss and each of its metrics are addends: summed over all micro-batches and
ranks of a mini-batch they give that mini-batch's value, however it was cut.

A loss is an object called as ``loss(logprob=, old_logprob=, action_mask=, advantages=,
weights=, denominator=, loss_agg_mode=)`` with float tensors ``[B, R]`` (mask bool), and
returns ``(scalar loss, metrics)``. Log-probs are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, Protocol

import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import TOKEN_MEAN, Denominator, aggregate, token_share
from trinity_dask.algorithm.registry import Registry

# exp of more than this says nothing and overflows products; such a token has no gradient
MAX_LOG_RATIO = 20.0


class PolicyLoss(Protocol):
    """What the trainer asks of a loss; see the module's docstring for the call."""

    uses_old_logprob: bool
    uses_advantages: bool

    @property
    def __call__(self) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]: ...


POLICY_LOSSES: Registry[Callable[..., PolicyLoss]] = Registry("policy_loss_fn")


@POLICY_LOSSES.register_module("ppo")
class PPOLoss:
    """−min(ρA, clip(ρ, 1−low, 1+high)·A), arXiv 1707.06347; clip-higher 2503.14476.

    ``clip_range`` is both sides unless ``clip_range_low`` / ``clip_range_high`` is given.
    ``clip_ratio_c`` (dual clip, arXiv 1912.09729) bounds the loss of a token with A < 0 by
    −c·A; null turns it off. ``weights`` (detached) multiply the token's loss.
    """

    uses_old_logprob = True
    uses_advantages = True

    def __init__(
        self,
        clip_range: float = 0.2,
        clip_range_low: Optional[float] = None,
        clip_range_high: Optional[float] = None,
        clip_ratio_c: Optional[float] = 3.0,
    ) -> None:
        self.low = clip_range if clip_range_low is None else clip_range_low
        self.high = clip_range if clip_range_high is None else clip_range_high
        self.dual = clip_ratio_c
        if not 0 <= self.low <= 1 or self.high < 0:
            raise ValueError(
                f"clip ranges must be 0 <= low <= 1 and high >= 0 (got low {self.low}, high "
                f"{self.high}); they are distances from 1, usually 0.2 and 0.2 to 0.28"
            )
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"clip_ratio_c must be > 1 or null (got {self.dual}); 3.0 is usual")

    def __call__(
        self,
        *,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        denominator: Denominator,
        weights: Optional[Tensor] = None,
        loss_agg_mode: str = TOKEN_MEAN,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # cut here, not only in the sum: 0 x NaN of a padded place would be a NaN gradient
        log_ratio = torch.where(action_mask, logprob - old_logprob, 0.0)
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        plain = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.low, 1 + self.high)
        losses = torch.maximum(plain, clipped)
        losses, bounded = self._dual_clip(losses, advantages)
        weighted = losses if weights is None else losses * weights
        loss = aggregate(weighted, action_mask, loss_agg_mode, denominator)
        with torch.no_grad():
            shares = {
                "pg_clipfrac": (clipped > plain).float(),
                "pg_clipfrac_lower": bounded,
                "ppo_kl": -log_ratio.detach(),
            }
            metrics = {n: token_share(v, action_mask, denominator) for n, v in shares.items()}
        return loss, metrics | {"pg_loss": loss.detach()}

    def _dual_clip(self, losses: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        if self.dual is None:
            return losses, torch.zeros_like(losses)
        bound = -advantages * self.dual
        acts = (advantages < 0) & (losses > bound)
        return torch.where(acts, bound, losses), acts.float()


@POLICY_LOSSES.register_module("sft")
class SFTLoss:
    """−log π of the demonstrated tokens: maximum likelihood."""

    uses_old_logprob = False
    uses_advantages = False

    def __call__(
        self,
        *,
        logprob: Tensor,
        action_mask: Tensor,
        denominator: Denominator,
        loss_agg_mode: str = TOKEN_MEAN,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = aggregate(-logprob, action_mask, loss_agg_mode, denominator)
        return loss, {"sft_loss": loss.detach()}

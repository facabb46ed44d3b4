"""Likelihood losses: plain, weighted by the model's own probability, and with φ = p(1−p)."""

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
)


@POLICY_LOSS_FN.register_module("sft")
class SFTLoss(PolicyLoss):
    """−log π of the demonstrated tokens: maximum likelihood."""

    metric = "sft_loss"

    def __call__(
        self,
        *,
        logprob: Tensor,
        action_mask: Tensor,
        denominator: Optional[Denominator] = None,
        loss_agg_mode: Optional[str] = None,
        **_: Any,
    ) -> LossResult:
        denominator = counted(denominator, action_mask)
        losses = self.token_losses(logprob, action_mask)
        loss = self.total(losses, action_mask, denominator, loss_agg_mode)
        return loss, {self.metric: loss.detach()}

    def token_losses(self, logprob: Tensor, mask: Tensor) -> Tensor:
        """Loss of each token, float ``[B, R]``."""
        return -logprob


@POLICY_LOSS_FN.register_module("sft_is")
class SFTISLoss(SFTLoss):
    """−sg(p)·log p: tokens that the model finds unlikely pull less (arXiv 2508.05629)."""

    metric = "sft_is_loss"

    def token_losses(self, logprob: Tensor, mask: Tensor) -> Tensor:
        logprob = torch.where(mask, logprob, 0.0)
        return -logprob * logprob.detach().exp()


@POLICY_LOSS_FN.register_module("sft_phi")
class SFTPhiLoss(SFTLoss):
    """−min(log p, log cutoff)·sg(p(1−p)), CHORD's φ, arXiv 2508.11408.

    Tokens that the model already gives ``cutoff_prob`` or more have no gradient; both the
    certain and the hopeless ones weigh little.
    """

    metric = "sft_phi_loss"

    def __init__(self, cutoff_prob: float = 1.0, loss_agg_mode: Optional[str] = None) -> None:
        super().__init__(loss_agg_mode)
        if not 0.0 < cutoff_prob <= 1.0:
            raise ValueError(f"cutoff_prob must be in (0, 1] (got {cutoff_prob}); 1 cuts nothing")
        self.log_cutoff = math.log(cutoff_prob)

    def token_losses(self, logprob: Tensor, mask: Tensor) -> Tensor:
        logprob = torch.where(mask, logprob, 0.0)
        probability = logprob.detach().exp()
        return -logprob.clamp(max=self.log_cutoff) * (probability * (1.0 - probability))

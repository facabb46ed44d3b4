"""Distillation from the teacher's whole distribution at every token."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trinity_dask.algorithm.aggregate import Denominator
from trinity_dask.algorithm.policy_losses.base import (
    POLICY_LOSS_FN,
    LossResult,
    PolicyLoss,
    counted,
)


def generalised_jsd(logp: Tensor, teacher_logp: Tensor, beta: float) -> Tensor:
    """β·KL(p‖m) + (1−β)·KL(q‖m), m = βp + (1−β)q, of log-probs ``[..., V]``: ``[...]``.

    p is the teacher, q the student. β = 0 is the reverse KL(q‖p) and β = 1 the forward
    KL(p‖q); between them β = 0.5 is the symmetric divergence, at most log 2.
    """
    if beta == 0.0:
        return _kl(logp, teacher_logp)
    if beta == 1.0:
        return _kl(teacher_logp, logp)
    mixture = torch.logaddexp(teacher_logp + math.log(beta), logp + math.log(1.0 - beta))
    return beta * _kl(teacher_logp, mixture) + (1.0 - beta) * _kl(logp, mixture)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """Σ exp(a)·(a − b); an impossible event of ``a`` counts 0."""
    a, b = a.clamp(min=-1e4), b.clamp(min=-1e4)
    return (a.exp() * (a - b)).sum(dim=-1)


@POLICY_LOSS_FN.register_module("jsd")
class JSDLoss(PolicyLoss):
    """β·KL(p‖m) + (1−β)·KL(q‖m) over the whole vocabulary, β ``lambda_coef``: 2306.13649.

    p is the teacher, q the policy, m = βp + (1−β)q. Needs ``logits`` (with gradient) and
    ``teacher_logits``, float32 ``[B, R, V]`` at the sampling temperature. Valid tokens are
    worked off ``chunk_size`` at a time and recomputed in the backward pass, so no second
    tensor of that size is kept.
    """

    def __init__(
        self,
        lambda_coef: float = 0.5,
        chunk_size: int = 512,
        loss_agg_mode: Optional[str] = None,
    ) -> None:
        super().__init__(loss_agg_mode)
        if not 0 <= lambda_coef <= 1:
            raise ValueError(f"lambda_coef must be in [0, 1] (got {lambda_coef})")
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be >= 1 (got {chunk_size}); it counts tokens")
        self.beta, self.chunk_size = lambda_coef, chunk_size

    def __call__(
        self,
        *,
        logprob: Tensor,
        action_mask: Tensor,
        logits: Tensor,
        teacher_logits: Tensor,
        denominator: Optional[Denominator] = None,
        loss_agg_mode: Optional[str] = None,
        **_: Any,
    ) -> LossResult:
        denominator = counted(denominator, action_mask)
        chunks = zip(
            logits[action_mask].split(self.chunk_size),
            teacher_logits[action_mask].split(self.chunk_size),
            strict=True,
        )
        found = [
            checkpoint(self._divergence, mine, theirs, use_reentrant=False)
            for mine, theirs in chunks
        ]
        losses = torch.zeros_like(logprob).masked_scatter(action_mask, torch.cat(found))
        loss = self.total(losses, action_mask, denominator, loss_agg_mode)
        return loss, {"jsd_loss": loss.detach()}

    def _divergence(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        mine, theirs = logits.log_softmax(dim=-1), teacher_logits.log_softmax(dim=-1)
        return generalised_jsd(mine, theirs, self.beta)

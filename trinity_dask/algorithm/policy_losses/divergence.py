"""Distillation from the teacher's whole distribution at every token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Optional

from trinity_dask.algorithm.policy_losses.base import (
    POLICY_LOSS_FN,
    LossInputs,
    Metrics,
    PolicyLoss,
)
from trinity_dask.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def generalised_jsd(logp: Tensor, teacher_logp: Tensor, beta: float) -> Tensor:
    """β·KL(p‖m) + (1−β)·KL(q‖m), m = βp + (1−β)q, of log-probs ``[..., V]``: ``[...]``.

    p is the teacher, q the student (arXiv 2306.13649, section 2). β = 0.5 is the symmetric
    divergence, at most log 2. Toward either end it vanishes: divided by β it tends to the
    forward KL(p‖q) as β → 0, divided by 1−β to the reverse KL(q‖p) as β → 1, and these are
    its values at β = 0 and β = 1.
    """
    if beta == 0.0:
        return _kl(teacher_logp, logp)
    if beta == 1.0:
        return _kl(logp, teacher_logp)
    mixture = torch.logaddexp(teacher_logp + math.log(beta), logp + math.log(1.0 - beta))
    return beta * _kl(teacher_logp, mixture) + (1.0 - beta) * _kl(logp, mixture)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """Σ exp(a)·(a − b); an impossible event of ``a`` counts 0."""
    a, b = a.clamp(min=-1e4), b.clamp(min=-1e4)
    return (a.exp() * (a - b)).sum(dim=-1)


@POLICY_LOSS_FN.register_module("jsd")
class JSDLoss(PolicyLoss):
    """β·KL(p‖m) + (1−β)·KL(q‖m) over the whole vocabulary, β ``lambda_coef``: 2306.13649.

    p is the teacher, q the policy, m = βp + (1−β)q; β = 0 is the forward KL(p‖q), β = 1 the
    reverse KL(q‖p). Needs ``logits`` (with gradient) and
    ``teacher_logits``, float32 ``[B, R, V]`` at the sampling temperature. Valid tokens are
    worked off ``chunk_size`` at a time and recomputed in the backward pass, so no second
    tensor of that size is kept.
    """

    reads = ("logits", "teacher_logits")
    metric = "jsd_loss"

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

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        chunks = zip(
            x.logits[x.action_mask].split(self.chunk_size),
            x.teacher_logits[x.action_mask].split(self.chunk_size),
            strict=True,
        )
        found = [
            torch.utils.checkpoint.checkpoint(self._divergence, mine, theirs, use_reentrant=False)
            for mine, theirs in chunks
        ]
        losses = torch.zeros_like(x.logprob).masked_scatter(x.action_mask, torch.cat(found))
        return losses, {}

    def _divergence(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        mine, theirs = logits.log_softmax(dim=-1), teacher_logits.log_softmax(dim=-1)
        return generalised_jsd(mine, theirs, self.beta)

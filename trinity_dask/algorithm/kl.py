"""Penalties on the distance from a reference policy, as a loss term.

Invariant: with δ = log π − log π_ref on the sampled token, the estimators' values and
gradients are those of the table in ``docs``: k2 and the corrected k3 have the right
expected gradient as a loss, k1 has none, plain k3 that of the other direction.
Background: http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import TOKEN_MEAN, Denominator, aggregate, token_share
from trinity_dask.algorithm.registry import Registry

Estimator = Callable[[Tensor, Tensor, Optional[Tensor]], Tensor]
KL_ESTIMATORS: Registry[Estimator] = Registry("kl_loss_fn")


@KL_ESTIMATORS.register_module("k1")
def k1(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    return logprob - ref


@KL_ESTIMATORS.register_module("k2")
def k2(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    return (logprob - ref).square() / 2


@KL_ESTIMATORS.register_module("k3")
def k3(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    delta = logprob - ref
    return torch.expm1(-delta) + delta


@KL_ESTIMATORS.register_module("low_var_kl")
def low_var_kl(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    """k3 with −δ clamped to ±20 and the value to ±10 (no gradient beyond)."""
    delta = (logprob - ref).clamp(-20.0, 20.0)
    return (torch.expm1(-delta) + delta).clamp(-10.0, 10.0)


@KL_ESTIMATORS.register_module("abs")
def absolute(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    return (logprob - ref).abs()


@KL_ESTIMATORS.register_module("corrected_k3")
def corrected_k3(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    """ρ·k3 with gradient through ρ = π/π_old, capped at 2 (arXiv 2512.02556)."""
    ratio = (logprob - (logprob.detach() if old is None else old)).exp().clamp(max=2.0)
    return ratio * k3(logprob, ref, None)


class KLLoss:
    """``kl_coef`` × the aggregated estimator; inactive with name ``none`` or coefficient 0."""

    def __init__(self, name: str = "none", kl_coef: float = 0.001) -> None:
        if kl_coef < 0:
            raise ValueError(f"kl_coef must be >= 0 (got {kl_coef}); 0 turns the term off")
        self.name = name
        self.coef = kl_coef
        self._estimate = None if name == "none" else KL_ESTIMATORS.get(name)

    @property
    def active(self) -> bool:
        return self._estimate is not None and self.coef > 0

    def __call__(
        self,
        *,
        logprob: Tensor,
        ref_logprob: Tensor,
        action_mask: Tensor,
        denominator: Denominator,
        old_logprob: Optional[Tensor] = None,
        loss_agg_mode: str = TOKEN_MEAN,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self._estimate is None:
            raise RuntimeError("the KL term is off (kl_loss_fn none)")
        values = self._estimate(logprob, ref_logprob, old_logprob)
        loss = self.coef * aggregate(values, action_mask, loss_agg_mode, denominator)
        return loss, {"kl_loss": token_share(values.detach(), action_mask, denominator)}

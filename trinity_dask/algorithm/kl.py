"""Penalties on the distance from a reference policy, as a loss term or in the reward.

Invariant: with δ = log π − log π_ref on the sampled token, the estimators' values and
gradients are those of the table in ``docs``: k2 and the corrected k3 have the right
expected gradient as a loss, k1 has none (it is the one for the reward), plain k3 that of
the other direction. Background: http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Optional, TypeAlias

from trinity_dask.algorithm.aggregate import TOKEN_MEAN, Denominator, aggregate, token_share
from trinity_dask.lazy import torch
from trinity_dask.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Estimator: TypeAlias = "Callable[[Tensor, Tensor, Optional[Tensor]], Tensor]"
KL_FN: Registry[Estimator] = Registry("kl_loss_fn")
MAX_ADAPTIVE_ERROR = 0.2  # Ziegler et al., arXiv 1909.08593


@KL_FN.register_module("k1")
def k1(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    return logprob - ref


@KL_FN.register_module("k2")
def k2(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    return (logprob - ref).square() / 2


@KL_FN.register_module("k3")
def k3(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    delta = logprob - ref
    return torch.expm1(-delta) + delta


@KL_FN.register_module("low_var_kl")
def low_var_kl(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    """k3 with −δ clamped to ±20 and the value to ±10 (no gradient beyond)."""
    delta = (logprob - ref).clamp(-20.0, 20.0)
    return (torch.expm1(-delta) + delta).clamp(-10.0, 10.0)


@KL_FN.register_module("abs")
def absolute(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    return (logprob - ref).abs()


@KL_FN.register_module("corrected_k3")
def corrected_k3(logprob: Tensor, ref: Tensor, old: Optional[Tensor]) -> Tensor:
    """ρ·k3 with gradient through ρ = π/π_old, capped at 2 (arXiv 2512.02556)."""
    ratio = (logprob - (logprob.detach() if old is None else old)).exp().clamp(max=2.0)
    return ratio * k3(logprob, ref, None)


class KLTerm:
    """An estimator and its coefficient, fixed or adaptive.

    Adaptive (arXiv 1909.08593): after each batch of n rows
    coef ← coef · (1 + clip(kl/target_kl − 1, ±0.2) · n/horizon).

    Raises:
        ValueError: a negative coefficient, or adaptive without target_kl and horizon > 0.
    """

    def __init__(
        self,
        name: str = "none",
        kl_coef: float = 0.001,
        adaptive: bool = False,
        target_kl: Optional[float] = None,
        horizon: Optional[float] = None,
    ) -> None:
        if kl_coef < 0:
            raise ValueError(f"kl_coef must be >= 0 (got {kl_coef}); 0 turns the term off")
        if adaptive and not ((target_kl or 0) > 0 and (horizon or 0) > 0):
            raise ValueError(
                f"adaptive needs target_kl > 0 and horizon > 0 (got {target_kl} and {horizon}); "
                "6.0 and 10000 are usual"
            )
        self.name = name
        self.coef = kl_coef
        self.adaptive = adaptive
        self.target_kl = target_kl
        self.horizon = horizon
        self._estimate = None if name == "none" else KL_FN.get(name)

    @property
    def active(self) -> bool:
        return self._estimate is not None and self.coef > 0

    def estimate(self, logprob: Tensor, ref: Tensor, old: Optional[Tensor], mask: Tensor) -> Tensor:
        """The estimator at each token, 0 at masked places: float32 ``[B, R]``."""
        if self._estimate is None:
            raise RuntimeError("the KL term is off (kl_loss_fn none)")
        old = None if old is None else torch.where(mask, old, 0.0)
        return self._estimate(torch.where(mask, logprob, 0.0), torch.where(mask, ref, 0.0), old)

    def update(self, kl: float, n_rows: float) -> None:
        """Adapt the coefficient to the mean ``kl`` of a batch of ``n_rows``; else nothing."""
        if not self.adaptive or self.target_kl is None or self.horizon is None:
            return
        error = min(max(kl / self.target_kl - 1.0, -MAX_ADAPTIVE_ERROR), MAX_ADAPTIVE_ERROR)
        self.coef *= 1.0 + error * n_rows / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.coef = float(state["coef"])


class KLLoss(KLTerm):
    """``kl_coef`` × the aggregated estimator; inactive with name ``none`` or coefficient 0.

    An adaptive coefficient is moved by :meth:`update`, once per step, with the step's
    metric ``kl_loss``.
    """

    def __call__(
        self,
        *,
        logprob: Tensor,
        ref_logprob: Tensor,
        action_mask: Tensor,
        denominator: Optional[Denominator] = None,
        old_logprob: Optional[Tensor] = None,
        loss_agg_mode: str = TOKEN_MEAN,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The term and its metrics; ``kl_loss`` is before the coefficient, a token mean."""
        denominator = Denominator.count(action_mask) if denominator is None else denominator
        values = self.estimate(logprob, ref_logprob, old_logprob, action_mask)
        loss = self.coef * aggregate(values, action_mask, loss_agg_mode, denominator)
        return loss, {"kl_loss": token_share(values.detach(), action_mask, denominator)}


class KLPenalty(KLTerm):
    """token rewards ← token rewards − ``kl_coef``·kl(old, ref) at valid tokens.

    Called with the global batch of a step, so that an adaptive coefficient is the same on
    every rank; it moves after the penalty is taken.
    """

    def __call__(self, batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        """Sets ``token_level_rewards``; metrics ``kl`` (mean of row means) and ``kl_coef``.

        Raises:
            ValueError: ``ref_logprobs`` or ``old_logprobs`` is missing.
        """
        missing = [n for n in ("ref_logprobs", "old_logprobs") if batch.get(n) is None]
        if missing:
            raise ValueError(
                f"kl_penalty_fn {self.name!r} needs {' and '.join(missing)} of every row; load a "
                "reference model, or set kl_penalty_fn=none"
            )
        mask, old = batch["action_mask"], batch["old_logprobs"]
        values = self.estimate(old, batch["ref_logprobs"], old, mask)
        values = torch.where(mask, values, 0.0)
        batch["token_level_rewards"] = batch["token_level_rewards"] - self.coef * values
        rows = mask.any(dim=1)
        means = values.double().sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        kl = float(means[rows].mean()) if bool(rows.any()) else 0.0
        metrics = {"kl": kl, "kl_coef": self.coef}
        self.update(kl, float(rows.sum()))
        return batch, metrics

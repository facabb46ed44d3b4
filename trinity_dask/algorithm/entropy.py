"""The entropy bonus: H = logsumexp(z) − Σ p·z of the temperature-scaled logits.

Invariant: the bonus is subtracted from the loss with its coefficient; a coefficient of 0
costs no gradient, the entropy is then only a metric.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, TypeAlias

from trinity_dask.algorithm.aggregate import TOKEN_MEAN, Denominator, aggregate, as_token_mask
from trinity_dask.algorithm.calling import needs_of
from trinity_dask.lazy import torch
from trinity_dask.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Bonus: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"
ENTROPY_LOSS_FN: Registry[Callable[..., Any]] = Registry("entropy_loss_fn")


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of float32 logits ``[..., V]``: float32 ``[...]``."""
    probabilities = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - (probabilities * logits).sum(dim=-1)


def token_necs(logits: Tensor) -> Tensor:
    """Σ_j p_j²·(H + log p_j) of float32 logits ``[..., V]``: float32 ``[...]``.

    The mean under the policy of the entropy change score S_j = p_j(H + log p_j); an update
    that raises token k by ε changes the entropy by −ε(S_k − this), arXiv 2602.03392,
    theorem 3.3. ``clipv`` reads it as ``necs``.
    """
    logp = torch.log_softmax(logits, dim=-1)
    p = logp.exp()
    entropy = -(p * logp).sum(dim=-1, keepdim=True)
    return (p.square() * (entropy + logp)).sum(dim=-1)


@ENTROPY_LOSS_FN.register_module("default")
class EntropyLoss:
    """``entropy_coef`` × the aggregated entropy."""

    measured = True  # the entropy is wanted, at least as a metric

    def __init__(self, entropy_coef: float = 0.0) -> None:
        self.coef = entropy_coef

    @property
    def active(self) -> bool:
        """The entropy takes part in the gradient."""
        return self.measured and self.coef != 0.0

    @property
    def needs(self) -> frozenset[str]:
        return needs_of(self) - {"entropy"}

    def __call__(
        self,
        *,
        entropy: Tensor,
        action_mask: Tensor,
        denominator: Optional[Denominator] = None,
        loss_agg_mode: str = TOKEN_MEAN,
    ) -> Bonus:
        """The bonus, to be subtracted. entropy float ``[B, R]``."""
        denominator = Denominator.count(action_mask) if denominator is None else denominator
        loss = self.coef * aggregate(entropy, action_mask, loss_agg_mode, denominator)
        return loss, {"entropy_loss": loss.detach()}


@ENTROPY_LOSS_FN.register_module("none")
class NoEntropyLoss(EntropyLoss):
    """No bonus, and the entropy is not computed."""

    measured = False


@ENTROPY_LOSS_FN.register_module("mix")
class MixEntropyLoss(EntropyLoss):
    """The bonus over the model's own rows only; demonstrations have none."""

    def __call__(  # type: ignore[override]
        self,
        *,
        entropy: Tensor,
        action_mask: Tensor,
        expert_mask: Tensor,
        denominator: Optional[Denominator] = None,
        loss_agg_mode: str = TOKEN_MEAN,
    ) -> Bonus:
        if denominator is None:
            denominator = Denominator.count(action_mask, expert_mask)
        usual = action_mask & ~as_token_mask(expert_mask, action_mask)
        return super().__call__(
            entropy=entropy,
            action_mask=usual,
            denominator=denominator.usual,
            loss_agg_mode=loss_agg_mode,
        )

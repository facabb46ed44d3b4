"""The entropy bonus: H = logsumexp(z) − Σ p·z of the temperature-scaled logits.

Invariant: the bonus is subtracted from the loss with its coefficient; a coefficient of 0
costs no gradient, the entropy is then only a metric.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import TOKEN_MEAN, Denominator, aggregate
from trinity_dask.algorithm.registry import nearest

ENTROPY_LOSSES = ("none", "default")


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of float32 logits ``[..., V]``: float32 ``[...]``."""
    probabilities = torch.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - (probabilities * logits).sum(dim=-1)


class EntropyLoss:
    """``entropy_coef`` × the aggregated entropy."""

    def __init__(self, name: str = "none", entropy_coef: float = 0.0) -> None:
        if name not in ENTROPY_LOSSES:
            raise ValueError(f"unknown entropy_loss_fn {name!r}{nearest(name, ENTROPY_LOSSES)}")
        self.name = name
        self.coef = entropy_coef

    @property
    def measured(self) -> bool:
        """The entropy is wanted, at least as a metric."""
        return self.name != "none"

    @property
    def active(self) -> bool:
        """The entropy takes part in the gradient."""
        return self.measured and self.coef != 0.0

    def __call__(
        self,
        *,
        entropy: Tensor,
        action_mask: Tensor,
        denominator: Denominator,
        loss_agg_mode: str = TOKEN_MEAN,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The bonus, to be subtracted. entropy float ``[B, R]``."""
        loss = self.coef * aggregate(entropy, action_mask, loss_agg_mode, denominator)
        return loss, {"entropy_loss": loss.detach()}

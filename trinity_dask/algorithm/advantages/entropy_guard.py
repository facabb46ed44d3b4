"""clipb and clipv: group-relative advantages that spare tokens which would cost entropy.

Invariant: a spared token gets advantage 0 and keeps its place in every denominator.

Raising token k by ε changes the entropy by −ε(S_k − E_π[S]) with S = p(H + log p); pushing
an unlikely token down (A < 0, S below its mean) therefore lowers it. arXiv 2602.03392.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_dask.algorithm.advantages.base import ADVANTAGE_FN, Batch, require
from trinity_dask.algorithm.advantages.in_trainer import (
    GRPOVerlAdvantage,
    masked_mean,
    set_token_advantages,
)
from trinity_dask.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Result = tuple[Batch, dict[str, float]]


def entropy_score(batch: Batch) -> Tensor:
    """S = p(H + log p) of the sampled tokens, float64 ``[B, R]``, 0 at masked places."""
    mask = batch["action_mask"]
    logp = torch.where(mask, batch["old_logprobs"], 0.0).double()
    entropy = torch.where(mask, batch["entropys"], 0.0).double()
    return torch.where(mask, logp.exp() * (entropy + logp), 0.0)


class EntropyGuard:
    """Base: grpo scores, then advantage 0 at the tokens that :meth:`spared` names."""

    name = ""
    needs = frozenset({"old_logprobs", "entropys"})

    def __init__(self, epsilon: float, mu: float) -> None:
        if not mu > 0:
            raise ValueError(f"mu must be > 0 (got {mu}); it counts standard deviations")
        self.mu = mu
        self._grpo = GRPOVerlAdvantage(epsilon)

    def __call__(self, batch: Batch) -> Result:
        require(batch, self.needs, self.name)
        batch, metrics = self._grpo(batch)
        mask, advantages = batch["action_mask"], batch["advantages"]
        spared, extra = self.spared(batch, advantages, mask)
        spared = spared & mask
        metrics |= {
            "frac_clipped": masked_mean(spared, mask),
            "frac_clipped_pos": masked_mean(spared, mask & (advantages > 0)),
            "frac_clipped_neg": masked_mean(spared, mask & (advantages < 0)),
        }
        kept = torch.where(spared, 0.0, advantages)
        return set_token_advantages(batch, kept), metrics | extra

    def spared(
        self, batch: Batch, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Tokens to spare, bool ``[B, R]``, and the statistics that decided."""
        raise TypeError(f"{type(self).__name__} defines no rule")


@ADVANTAGE_FN.register_module("clipb")
class ClipBAdvantage(EntropyGuard):
    """Spare tokens with A < 0 and S − mean(S) < −mu·std(S), both over the global batch."""

    name = "clipb"

    def __init__(self, epsilon: float = 1e-6, mu: float = 2.5) -> None:
        super().__init__(epsilon, mu)

    def spared(
        self, batch: Batch, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        score = entropy_score(batch)
        center = masked_mean(score, mask)
        variance = masked_mean((score - center).square(), mask)
        low = score - center < -self.mu * variance**0.5
        return low & (advantages < 0), {"ES": center, "varS": variance}


@ADVANTAGE_FN.register_module("clipv")
class ClipVAdvantage(EntropyGuard):
    """Spare tokens with A ≤ 0 and D > mu·std(D), D = E_π[S] − S at the token's own state.

    ``necs`` is E_π[S] = Σ_j p_j²(H + log p_j), which needs the whole distribution
    (:func:`trinity_dask.algorithm.entropy.token_necs`). Of the tokens found at most the
    share ``max_frac`` of all, the largest D first, is spared; at least one.
    """

    name = "clipv"
    needs = frozenset({"old_logprobs", "entropys", "necs"})

    def __init__(self, epsilon: float = 1e-6, mu: float = 8.5, max_frac: float = 1e-4) -> None:
        super().__init__(epsilon, mu)
        if not 0 < max_frac <= 1:
            raise ValueError(f"max_frac must be in (0, 1] (got {max_frac})")
        self.max_frac = max_frac

    def spared(
        self, batch: Batch, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        necs = torch.where(mask, batch["necs"], 0.0).double()
        distance = necs - entropy_score(batch)
        center = masked_mean(distance, mask)
        width = masked_mean((distance - center).square(), mask) ** 0.5
        found = (distance > self.mu * width) & (advantages <= 0) & mask
        return self._largest(found, distance, int(mask.sum())), {"stdD": width}

    def _largest(self, found: Tensor, distance: Tensor, n_tokens: int) -> Tensor:
        limit = max(int(self.max_frac * n_tokens), 1)
        if int(found.sum()) <= max(self.max_frac * n_tokens, 1):
            return found
        order = torch.where(found, distance, -torch.inf).flatten().argsort(descending=True)
        chosen = torch.zeros_like(found).flatten()
        chosen[order[:limit]] = True
        return chosen.view_as(found)

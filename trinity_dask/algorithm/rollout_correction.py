"""Importance weights for the gap between the policy that sampled and the trainer's.

Invariant: weights are detached, and the raw ratio is reported before it is clipped, so
that the metrics can show the problem which the clipping hides.

Decoupled PPO (Hilton et al., arXiv 2110.00641): loss = w · clip-loss(ρ) with ρ against
the policy at the start of the update ("old") and w = old / behaviour. Token-level
truncation (token TIS) uses w = min(w, cap): a product over the sequence would mute long
answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trinity_dask.algorithm.registry import nearest

CORRECTION_MODES = ("none", "token_tis")
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0, "min": 0.0}
# torch.quantile refuses more values than this; a strided sample says the same
MAX_QUANTILE_VALUES = 1 << 20


@dataclass(frozen=True)
class RolloutCorrection:
    """How to weight a token whose sampler was not exactly the trainer's policy."""

    mode: str = "none"
    cap: float = 2.0

    def __post_init__(self) -> None:
        if self.mode not in CORRECTION_MODES:
            hint = nearest(self.mode, CORRECTION_MODES)
            raise ValueError(f"unknown rollout_correction.mode {self.mode!r}{hint}")
        if not self.cap > 0:
            raise ValueError(f"rollout_correction.cap must be > 0 (got {self.cap}); 2.0 is usual")

    @property
    def active(self) -> bool:
        return self.mode != "none"

    def weights(self, old_logprob: Tensor, rollout_logprob: Tensor) -> Tensor:
        """min(exp(old − behaviour), cap), float ``[B, R]``, without gradient."""
        return log_ratio(old_logprob, rollout_logprob).exp().clamp(max=self.cap)


def log_ratio(old_logprob: Tensor, rollout_logprob: Tensor) -> Tensor:
    """log(old / behaviour) clamped to ±20, where exp is still finite in float32."""
    return (old_logprob.detach() - rollout_logprob).clamp(-20.0, 20.0)


def correction_metrics(
    correction: RolloutCorrection, old_logprob: Tensor, rollout_logprob: Tensor, mask: Tensor
) -> dict[str, float]:
    """Raw ratio quantiles, weights and the sampler's gap over the valid tokens.

    ``gap`` is the mean |old − behaviour|; ``ess`` the effective sample size of the raw
    ratios as a share of the tokens, (Σw)² / (n Σw²).
    """
    difference = (old_logprob - rollout_logprob)[mask]
    if difference.numel() == 0:
        return {}
    raw = log_ratio(old_logprob, rollout_logprob)[mask].exp()
    metrics = {
        "correction/gap": float(difference.abs().mean()),
        "correction/gap_max": float(difference.abs().max()),
        "correction/ratio_mean": float(raw.mean()),
        "correction/ess": float(raw.sum() ** 2 / (raw.numel() * (raw**2).sum())),
    }
    metrics |= _quantiles(raw)
    if correction.active:
        metrics["correction/weight_mean"] = float(raw.clamp(max=correction.cap).mean())
        metrics["correction/clipped_share"] = float((raw > correction.cap).float().mean())
    return metrics


def _quantiles(values: Tensor) -> dict[str, float]:
    stride = -(-values.numel() // MAX_QUANTILE_VALUES)
    levels = torch.tensor(list(QUANTILES.values()), device=values.device)
    found = torch.quantile(values[::stride], levels)
    return {f"correction/ratio_{n}": float(v) for n, v in zip(QUANTILES, found, strict=True)}

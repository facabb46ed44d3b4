"""Importance weights for the gap between the policy that sampled and the trainer's.

Invariant: weights are detached, and the raw ratio is reported before it is clipped, so
that the metrics can show the problem which the clipping hides. A rejected token keeps its
place in the loss's divisor: its weight is 0, the mask is not touched.

Decoupled PPO (Hilton et al., arXiv 2110.00641): loss = w · clip-loss(ρ) with ρ against
the policy at the start of the update ("old") and w = old / behaviour. A product over the
sequence mutes long answers, so the recommended setting is ``token_tis`` with the geometric
filter. All rules work for every loss that takes ``weights``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional

from trinity_dask.algorithm.aggregate import row_mean
from trinity_dask.lazy import torch
from trinity_dask.registry import nearest

if TYPE_CHECKING:
    from torch import Tensor

CORRECTION_MODES = (
    "none",
    "token_tis",  # min(w, cap)
    "token_mask",  # w where floor <= w <= cap, else 0 (IcePop)
    "sequence_tis",  # min(Πw, cap) on every token of the row
    "sequence_mask",  # Πw where it is inside [floor, cap], else 0
    "geometric_tis",  # (Πw)^(1/T) on every token, truncated
    "geometric_mask",  # (Πw)^(1/T) where it is inside [floor, cap], else 0
)
FILTERS = ("none", "product", "geometric")
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0, "min": 0.0}
# torch.quantile refuses more values than this; a strided sample says the same
MAX_QUANTILE_VALUES = 1 << 20


@dataclass(frozen=True)
class Correction:
    """``weights`` float32 ``[B, R]``; ``rejected``: per rule the tokens that it set to 0."""

    weights: Tensor
    rejected: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutCorrection:
    """How to weight a token whose sampler was not exactly the trainer's policy.

    ``cap`` and ``floor`` bound the weight of ``mode`` (the *_tis modes move it to the bound,
    the *_mask modes drop it). floor None: 1/cap for ``token_mask``, no bound otherwise.
    ``sequence_filter`` drops rows whose product or geometric mean of w is outside
    [filter_low, filter_high]. ``dppo_delta`` (usually 0.2) drops tokens whose probability
    already moved too far: π − μ > δ with A > 0, or < −δ with A ≤ 0.
    """

    mode: str = "none"
    cap: float = 2.0
    floor: Optional[float] = None
    sequence_filter: str = "none"
    filter_low: float = 0.99
    filter_high: float = 1.01
    dppo_delta: Optional[float] = None

    def __post_init__(self) -> None:
        for key, allowed in (("mode", CORRECTION_MODES), ("sequence_filter", FILTERS)):
            value = getattr(self, key)
            if value not in allowed:
                hint = nearest(value, allowed)
                raise ValueError(f"unknown rollout_correction.{key} {value!r}{hint}")
        if not self.cap > 0:
            raise ValueError(f"rollout_correction.cap must be > 0 (got {self.cap}); 2.0 is usual")
        self._check_bounds()

    def _check_bounds(self) -> None:
        if self.floor is not None and not 0 <= self.floor <= self.cap:
            raise ValueError(
                f"rollout_correction.floor must be in [0, cap={self.cap}] (got {self.floor})"
            )
        if not 0 <= self.filter_low <= self.filter_high:
            raise ValueError(
                "rollout_correction.filter_low and filter_high must be 0 <= low <= high (got "
                f"{self.filter_low} and {self.filter_high}); 0.99 and 1.01 are usual"
            )
        if self.dppo_delta is not None and not 0 < self.dppo_delta <= 1:
            raise ValueError(
                f"rollout_correction.dppo_delta must be in (0, 1] or null (got {self.dppo_delta}); "
                "it is a difference of probabilities, usually 0.2"
            )

    @property
    def reweights(self) -> bool:
        """Some weight differs from 0 and 1."""
        return self.mode != "none"

    @property
    def active(self) -> bool:
        return self.reweights or self.sequence_filter != "none" or self.dppo_delta is not None

    def weights(
        self,
        old_logprob: Tensor,
        rollout_logprob: Tensor,
        action_mask: Optional[Tensor] = None,
        advantages: Optional[Tensor] = None,
        logprob: Optional[Tensor] = None,
    ) -> Tensor:
        """The ``weights`` of :meth:`apply`."""
        return self.apply(old_logprob, rollout_logprob, action_mask, advantages, logprob).weights

    def apply(
        self,
        old_logprob: Tensor,
        rollout_logprob: Tensor,
        action_mask: Optional[Tensor] = None,
        advantages: Optional[Tensor] = None,
        logprob: Optional[Tensor] = None,
    ) -> Correction:
        """Weights without gradient, and what each rule rejected.

        Args:
            old_logprob: the policy that is compared with the sampler, ``[B, R]``: that of
                the start of the step; under ``bypass_old_logprobs`` the current one.
            rollout_logprob: the sampler's.
            action_mask: valid tokens (None: all); rows are products over them.
            advantages: for the DPPO rule.
            logprob: the current policy's, for the DPPO rule; None: ``old_logprob``.

        Raises:
            ValueError: the DPPO rule without advantages.
        """
        with torch.no_grad():  # no decorator: it would import torch with this module
            mask = (
                torch.ones_like(old_logprob, dtype=torch.bool)
                if action_mask is None
                else action_mask
            )
            log_w = log_ratio(old_logprob, rollout_logprob)
            weights, rejected = self._mode_weights(log_w, mask)
            rejected |= self._filtered(log_w, mask)
            if self.dppo_delta is not None:
                current = old_logprob if logprob is None else logprob
                rejected["dppo"] = self._moved_too_far(current, rollout_logprob, advantages)
            for dropped in rejected.values():
                weights = torch.where(dropped, 0.0, weights)
            return Correction(weights, {name: dropped & mask for name, dropped in rejected.items()})

    def _mode_weights(self, log_w: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        level, _, kind = self.mode.partition("_")
        if level == "none":
            return torch.ones_like(log_w), {}
        if level != "token":
            log_w = row_log_ratio(log_w, mask, geometric=level == "geometric").expand_as(log_w)
        weights = log_w.exp()
        floor = self.floor
        if floor is None and self.mode == "token_mask":
            floor = 1.0 / self.cap
        if kind == "tis":
            return weights.clamp(min=floor, max=self.cap), {}
        outside = weights > self.cap
        return weights, {self.mode: outside if floor is None else outside | (weights < floor)}

    def _filtered(self, log_w: Tensor, mask: Tensor) -> dict[str, Tensor]:
        if self.sequence_filter == "none":
            return {}
        rows = row_log_ratio(log_w, mask, geometric=self.sequence_filter == "geometric").exp()
        outside = (rows < self.filter_low) | (rows > self.filter_high)
        return {f"{self.sequence_filter}_filter": outside.expand_as(log_w)}

    def _moved_too_far(
        self, logprob: Tensor, rollout_logprob: Tensor, advantages: Optional[Tensor]
    ) -> Tensor:
        if advantages is None:
            raise ValueError("rollout_correction.dppo_delta needs the advantages of the tokens")
        delta = self.dppo_delta or 0.0
        moved = logprob.exp() - rollout_logprob.exp()
        return torch.where(advantages > 0, moved > delta, moved < -delta)


def log_ratio(old_logprob: Tensor, rollout_logprob: Tensor) -> Tensor:
    """log(old / behaviour) clamped to ±20, where exp is still finite in float32."""
    return (old_logprob.detach() - rollout_logprob).clamp(-20.0, 20.0)


def row_log_ratio(log_w: Tensor, mask: Tensor, geometric: bool) -> Tensor:
    """log of a row's product of w, or of its geometric mean, over valid tokens: ``[B, 1]``."""
    rows = row_mean(log_w, mask) if geometric else torch.where(mask, log_w, 0.0).sum(dim=1)
    return rows[:, None].clamp(-20.0, 20.0)


def correction_metrics(
    correction: RolloutCorrection,
    old_logprob: Tensor,
    rollout_logprob: Tensor,
    mask: Tensor,
    advantages: Optional[Tensor] = None,
    logprob: Optional[Tensor] = None,
) -> dict[str, float]:
    """Raw ratio quantiles, weights and the sampler's gap over the valid tokens.

    ``gap`` is the mean |old − behaviour|; ``ess`` the effective sample size of the raw
    ratios as a share of the tokens, (Σw)² / (n Σw²); ``masked_share/<rule>`` the share of
    tokens that a rule rejects. All of it is before any clipping but ``weight_mean``.
    """
    metrics = ratio_metrics(old_logprob, rollout_logprob, mask)
    if not metrics or not correction.active:
        return metrics
    found = correction.apply(old_logprob, rollout_logprob, mask, advantages, logprob)
    raw = log_ratio(old_logprob, rollout_logprob)[mask].exp()
    metrics["correction/weight_mean"] = float(found.weights[mask].mean())
    metrics["correction/clipped_share"] = float((raw > correction.cap).float().mean())
    for rule, dropped in found.rejected.items():
        metrics[f"correction/masked_share/{rule}"] = float(dropped[mask].float().mean())
    return metrics


def ratio_metrics(
    new: Tensor, base: Tensor, mask: Tensor, prefix: str = "correction"
) -> dict[str, float]:
    """Gap, mean, effective sample size and quantiles of the raw ratio exp(new − base).

    Log-probs float32 ``[B, R]``, mask bool; nothing is clipped but to ±20 in the exponent.
    An empty mask gives no metrics.
    """
    difference = (new - base)[mask]
    if difference.numel() == 0:
        return {}
    raw = log_ratio(new, base)[mask].exp()
    metrics = {
        f"{prefix}/gap": float(difference.abs().mean()),
        f"{prefix}/gap_max": float(difference.abs().max()),
        f"{prefix}/ratio_mean": float(raw.mean()),
        f"{prefix}/ess": float(raw.sum() ** 2 / (raw.numel() * (raw**2).sum())),
    }
    stride = -(-raw.numel() // MAX_QUANTILE_VALUES)
    levels = torch.tensor(list(QUANTILES.values()), device=raw.device)
    quantiles = torch.quantile(raw[::stride], levels).tolist()
    return metrics | {f"{prefix}/ratio_{n}": v for n, v in zip(QUANTILES, quantiles, strict=True)}

"""How much of a step's policy gradient is signal and how much is noise, from forward passes.

Invariant: every row of the step counts once, whatever the ranks; what is compared are
proxies: the score's energy is that of the logits, W(τ) = Σ_t (1 − 2π_t + Σ_v π(v)²) =
Σ_t ‖e_t − π‖², so a row's squared gradient is taken as W(τ)·A(τ)² up to a constant.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.trainer.ranks.gradients import GradientGroup
from trinity_dask.trainer.step.batching import StepRows

ENERGY = "sum_pi_squared"


def probability_energy(logits: Tensor) -> Tensor:
    """Σ_v π(v)² of float32 logits ``[..., V]``: float32 ``[...]``."""
    return torch.softmax(logits, dim=-1).square().sum(dim=-1)


def step_variance(spec: AlgorithmSpec, rows: StepRows, grad_norm: float) -> dict[str, float]:
    """Metrics ``variance_proxy/*`` of a step; every rank must call it.

    Args:
        rows: with ``sum_pi_squared`` and log-probs of the start of the step, and advantages.
        grad_norm: of the policy, before clipping, mean over the updates.
    """
    batch, owned = rows.batch, torch.from_numpy(rows.plan.owned)  # another rank has the others
    mask = batch["action_mask"]
    if "expert_mask" in batch:
        mask = mask & ~batch["expert_mask"]
    blank = torch.zeros(mask.shape, device=mask.device)
    start, advantages = batch.get("start_logprobs", blank), batch["advantages"]
    weights = None
    if spec.correction.active:
        weights = spec.correction.weights(
            start, batch["rollout_logprobs"], mask, advantages, start
        )[owned]
    energy = batch.get(ENERGY, blank)
    return variance_proxies(
        start[owned],
        energy[owned],
        advantages[owned],
        mask[owned],
        weights,
        grad_norm,
        rows.group,
    )


def variance_proxies(
    logprob: Tensor,
    energy: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Optional[Tensor],
    grad_norm: float,
    group: GradientGroup,
) -> dict[str, float]:
    """Metrics ``variance_proxy/*`` over the rows with a valid token of all ranks.

    ``signal_strength`` is the squared norm of the step's gradient, ``total_power`` the mean
    of W·A², and ``pure_noise`` = (total_power − signal_strength) / (rows − 1) the variance of
    the mean. Names as verl's, which number the three.

    Args:
        logprob, energy, advantages: float32 ``[B, R]`` of this rank's own rows at the start
            of the step; mask bool; weights: those of the rollout correction, or None.
        grad_norm: before clipping, mean over the updates.
    """
    per_token = 1.0 - 2.0 * logprob.exp() + energy
    if weights is not None:
        per_token = per_token * weights.square()
    valid = mask.any(dim=1)
    score = torch.where(mask, per_token, 0.0).sum(dim=1).clamp(min=0.0)[valid]
    counts = mask.sum(dim=1)[valid]
    mean_advantage = torch.where(mask, advantages, 0.0).sum(dim=1)[valid] / counts
    sums = group.sum_values(
        {
            "rows": float(valid.sum()),
            "power": float((score * mean_advantage.square()).sum()),
            "expected_a_squared": float(mean_advantage.square().sum()),
            "expected_w": float(score.sum()),
        }
    )
    rows = sums.pop("rows")
    if rows == 0:
        return {}
    means = {name: value / rows for name, value in sums.items()}
    power, signal = means.pop("power"), grad_norm**2
    found = {"proxy1_signal_strength": signal, "proxy2_total_power": power}
    if rows > 1:
        found["proxy3_pure_noise"] = max((power - signal) / (rows - 1), 0.0)
    return {f"variance_proxy/{name}": value for name, value in (found | means).items()}

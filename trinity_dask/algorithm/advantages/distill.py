"""Advantages that pull a student's own samples toward a teacher.

Invariant: the expected gradient Σ_y π(y) A(y) ∇log π(y) is −kl_coef times the gradient of
the stated divergence, with the log-probs of the sampled token alone.

With q = π_old, p = teacher and m = βp + (1−β)q, the generalised Jensen-Shannon divergence
β·KL(p‖m) + (1−β)·KL(q‖m) has the derivative (1−β)·log(q/m) by q(y), so A = −k(1−β)·log(q/m).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trinity_dask.algorithm.advantages.base import ADVANTAGE_FN, Batch, require
from trinity_dask.algorithm.advantages.in_trainer import masked_mean, set_token_advantages
from trinity_dask.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Result = tuple[Batch, dict[str, float]]
NEEDS = frozenset({"old_logprobs", "teacher_logprobs"})
MAX_LOG_RATIO = 20.0


def _log_probs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Student's and teacher's log-probs, float64, 0 at masked places; and the mask."""
    mask = batch["action_mask"]
    student = torch.where(mask, batch["old_logprobs"], 0.0).double()
    teacher = torch.where(mask, batch["teacher_logprobs"], 0.0).double()
    return student, teacher, mask


def _per_sequence(name: str, values: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean and population std over rows with a valid token of the rows' sums."""
    sums = torch.where(mask, values, 0.0).sum(dim=1)[mask.any(dim=1)]
    if sums.numel() == 0:
        return {f"{name}/mean": 0.0, f"{name}/std": 0.0}
    return {f"{name}/mean": float(sums.mean()), f"{name}/std": float(sums.std(unbiased=False))}


@ADVANTAGE_FN.register_module("on_policy_distill")
class OnPolicyDistillAdvantage:
    """A = kl_coef·(log p_teacher − log π_old): reverse KL, arXiv 2306.13649."""

    needs = NEEDS

    def __init__(self, kl_coef: float = 1.0) -> None:
        self.kl_coef = kl_coef

    def __call__(self, batch: Batch) -> Result:
        require(batch, self.needs, "on_policy_distill")
        student, teacher, mask = _log_probs(batch)
        batch = set_token_advantages(batch, self.kl_coef * (teacher - student))
        metrics = _per_sequence("kl", student - teacher, mask)
        return batch, metrics | {"advantages/mean": masked_mean(batch["advantages"], mask)}


@ADVANTAGE_FN.register_module("jsd")
class JSDAdvantage:
    """A = −kl_coef·(1−β)·log(q/m), m = βp + (1−β)q, p the teacher, q = π_old, β ``lambda_coef``.

    The generalised Jensen-Shannon divergence (arXiv 2306.13649), which vanishes toward either
    end; at the ends stand its limits per β and per 1−β: β = 0 is the forward KL, whose weight
    p/q − 1 is capped at ``ratio_cap`` − 1, and β = 1 the reverse KL, as ``on_policy_distill``.
    The metric ``jsd`` is the divergence's own estimate from the sampled
    tokens, which is never negative and 0 only where p = q.

    ``temperature`` must be 1: the log-prob of one token cannot be taken to another
    temperature; sample and score at the one that is wanted.
    """

    needs = NEEDS

    def __init__(
        self,
        lambda_coef: float = 0.5,
        kl_coef: float = 1.0,
        temperature: float = 1.0,
        ratio_cap: float = 10.0,
    ) -> None:
        if not 0 <= lambda_coef <= 1:
            raise ValueError(f"lambda_coef must be in [0, 1] (got {lambda_coef})")
        if temperature != 1.0:
            raise ValueError(
                f"temperature must be 1 (got {temperature}): a sampled token's log-prob says "
                "nothing about other temperatures; set model.temperature"
            )
        if ratio_cap < 1:
            raise ValueError(f"ratio_cap must be >= 1 (got {ratio_cap}); it bounds p/q")
        self.beta, self.kl_coef, self.ratio_cap = lambda_coef, kl_coef, ratio_cap

    def __call__(self, batch: Batch) -> Result:
        require(batch, self.needs, "jsd")
        student, teacher, mask = _log_probs(batch)
        batch = set_token_advantages(batch, -self.kl_coef * self.derivative(student, teacher))
        metrics = _per_sequence("jsd", self.estimate(student, teacher), mask)
        return batch, metrics | {"advantages/mean": masked_mean(batch["advantages"], mask)}

    def derivative(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Of the divergence by the student's probability of the token, up to a constant."""
        if self.beta == 1.0:
            return student - teacher
        log_x = (teacher - student).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if self.beta == 0.0:
            return 1.0 - log_x.exp().clamp(max=self.ratio_cap)
        return -(1.0 - self.beta) * self._log_mixture(log_x)

    def estimate(self, student: Tensor, teacher: Tensor) -> Tensor:
        """f(p/q), whose mean under the student is the divergence; f >= 0, f(1) = 0."""
        log_x = (teacher - student).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        x = log_x.exp()
        if self.beta == 1.0:
            return x - 1.0 - log_x
        if self.beta == 0.0:
            return x * log_x - x + 1.0
        log_m = self._log_mixture(log_x)
        return self.beta * x * (log_x - log_m) - (1.0 - self.beta) * log_m

    def _log_mixture(self, log_x: Tensor) -> Tensor:
        """log(m/q) = log(βx + 1 − β)."""
        other = torch.full_like(log_x, math.log(1.0 - self.beta))
        return torch.logaddexp(log_x + math.log(self.beta), other)

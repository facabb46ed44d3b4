"""Rollouts and demonstrations in one batch: mix and mix_chord.

Invariant: either part is a mean over its own tokens of the global mini-batch, whatever the
micro-batch holds; a micro-batch, or a mini-batch, without one of them adds 0 for it.
"""

from __future__ import annotations

import math
from typing import Any, Optional

from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator, as_token_mask
from trinity_dask.algorithm.policy_losses.base import (
    POLICY_LOSS_FN,
    LossResult,
    PolicyLoss,
)
from trinity_dask.algorithm.policy_losses.ppo import PPOLoss
from trinity_dask.algorithm.policy_losses.sft import SFTLoss, SFTPhiLoss


class MixedLoss(PolicyLoss):
    """Base: (1−μ)·PPO of the policy's own rows + μ·likelihood of the demonstrations."""

    def __init__(self, ppo: PPOLoss, sft: SFTLoss, loss_agg_mode: Optional[str]) -> None:
        super().__init__(loss_agg_mode)
        self.ppo, self.sft = ppo, sft

    def mixed(
        self,
        mu: float,
        expert_mask: Tensor,
        action_mask: Tensor,
        denominator: Optional[Denominator],
        loss_agg_mode: Optional[str],
        **inputs: Any,
    ) -> LossResult:
        """Loss with weight ``mu`` on the demonstrations; metrics ``usual/*``, ``expert/*``."""
        if denominator is None:
            denominator = Denominator.count(action_mask, expert_mask)
        expert = as_token_mask(expert_mask, action_mask)
        common = {**inputs, "loss_agg_mode": self.mode(loss_agg_mode)}
        usual_loss, usual = self.ppo(
            action_mask=action_mask & ~expert, denominator=denominator.usual, **common
        )
        # the likelihood takes no weights: a demonstration was not sampled by any policy of ours
        expert_loss, demo = self.sft(
            action_mask=action_mask & expert, denominator=denominator.expert, **common
        )
        loss = (1.0 - mu) * usual_loss + mu * expert_loss
        metrics = {f"usual/{name}": (1.0 - mu) * value for name, value in usual.items()}
        metrics |= {f"expert/{name}": mu * value for name, value in demo.items()}
        return loss, metrics | {"loss": loss.detach()}


@POLICY_LOSS_FN.register_module("mix")
class MixLoss(MixedLoss):
    """(1−mu)·PPO(own rows) + mu·SFT(demonstrations), arXiv 2505.17826."""

    def __init__(
        self,
        mu: float = 0.1,
        clip_range: float = 0.2,
        clip_range_low: Optional[float] = None,
        clip_range_high: Optional[float] = None,
        loss_agg_mode: Optional[str] = None,
    ) -> None:
        super().__init__(
            PPOLoss(clip_range, clip_range_low, clip_range_high), SFTLoss(), loss_agg_mode
        )
        if not 0 <= mu <= 1:
            raise ValueError(f"mu must be in [0, 1] (got {mu}); 0.1 is usual")
        self.mu = mu

    def __call__(
        self,
        *,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        expert_mask: Tensor,
        denominator: Optional[Denominator] = None,
        weights: Optional[Tensor] = None,
        loss_agg_mode: Optional[str] = None,
        **_: Any,
    ) -> LossResult:
        return self.mixed(
            self.mu,
            expert_mask,
            action_mask,
            denominator,
            loss_agg_mode,
            logprob=logprob,
            old_logprob=old_logprob,
            advantages=advantages,
            weights=weights,
        )


def mu_schedule(step: int, warmup: int, decay: int, peak: float, valley: float) -> float:
    """Weight of the demonstrations at a step counted from 0.

    Linear 0 → peak over ``warmup`` steps, then cosine peak → valley over ``decay`` steps,
    then valley.
    """
    if step < warmup:
        return peak * step / warmup
    done = step - warmup
    if done >= decay:
        return valley
    return valley + (peak - valley) * (1.0 + math.cos(math.pi * done / decay)) / 2.0


@POLICY_LOSS_FN.register_module("mix_chord")
class MixChordLoss(MixedLoss):
    """(1−μ)·PPO(own rows) + μ·SFT_φ(demonstrations), μ = μ(step): CHORD, arXiv 2508.11408.

    μ rises linearly from 0 at step 0 to ``mu_peak`` and falls to ``mu_valley`` as a cosine;
    step is the train step. ``enable_phi_function`` weighs each demonstrated token by
    p(1−p) (``sft_phi``).
    """

    def __init__(
        self,
        mu_warmup_steps: int = 0,
        mu_decay_steps: int = 0,
        mu_peak: float = 0.1,
        mu_valley: float = 0.1,
        enable_phi_function: bool = True,
        clip_range: float = 0.2,
        clip_range_low: Optional[float] = None,
        clip_range_high: Optional[float] = None,
        loss_agg_mode: Optional[str] = None,
    ) -> None:
        ppo = PPOLoss(clip_range, clip_range_low, clip_range_high)
        super().__init__(ppo, SFTPhiLoss() if enable_phi_function else SFTLoss(), loss_agg_mode)
        if mu_warmup_steps < 0 or mu_decay_steps < 0:
            raise ValueError(
                f"mu_warmup_steps and mu_decay_steps must be >= 0 (got {mu_warmup_steps} and "
                f"{mu_decay_steps})"
            )
        if not (0 <= mu_peak <= 1 and 0 <= mu_valley <= 1):
            raise ValueError(
                f"mu_peak and mu_valley must be in [0, 1] (got {mu_peak} and {mu_valley})"
            )
        self.schedule = (mu_warmup_steps, mu_decay_steps, mu_peak, mu_valley)

    def __call__(
        self,
        *,
        logprob: Tensor,
        old_logprob: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        expert_mask: Tensor,
        step: int,
        denominator: Optional[Denominator] = None,
        weights: Optional[Tensor] = None,
        loss_agg_mode: Optional[str] = None,
        **_: Any,
    ) -> LossResult:
        if denominator is None:
            denominator = Denominator.count(action_mask, expert_mask)
        mu = mu_schedule(int(step), *self.schedule)
        loss, metrics = self.mixed(
            mu,
            expert_mask,
            action_mask,
            denominator,
            loss_agg_mode,
            logprob=logprob,
            old_logprob=old_logprob,
            advantages=advantages,
            weights=weights,
        )
        # as an addend: each part brings its share of the mini-batch's tokens
        share = action_mask.sum() / max(denominator.tokens, 1.0)
        return loss, metrics | {"mu": mu * share}

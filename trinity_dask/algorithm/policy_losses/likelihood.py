"""Likelihood losses of demonstrations, alone, beside rollouts (mix) and in pairs (dpo).

Invariant: either part of a mixed batch is a mean over its own tokens of the global mini-batch,
whatever the micro-batch holds; one without either part adds 0 for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Optional

from trinity_dask.algorithm.aggregate import as_token_mask
from trinity_dask.algorithm.policy_losses.base import (
    POLICY_LOSS_FN,
    LossInputs,
    LossResult,
    Metrics,
    PolicyLoss,
)
from trinity_dask.algorithm.policy_losses.ratio import PPOLoss
from trinity_dask.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@POLICY_LOSS_FN.register_module("sft")
class SFTLoss(PolicyLoss):
    """−log π of the demonstrated tokens: maximum likelihood."""

    metric = "sft_loss"

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        return -x.logprob, {}


@POLICY_LOSS_FN.register_module("sft_is")
class SFTISLoss(PolicyLoss):
    """−sg(p)·log p: tokens that the model finds unlikely pull less (arXiv 2508.05629)."""

    metric = "sft_is_loss"

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        return -x.logprob * x.logprob.detach().exp(), {}


@POLICY_LOSS_FN.register_module("sft_phi")
class SFTPhiLoss(PolicyLoss):
    """−min(log p, log cutoff)·sg(p(1−p)), CHORD's φ, arXiv 2508.11408.

    Tokens that the model already gives ``cutoff_prob`` or more have no gradient; both the
    certain and the hopeless ones weigh little.
    """

    metric = "sft_phi_loss"

    def __init__(self, cutoff_prob: float = 1.0, loss_agg_mode: Optional[str] = None) -> None:
        super().__init__(loss_agg_mode)
        if not 0.0 < cutoff_prob <= 1.0:
            raise ValueError(f"cutoff_prob must be in (0, 1] (got {cutoff_prob}); 1 cuts nothing")
        self.log_cutoff = math.log(cutoff_prob)

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        probability = x.logprob.detach().exp()
        return -x.logprob.clamp(max=self.log_cutoff) * (probability * (1.0 - probability)), {}


class MixedLoss(PolicyLoss):
    """Base: (1−μ)·PPO of the policy's own rows + μ·likelihood of the demonstrations."""

    reads: ClassVar[tuple[str, ...]] = ("old_logprob", "advantages", "expert_mask")

    def __init__(self, ppo: PPOLoss, sft: PolicyLoss, loss_agg_mode: Optional[str]) -> None:
        super().__init__(loss_agg_mode)
        self.ppo, self.sft = ppo, sft

    def weight(self, step: int) -> float:
        """μ at a train step."""
        raise TypeError(f"{type(self).__name__} defines no weight")

    def __call__(self, **inputs: Any) -> LossResult:
        """The loss; metrics of the parts are ``usual/*`` and ``expert/*``."""
        x, mu = LossInputs.of(inputs, self.agg_mode), self.weight(int(inputs.get("step", 0)))
        mask, expert = x.action_mask, as_token_mask(x.expert_mask, x.action_mask)
        common = {**inputs, "loss_agg_mode": x.loss_agg_mode}
        usual_loss, usual = self.ppo(
            **{**common, "action_mask": mask & ~expert, "denominator": x.denominator.usual}
        )
        expert_loss, demo = self.sft(
            **{**common, "action_mask": mask & expert, "denominator": x.denominator.expert}
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

    def weight(self, step: int) -> float:
        return self.mu


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

    reads = (*MixedLoss.reads, "step")

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

    def weight(self, step: int) -> float:
        return mu_schedule(step, *self.schedule)

    def __call__(self, **inputs: Any) -> LossResult:
        loss, metrics = super().__call__(**inputs)
        tokens, denominator = inputs["action_mask"].sum(), inputs.get("denominator")
        # as an addend: each part brings its share of the mini-batch's tokens
        share = tokens / max(float(tokens) if denominator is None else denominator.tokens, 1.0)
        return loss, metrics | {"mu": self.weight(int(inputs["step"])) * share}


@POLICY_LOSS_FN.register_module("dpo")
class DPOLoss(PolicyLoss):
    """−(1−s)·log σ(βz) − s·log σ(−βz), mean over pairs: arXiv 2305.18290.

    Rows 2i and 2i+1 are chosen and rejected; z is the difference of their log-ratios to the
    reference, each summed over its valid tokens. s = ``label_smoothing``. The loss of a pair
    has no per-token form, so ``loss_agg_mode`` does not apply.
    """

    reads = ("ref_logprob",)
    of_pairs = True

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if not beta > 0:
            raise ValueError(f"beta must be > 0 (got {beta}); 0.1 is usual")
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5) (got {label_smoothing})")
        self.beta, self.smoothing = beta, label_smoothing

    def __call__(self, **inputs: Any) -> LossResult:
        x = LossInputs.of(inputs, self.agg_mode)
        if len(x.logprob) % 2:
            raise ValueError(
                f"dpo got {len(x.logprob)} rows; chosen and rejected rows alternate, so their "
                "number is even: keep pairs together (rows_per_unit=2)"
            )
        log_ratio = (x.logprob - x.ref_logprob).sum(dim=1)
        chosen, rejected = self.beta * log_ratio[0::2], self.beta * log_ratio[1::2]
        margin = chosen - rejected
        losses = -(1 - self.smoothing) * torch.nn.functional.logsigmoid(margin)
        losses = losses - self.smoothing * torch.nn.functional.logsigmoid(-margin)
        valid = x.action_mask.any(dim=1)
        # a pair with an empty side counts for nothing
        both = valid[0::2] & valid[1::2]
        given = inputs.get("denominator")
        n_pairs = max(float(both.sum()) if given is None else given.n_pairs, 1.0)
        values = {
            "dpo_loss": losses,
            "chosen_reward": chosen.detach(),
            "rejected_reward": rejected.detach(),
            "accuracy_mean": (margin.detach() > 0).float(),
        }
        means = {name: torch.where(both, v, 0.0).sum() / n_pairs for name, v in values.items()}
        return means["dpo_loss"], {name: mean.detach() for name, mean in means.items()}

"""The loss of one micro-batch: policy term − entropy bonus + distance from the reference.

Invariant: the result is this micro-batch's addend to the loss of its mini-batch, and so is
each metric; nothing is normalised here that was not counted over the global mini-batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator, token_share
from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.trainer.batching import Batch, MicroBatch
from trinity_dask.trainer.logprobs import Scorer, Scores


@dataclass(frozen=True)
class Objective:
    """Scores rows with the policy and turns the scores into a loss."""

    spec: AlgorithmSpec
    scorer: Scorer

    def check(self, available: Collection[str]) -> None:
        """Raise ValueError when a tensor that the algorithm needs is not ``available``."""
        kind = self.spec.algorithm_type
        if self.spec.policy_loss.uses_advantages and "advantages" not in available:
            raise ValueError(
                f"{kind}: a row has no advantages; algorithm.advantage_fn (got "
                f"{self.spec.resolved['advantage_fn']!r}) gives them before rows are committed"
            )
        needs_sampler = self.spec.bypass_old_logprobs or self.spec.correction.active
        if self.spec.uses_old_logprobs and needs_sampler and "rollout_logprobs" not in available:
            raise ValueError(
                f"{kind}: a row has no log-probs of its sampler, which bypass_old_logprobs and "
                "rollout_correction need; turn both off to train on such rows"
            )

    def __call__(
        self, micro: MicroBatch, denominator: Denominator, first: bool
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Loss, metrics (scalars without gradient), and log-probs ``[b, R]`` detached.

        ``first``: no update has happened since the start of the step, so the policy's own
        log-probs are those of the start.
        """
        scores = self._score(micro)
        start = scores.logprob.detach() if first else micro.fields["start_logprobs"]
        old = self._old(micro.fields, start)
        loss, metrics = self._policy_term(micro.fields, scores.logprob, old, denominator)
        loss = loss + self._other_terms(micro.fields, scores, old, denominator, metrics)
        metrics["final_loss"] = loss.detach()
        return loss, metrics, scores.logprob.detach()

    def _old(self, fields: Batch, start: Tensor) -> Optional[Tensor]:
        """Log-probs that a ratio is taken against; None where the loss takes none."""
        if not self.spec.uses_old_logprobs:
            return None
        return fields["rollout_logprobs"] if self.spec.bypass_old_logprobs else start

    def _score(self, micro: MicroBatch) -> Scores:
        if self.spec.entropy_loss.active or not self.spec.entropy_loss.measured:
            return self.scorer(micro, entropy=self.spec.entropy_loss.active)
        return self.scorer(micro, entropy=True, entropy_gradient=False)

    def _policy_term(
        self, fields: Batch, logprob: Tensor, old: Optional[Tensor], denominator: Denominator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inputs: dict[str, Any] = {"logprob": logprob, "action_mask": fields["action_mask"]}
        if self.spec.policy_loss.uses_advantages:
            inputs["advantages"] = fields["advantages"]
        if old is not None:
            inputs["old_logprob"] = old
            if self.spec.correction.active:
                inputs["weights"] = self.spec.correction.weights(old, fields["rollout_logprobs"])
        return self.spec.policy_loss(
            **inputs, denominator=denominator, loss_agg_mode=self.spec.loss_agg_mode
        )

    def _other_terms(
        self,
        fields: Batch,
        scores: Scores,
        old: Optional[Tensor],
        denominator: Denominator,
        metrics: dict[str, Tensor],
    ) -> Tensor:
        total = torch.zeros((), device=scores.logprob.device)
        common: dict[str, Any] = {
            "action_mask": fields["action_mask"],
            "denominator": denominator,
            "loss_agg_mode": self.spec.loss_agg_mode,
        }
        if scores.entropy is not None:
            mask = fields["action_mask"]
            metrics["entropy"] = token_share(scores.entropy.detach(), mask, denominator)
        if self.spec.entropy_loss.active and scores.entropy is not None:
            bonus, extra = self.spec.entropy_loss(entropy=scores.entropy, **common)
            total = total - bonus
            metrics |= extra
        if self.spec.kl_loss.active:
            penalty, extra = self.spec.kl_loss(
                logprob=scores.logprob,
                ref_logprob=fields["ref_logprobs"],
                old_logprob=old,
                **common,
            )
            total = total + penalty
            metrics |= extra
        return total

"""The loss of one micro-batch: policy term − entropy bonus + distance from the reference.

Invariant: the result is this micro-batch's addend to the loss of its mini-batch, and so is
each metric; nothing is normalised here that was not counted over the global mini-batch. A
term gets the tensors that it declares, under the names of ``trinity_dask.algorithm``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator, token_share
from trinity_dask.algorithm.calling import pick
from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.trainer.model.logprobs import Scorer, Scores
from trinity_dask.trainer.step.batching import Batch, MicroBatch

# name in a loss's signature -> tensor of the micro-batch
FIELDS = {
    "advantages": "advantages",
    "ref_logprob": "ref_logprobs",
    "rollout_logprob": "rollout_logprobs",
    "teacher_logprob": "teacher_logprobs",
    "expert_mask": "expert_mask",
}


@dataclass(frozen=True)
class Outcome:
    """Of one micro-batch: the loss, metrics without gradient, and log-probs ``[b, R]``
    detached: the policy's and those it is compared with (None where nothing is)."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logprob: Tensor
    old: Optional[Tensor]


@dataclass(frozen=True)
class Objective:
    """Scores rows with the policy and turns the scores into a loss.

    ``teacher_logits``: what the teacher says of a micro-batch, float32 ``[b, R, V]`` without
    gradient, at the temperature of ``scorer``; only asked where the loss declares it.
    """

    spec: AlgorithmSpec
    scorer: Scorer
    teacher_logits: Optional[Callable[[MicroBatch], Tensor]] = None

    def check(self, available: Collection[str]) -> None:
        """Raise ValueError when a tensor that the algorithm needs is not ``available``."""
        spec, kind = self.spec, self.spec.algorithm_type
        needs = spec.needs - ({"advantages"} if spec.advantage_in_trainer else set())
        if "advantages" in needs and "advantages" not in available:
            raise ValueError(
                f"{kind}: a row has no advantages; algorithm.advantage_fn (got "
                f"{spec.resolved['advantage_fn']!r}) gives them before rows are committed"
            )
        compares = spec.bypass_old_logprobs or spec.correction.active
        compares = compares and spec.uses_old_logprobs
        if (compares or "rollout_logprob" in needs) and "rollout_logprobs" not in available:
            raise ValueError(
                f"{kind}: a row has no log-probs of its sampler, which bypass_old_logprobs and "
                "rollout_correction need; turn both off to train on such rows"
            )

    def __call__(
        self, micro: MicroBatch, denominator: Denominator, first: bool, step: int = 1
    ) -> Outcome:
        """The outcome of the rows in train step ``step``.

        ``first``: no update has happened since the start of the step, so the policy's own
        log-probs are those of the start.
        """
        scores = self._score(micro)
        old = self._old(micro.fields, scores.logprob, first)
        inputs = self._inputs(micro.fields, scores, old, denominator, step)
        if self.spec.uses_teacher_logits and self.teacher_logits is not None:
            inputs["teacher_logits"] = self.teacher_logits(micro)
        loss, metrics = self._policy_term(inputs, micro.fields)
        loss = loss + self._other_terms(inputs, scores, metrics)
        metrics["final_loss"] = loss.detach()
        return Outcome(loss, metrics, scores.logprob.detach(), old)

    def _old(self, fields: Batch, logprob: Tensor, first: bool) -> Optional[Tensor]:
        """Log-probs that a ratio is taken against; None where the loss takes none."""
        if not self.spec.uses_old_logprobs:
            return None
        if self.spec.bypass_old_logprobs:
            return fields["rollout_logprobs"]
        return logprob.detach() if first else fields["start_logprobs"]

    def _score(self, micro: MicroBatch) -> Scores:
        bonus = self.spec.entropy_loss
        needs = self.spec.policy_loss.needs
        logits = "logits" in needs
        with_gradient = bonus.active or "entropy" in needs
        if with_gradient or not bonus.measured:
            return self.scorer(micro, entropy=with_gradient, keep_logits=logits)
        return self.scorer(micro, entropy=True, entropy_gradient=False, keep_logits=logits)

    def _inputs(
        self,
        fields: Batch,
        scores: Scores,
        old: Optional[Tensor],
        denominator: Denominator,
        step: int,
    ) -> dict[str, Any]:
        """All that a term may declare."""
        inputs: dict[str, Any] = {
            "logprob": scores.logprob,
            "action_mask": fields["action_mask"],
            "denominator": denominator,
            "loss_agg_mode": self.spec.loss_agg_mode,
            "step": step,
        }
        inputs |= {name: fields[field] for name, field in FIELDS.items() if field in fields}
        optional = {"old_logprob": old, "entropy": scores.entropy, "logits": scores.logits}
        return inputs | {name: value for name, value in optional.items() if value is not None}

    def _policy_term(
        self, inputs: dict[str, Any], fields: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        correction = self.spec.correction
        if correction.active and "old_logprob" in inputs:
            now = inputs["logprob"].detach()
            weights = correction.weights(
                now if self.spec.bypass_old_logprobs else inputs["old_logprob"],
                fields["rollout_logprobs"],
                fields["action_mask"],
                fields.get("advantages"),
                now,
            )
            inputs = inputs | {"weights": weights}
        return self.spec.policy_loss(**inputs)  # type: ignore[operator]

    def _other_terms(
        self, inputs: dict[str, Any], scores: Scores, metrics: dict[str, Tensor]
    ) -> Tensor:
        total = torch.zeros((), device=scores.logprob.device)
        if scores.entropy is not None:
            mask, denominator = inputs["action_mask"], inputs["denominator"]
            metrics["entropy"] = token_share(scores.entropy.detach(), mask, denominator)
        if self.spec.entropy_loss.active:
            bonus, extra = self.spec.entropy_loss(**pick(self.spec.entropy_loss, inputs))
            total = total - bonus
            metrics |= extra
        if self.spec.kl_loss.active:
            penalty, extra = self.spec.kl_loss(**pick(self.spec.kl_loss, inputs))
            total = total + penalty
            metrics |= extra
        return total

"""One rank's train step: score the rows, estimate advantages, train the critic, the policy.

Invariant: the gradient of a mini-batch is the same for any number of micro-batches and
ranks, up to the order of floating-point sums: a micro-batch's loss is its addend to the loss
of its mini-batch, and so is each metric; nothing is normalised that was not counted over the
global mini-batch. "Old" log-probs, reference, teacher and values are those of the weights at
the start of the step, for every mini-batch and epoch of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator, token_share
from trinity_dask.algorithm.calling import pick
from trinity_dask.algorithm.entropy import token_necs
from trinity_dask.algorithm.kl import KLTerm
from trinity_dask.algorithm.rollout_correction import correction_metrics, ratio_metrics
from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.config.schema import Config, OptimizerConfig
from trinity_dask.trainer.model.frozen import FrozenModel
from trinity_dask.trainer.model.policy_model import autocast_dtype
from trinity_dask.trainer.model.trainable import TrainableModel
from trinity_dask.trainer.ranks.gradients import GradientGroup, add_into
from trinity_dask.trainer.ranks.parallel import CRITIC, POLICY, offload_of
from trinity_dask.trainer.step.batching import (
    Batch,
    Cut,
    MicroBatch,
    Planner,
    StepRows,
    UpdatePlan,
    sequence_batch,
)
from trinity_dask.trainer.step.critic import Critic
from trinity_dask.trainer.step.step_advantages import drop_unscored, estimate
from trinity_dask.trainer.step.variance import ENERGY, probability_energy, step_variance

UNLIKELY = -1e4  # a logit whose probability is 0, and whose logarithm is finite
VOCABULARY = frozenset(("entropys", "necs"))  # what needs all logits of a token
# name in a loss's signature -> tensor of the micro-batch
FIELDS = {
    "advantages": "advantages",
    "ref_logprob": "ref_logprobs",
    "rollout_logprob": "rollout_logprobs",
    "teacher_logprob": "teacher_logprobs",
    "expert_mask": "expert_mask",
}


@dataclass(frozen=True)
class MicroLoss:
    """Of one micro-batch: the loss, metrics without gradient, and log-probs ``[b, R]``
    detached: the policy's and those it is compared with (None where nothing is); the policy's
    entropy, where it was measured."""

    loss: Tensor
    metrics: dict[str, Tensor]
    logprob: Tensor
    old: Optional[Tensor]
    entropy: Optional[Tensor] = None


class StepEngine:
    """The models of one rank and what a train step does with them.

    Args:
        cfg: numbers come from ``trainer``, ``critic``, ``model`` and ``algorithm.optimizer``;
            ``model.max_response_tokens`` is the length L of Dr.GRPO's divisor.
        spec: the algorithm.
        model: the policy, a Hugging Face causal language model, float32, on its device.
        group: the ranks that share gradients (None: just this one).
        reference: the frozen reference policy, when the algorithm uses one.
        teacher: the frozen teacher; None when the rows bring its log-probs.
        critic: the value model (see ``value_model``), when the algorithm uses one.
    """

    def __init__(
        self,
        cfg: Config,
        spec: AlgorithmSpec,
        model: Any,
        group: Optional[GradientGroup] = None,
        reference: Optional[FrozenModel] = None,
        teacher: Optional[FrozenModel] = None,
        critic: Any = None,
    ) -> None:
        self.cfg, self.spec = cfg, spec
        trainer, self.logits_bytes = cfg.trainer, cfg.trainer.logits_mb << 20

        def trainable(
            module: Any, optimizer: OptimizerConfig, grad_clip: float, role: str
        ) -> TrainableModel:
            return TrainableModel(
                module,
                optimizer,
                total_steps=trainer.total_steps or cfg.buffer.total_steps,
                group=group,
                grad_clip=grad_clip,
                autocast=autocast_dtype(cfg.model.dtype),
                offload=offload_of(cfg, role),
                logits_bytes=self.logits_bytes,
            )

        self.policy = trainable(model, cfg.algorithm.optimizer, trainer.grad_clip, POLICY)
        self.group, self.device = self.policy.group, self.policy.device
        self.reference, self.teacher = reference, teacher
        self.critic: Optional[Critic] = None
        if critic is not None:
            of_critic = trainable(critic, cfg.critic.optimizer, cfg.critic.grad_clip, CRITIC)
            self.critic = Critic(of_critic, cfg.critic)
        models = (*self.trainables.values(), reference, teacher)
        self.lockstep = any(each is not None and each.lockstep for each in models)
        # in lockstep all ranks would have to agree on it in every pass
        self.share_prompts = trainer.share_prompts and not self.lockstep
        self.planner = Planner(
            policy=Cut(trainer.ppo_epochs, trainer.mini_batches, trainer.min_mini_batch_rows),
            critic=None if critic is None else Cut(cfg.critic.epochs, cfg.critic.mini_batches),
            seed=cfg.seed,
            unit=spec.rows_per_unit,
            by_groups=self.share_prompts,
        )
        # what is read from all logits of a token at the start of the step
        proxies = trainer.variance_proxies and "advantages" in spec.needs
        self._of_vocabulary = (spec.advantage_needs & VOCABULARY) | ({ENERGY} if proxies else set())
        # rows that no sampler drew (sft, cpt, dpo) have their likelihood at temperature 1
        self.temperature = cfg.model.temperature if spec.schema == "experience" else 1.0
        self.scorer = self.policy.scorer(self.temperature)
        terms: dict[str, Optional[KLTerm]] = {
            "kl_loss": spec.kl_loss,
            "kl_penalty": spec.kl_penalty,
        }
        self._adaptive = {n: t for n, t in terms.items() if t is not None and t.adaptive}

    @property
    def trainables(self) -> dict[str, TrainableModel]:
        """Everything that a checkpoint holds, by the name of its directory."""
        models = {"actor": self.policy}
        return models if self.critic is None else models | {"critic": self.critic.model}

    def check(self, available: Collection[str]) -> None:
        """Raise ValueError when the rows lack a tensor that the algorithm needs."""
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
        if self.teacher is None and spec.uses_teacher_logits:
            raise ValueError(
                f"{kind}: the policy loss compares with a teacher's whole distribution; set "
                "model.teacher_model_path"
            )
        brought = "teacher_logprobs" in available
        if self.teacher is None and spec.uses_teacher_logprobs and not brought:
            raise ValueError(
                f"{kind}: a row has no teacher_logprobs; set model.teacher_model_path, or let the "
                "workflow ask a teacher for them"
            )

    def train_step(
        self,
        batch: Batch,
        step: int,
        plan: Optional[UpdatePlan] = None,
        whole: Optional[Batch] = None,
        look: Optional[Callable[[StepRows], None]] = None,
    ) -> dict[str, float]:
        """All updates of train step ``step`` (1 is the first).

        Args:
            batch: what ``collate`` makes of this rank's rows, in the order of
                ``plan.rows``; with no plan, all rows of the step on a single rank.
            whole: the collation of the rows of all ranks, for algorithms whose advantages
                are computed here; None on a single rank.
            look: called at the end with the rows and everything the step knew of them.

        Returns:
            Metrics ``actor/*``, ``critic/*``, ``advantage/*`` (global; means over the
            updates), ``correction/*``, ``update/*`` (of this rank's rows), ``time/*``.

        Raises:
            ValueError: a tensor that the algorithm needs is missing.
            FloatingPointError: a gradient is not finite; no weight was changed by it.
        """
        self.check(batch)
        cfg, spec = self.cfg, self.spec
        rows = StepRows(
            batch,
            plan or self.planner.plan(batch["lengths"].numpy(), step),
            max_tokens=cfg.trainer.micro_batch_tokens,
            unit=spec.rows_per_unit,
            device=self.device,
            group=self.group,
            lockstep=self.lockstep,
            share_prompts=self.share_prompts,
        )
        whole = batch if whole is None else whole
        metrics = drop_unscored(spec, rows, whole)
        denominators = rows.counted(rows.plan.updates, cfg.model.max_response_tokens)
        with self.policy.on_device():
            self._score(rows, metrics)
            if spec.advantage_in_trainer:
                metrics |= estimate(spec, whole, rows)
        if self.critic is not None:
            with timed(metrics, "update_critic"), self.critic.model.on_device():
                metrics |= self.critic.update(rows, step)
        if self.critic is None or step > cfg.critic.warmup_steps:
            with timed(metrics, "update_actor"), self.policy.on_device():
                metrics |= self._train_policy(rows, denominators, step)
        if ENERGY in self._of_vocabulary and "actor/grad_norm" in metrics:
            metrics |= step_variance(spec, rows, metrics["actor/grad_norm"])
        known = rows.known.get("start_logprobs")
        if known is not None and "rollout_logprobs" in rows.batch and spec.uses_old_logprobs:
            # how far the sampler was from the policy at the start of the step
            metrics |= correction_metrics(
                spec.correction,
                rows.batch["start_logprobs"],
                rows.batch["rollout_logprobs"],
                own_tokens(rows.batch) & known[:, None].to(self.device),
                rows.batch.get("advantages"),
            )
        if look is not None:
            with timed(metrics, "record"):
                look(rows)
        return metrics

    # before the first update ------------------------------------------------------------
    def _score(self, rows: StepRows, metrics: dict[str, float]) -> None:
        """What all models say about the rows, before any weight changes."""
        wanted = self._rows_to_score(rows)
        if wanted is not None:
            with timed(metrics, "old_log_prob"):
                rows.score(wanted, self._start_scores)
        if self.reference is not None:
            with timed(metrics, "ref_log_prob"):
                self._score_frozen(rows, self.reference, "ref_logprobs")
        missing = self.spec.uses_teacher_logprobs and "teacher_logprobs" not in rows.batch
        if self.teacher is not None and missing:
            with timed(metrics, "teacher_log_prob"):
                self._score_frozen(rows, self.teacher, "teacher_logprobs")
        if self.critic is not None:
            with timed(metrics, "values"), self.critic.model.on_device():
                rows.score(rows.every, self.critic.score)

    def _score_frozen(self, rows: StepRows, model: FrozenModel, name: str) -> None:
        scorer = model.scorer(self.temperature, self.logits_bytes)
        with model.on_device():
            rows.score(rows.every, lambda micro: {name: scorer(micro).logprob})

    def _rows_to_score(self, rows: StepRows) -> Optional[np.ndarray]:
        """Rows whose log-probs are needed before an update has passed over them.

        None when no rank has any: whether a rank scores must not depend on its own rows,
        because its peers may need it in their forward passes.
        """
        spec = self.spec
        reads_old = "old_logprobs" in spec.advantage_needs or spec.kl_penalty is not None
        if self._of_vocabulary or (reads_old and not spec.bypass_old_logprobs):
            return rows.every
        several = len(rows.plan.updates) > 1
        if not several or not spec.uses_old_logprobs or spec.bypass_old_logprobs:
            return None  # old log-probs are those of the first update's own forward pass
        return np.setdiff1d(rows.every, rows.plan.updates[0])

    def _start_scores(self, micro: MicroBatch) -> dict[str, Tensor]:
        wanted = self._of_vocabulary
        if not wanted:
            return {"start_logprobs": self.scorer(micro).logprob}
        scores = self.scorer(micro, entropy=True)
        assert scores.entropy is not None
        found = {"start_logprobs": scores.logprob, "entropys": scores.entropy}
        if "necs" in wanted:
            found["necs"] = token_necs(self.scorer.response_logits(micro))
        if ENERGY in wanted:
            found[ENERGY] = probability_energy(self.scorer.response_logits(micro))
        return found

    # the policy's updates ---------------------------------------------------------------
    def _train_policy(
        self, rows: StepRows, denominators: list[Denominator], step: int
    ) -> dict[str, float]:
        lr = self.policy.set_step(step)
        totals: dict[str, float] = {}
        log_ratios: list[Tensor] = []
        updates = 0
        for index, denominator in enumerate(denominators):
            if denominator.tokens <= 0:
                continue  # a step without a valid token would move the weights by their momentum
            self.policy.begin_update()
            sums: dict[str, Tensor] = {}
            for micro in rows.passes(rows.plan.updates[index]):
                part = self.loss(micro, denominator, index == 0, step)
                part.loss.backward()
                if index == 0:
                    rows.put("start_logprobs", micro, part.logprob)
                    if part.entropy is not None:
                        rows.put("entropy", micro, part.entropy)
                if part.old is not None:
                    log_ratios.append((part.logprob - part.old)[own_tokens(micro.fields)])
                add_into(sums, part.metrics)
            add_into(totals, self.group.sum_values(sums))
            add_into(totals, {"grad_norm": self.policy.finish_update(step)})
            updates += 1
        metrics = {f"actor/{name}": value / updates for name, value in totals.items()}
        if "actor/kl_loss" in metrics:
            # move an adaptive KL coefficient by the step's KL, the same on every rank; every
            # epoch passes over the same rows, and the step has them once
            metrics["actor/kl_coef"] = self.spec.kl_loss.coef
            n_rows = sum(d.rows for d in denominators) / self.cfg.trainer.ppo_epochs
            self.spec.kl_loss.update(metrics["actor/kl_loss"], n_rows)
        metrics |= {"actor/lr": lr, "actor/updates": float(updates)}
        # raw ratios of the policy to its "old" log-probs, before any clipping
        found = torch.cat(log_ratios)[None] if log_ratios else torch.empty(1, 0)
        mask = torch.ones_like(found, dtype=torch.bool)
        return metrics | ratio_metrics(found, torch.zeros_like(found), mask, "update")

    def loss(
        self, micro: MicroBatch, denominator: Denominator, first: bool, step: int = 1
    ) -> MicroLoss:
        """Policy term − entropy bonus + distance from the reference, of one micro-batch.

        A term gets the tensors that it declares, under the names of ``trinity_dask.algorithm``.
        ``first``: no update has happened since the start of the step, so the policy's own
        log-probs are those of the start.
        """
        spec, fields, bonus = self.spec, micro.fields, self.spec.entropy_loss
        with_gradient = bonus.active or "entropy" in spec.policy_loss.needs
        scores = self.scorer(
            micro,
            entropy=with_gradient or bonus.measured,
            entropy_gradient=with_gradient,
            keep_logits="logits" in spec.policy_loss.needs,
        )
        logprob, old = scores.logprob.detach(), None
        if spec.uses_old_logprobs and spec.bypass_old_logprobs:
            old = fields["rollout_logprobs"]
        elif spec.uses_old_logprobs:
            old = logprob if first else fields["start_logprobs"]
        inputs: dict[str, Any] = {
            "logprob": scores.logprob,
            "action_mask": fields["action_mask"],
            "denominator": denominator,
            "loss_agg_mode": spec.loss_agg_mode,
            "step": step,
        }
        inputs |= {name: fields[field] for name, field in FIELDS.items() if field in fields}
        optional = {"old_logprob": old, "entropy": scores.entropy, "logits": scores.logits}
        inputs |= {name: value for name, value in optional.items() if value is not None}
        if spec.uses_teacher_logits and self.teacher is not None:
            with torch.no_grad(), self.teacher.on_device():
                teacher = self.teacher.scorer(self.temperature)
                logits = teacher.response_logits(micro)
                # as wide as the policy's: what lies beyond the tokens is padding
                n_words = self.policy.module.config.get_text_config().vocab_size
                wider = n_words - logits.shape[-1]
                inputs["teacher_logits"] = F.pad(logits, (0, wider), value=UNLIKELY)
        weights: dict[str, Tensor] = {}
        if spec.correction.active and old is not None:
            weights["weights"] = spec.correction.weights(
                logprob if spec.bypass_old_logprobs else old,
                fields["rollout_logprobs"],
                fields["action_mask"],
                fields.get("advantages"),
                logprob,
            )
        loss, metrics = spec.policy_loss(**inputs, **weights)
        other, entropy = torch.zeros((), device=logprob.device), None
        if scores.entropy is not None:
            entropy = scores.entropy.detach()
            metrics["entropy"] = token_share(entropy, fields["action_mask"], denominator)
        for term, sign in ((spec.entropy_loss, -1), (spec.kl_loss, 1)):
            if term.active:
                value, extra = term(**pick(term, inputs))
                other = other + sign * value
                metrics |= extra
        loss = loss + other
        metrics["final_loss"] = loss.detach()
        return MicroLoss(loss, metrics, logprob, old, entropy)

    # other uses -------------------------------------------------------------------------
    @torch.no_grad()
    def sequence_logprobs(
        self, sequences: list[list[int]], temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Log-prob of every token after the first, of each: float32 ``[tokens - 1]``."""
        with self.policy.on_device():
            scores = self.policy.scorer(temperature)(sequence_batch(sequences, self.device))
        found = scores.logprob.cpu().numpy()
        return [row[: len(ids) - 1] for row, ids in zip(found, sequences, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """What the algorithm itself remembers: adaptive coefficients. JSON-able, often empty."""
        return {name: term.state_dict() for name, term in self._adaptive.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over :meth:`state_dict`; a fixed coefficient stays what the config says."""
        for name, term in self._adaptive.items():
            if name in state:
                term.load_state_dict(state[name])


def own_tokens(fields: Batch) -> Tensor:
    """bool ``[B, R]``: tokens that the policy sampled; a demonstration's had no sampler."""
    mask = fields["action_mask"]
    return mask & ~fields["expert_mask"] if "expert_mask" in fields else mask


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds inside as ``time/<name>``."""
    start = time.perf_counter()
    try:
        yield
    finally:
        metrics[f"time/{name}"] = time.perf_counter() - start

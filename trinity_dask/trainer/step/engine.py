"""One rank's train step: score the rows, estimate advantages, train the critic, the policy.

Invariant: the gradient of a mini-batch is the same for any number of micro-batches and
ranks, up to the order of floating-point sums; "old" log-probs, reference, teacher and values
are those of the weights at the start of the step, for every mini-batch and epoch of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator
from trinity_dask.algorithm.entropy import token_necs
from trinity_dask.algorithm.kl import KLTerm
from trinity_dask.algorithm.rollout_correction import correction_metrics
from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.config.schema import OptimizerConfig
from trinity_dask.trainer.model.frozen import BaseUnderAdapter, FrozenModel
from trinity_dask.trainer.model.trainable import TrainableModel
from trinity_dask.trainer.ranks.gradients import GradientGroup
from trinity_dask.trainer.step.batching import (
    Batch,
    Cut,
    MicroBatch,
    UpdatePlan,
    check_pairs,
    plan_updates,
    sequence_batch,
)
from trinity_dask.trainer.step.critic import Critic
from trinity_dask.trainer.step.objective import Objective
from trinity_dask.trainer.step.scored import drop_unscored
from trinity_dask.trainer.step.settings import EngineSettings
from trinity_dask.trainer.step.step_advantages import describe_estimate, estimate
from trinity_dask.trainer.step.step_rows import StepRows
from trinity_dask.trainer.step.updates import add_into, counted, ratios, sum_over_ranks, timed
from trinity_dask.trainer.step.variance import ENERGY, probability_energy, step_variance

VOCABULARY = frozenset(("entropys", "necs"))  # what needs all logits of a token
Frozen = FrozenModel | BaseUnderAdapter


class TrainEngine:
    """The models of one rank and what a train step does with them.

    Args:
        model: the policy, a Hugging Face causal language model, float32, on its device.
        spec: the algorithm.
        group: the ranks that share gradients (None: just this one).
        reference: the frozen reference policy, when the algorithm uses one.
        teacher: the frozen teacher; None when the rows bring its log-probs.
        critic: the value model (see ``value_model``), when the algorithm uses one.
    """

    def __init__(
        self,
        model: Any,
        spec: AlgorithmSpec,
        settings: EngineSettings,
        group: Optional[GradientGroup] = None,
        reference: Optional[Frozen] = None,
        teacher: Optional[Frozen] = None,
        critic: Any = None,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.policy = self._trainable(
            model, settings.optimizer, settings.grad_clip, group, settings.offload
        )
        self.group = self.policy.group
        self.device = self.policy.device
        self.reference = reference
        self.teacher = teacher
        self.critic: Optional[Critic] = None
        if critic is not None:
            cfg, offload = settings.critic, settings.critic_offload
            of_critic = self._trainable(critic, cfg.optimizer, cfg.grad_clip, group, offload)
            self.critic = Critic(of_critic, cfg)
        # rows that no sampler drew (sft, cpt, dpo) have their likelihood at temperature 1
        self.temperature = settings.temperature if spec.schema == "experience" else 1.0
        self.scorer = self.policy.scorer(self.temperature)
        self.objective = Objective(spec, self.scorer, self._teacher_logits)

    def _trainable(
        self,
        module: Any,
        optimizer: OptimizerConfig,
        clip: float,
        group: Optional[GradientGroup],
        offload: bool,
    ) -> TrainableModel:
        s = self.settings
        return TrainableModel(
            module, optimizer, s.total_steps, group, clip, s.autocast, offload, s.logits_bytes
        )

    @property
    def model(self) -> Any:
        """The policy's module."""
        return self.policy.module

    @property
    def trainables(self) -> dict[str, TrainableModel]:
        """Everything that a checkpoint holds, by the name of its directory."""
        models = {"actor": self.policy}
        return models if self.critic is None else models | {"critic": self.critic.model}

    @property
    def _lockstep(self) -> bool:
        models = (*self.trainables.values(), self.reference, self.teacher)
        return any(model is not None and model.lockstep for model in models)

    @property
    def _shares_prompts(self) -> bool:
        # in lockstep all ranks would have to agree on it in every pass
        return self.settings.share_prompts and not self._lockstep

    def check(self, available: Collection[str]) -> None:
        """Raise ValueError when the rows lack a tensor that the algorithm needs."""
        self.objective.check(available)
        if self.teacher is not None:
            return
        kind, spec = self.spec.algorithm_type, self.spec
        if spec.uses_teacher_logits:
            raise ValueError(
                f"{kind}: the policy loss compares with a teacher's whole distribution; set "
                "model.teacher_model_path"
            )
        if spec.uses_teacher_logprobs and "teacher_logprobs" not in available:
            raise ValueError(
                f"{kind}: a row has no teacher_logprobs; set model.teacher_model_path, or let the "
                "workflow ask a teacher for them"
            )

    def plan(
        self,
        lengths: np.ndarray,
        step: int,
        rank: int = 0,
        world_size: int = 1,
        groups: Optional[np.ndarray] = None,
    ) -> UpdatePlan:
        """This rank's share of a step whose rows have ``lengths`` tokens and come from the
        tasks ``groups`` (int64 ``[B]`` each)."""
        s = self.settings
        of_critic = Cut(s.critic.epochs, s.critic.mini_batches)
        return plan_updates(
            lengths,
            seed=s.seed,
            step=step,
            epochs=s.ppo_epochs,
            mini_batches=s.mini_batches,
            min_mini_batch_rows=s.min_mini_batch_rows,
            rank=rank,
            world_size=world_size,
            unit=self.spec.rows_per_unit,
            critic=of_critic if self.critic is not None else None,
            groups=groups if self._shares_prompts else None,
        )

    def train_step(
        self,
        batch: Batch,
        step: int,
        plan: Optional[UpdatePlan] = None,
        whole: Optional[Batch] = None,
    ) -> dict[str, float]:
        """All updates of train step ``step`` (1 is the first).

        Args:
            batch: what ``experience.collate`` makes of this rank's rows, in the order of
                ``plan.rows``; with no plan, all rows of the step on a single rank.
            whole: the collation of the rows of all ranks, for algorithms whose advantages
                are computed here; None on a single rank.

        Returns:
            Metrics ``actor/*``, ``critic/*``, ``advantage/*`` (global; means over the
            updates), ``correction/*``, ``update/*`` (of this rank's rows), ``time/*``.

        Raises:
            ValueError: a tensor that the algorithm needs is missing.
            FloatingPointError: a gradient is not finite; no weight was changed by it.
        """
        self.check(batch)
        rows = self._rows(batch, plan or self.plan(batch["lengths"].numpy(), step))
        whole = batch if whole is None else whole
        metrics = drop_unscored(self.spec, rows, whole)
        denominators = counted(rows, rows.plan.updates, self.settings.response_tokens)
        with self.policy.on_device():
            self._score(rows, metrics)
            metrics |= self._advantages(rows, whole)
        if self.critic is not None:
            with timed(metrics, "update_critic"), self.critic.model.on_device():
                metrics |= self.critic.update(rows, step)
        if step > self._warmup_steps:
            with timed(metrics, "update_actor"), self.policy.on_device():
                metrics |= self._train_policy(rows, denominators, step)
        if ENERGY in self._of_vocabulary and "actor/grad_norm" in metrics:
            metrics |= step_variance(self.spec, rows, metrics["actor/grad_norm"])
        return metrics | self._correction(rows)

    @property
    def _warmup_steps(self) -> int:
        return 0 if self.critic is None else self.settings.critic.warmup_steps

    def _rows(self, batch: Batch, plan: UpdatePlan) -> StepRows:
        if self.spec.rows_per_unit == 2:
            check_pairs(batch)
        return StepRows(
            batch,
            plan,
            max_tokens=self.settings.micro_batch_tokens,
            unit=self.spec.rows_per_unit,
            device=self.device,
            group=self.group,
            lockstep=self._lockstep,
            share_prompts=self._shares_prompts,
        )

    # before the first update ------------------------------------------------------------
    def _score(self, rows: StepRows, metrics: dict[str, float]) -> None:
        """What all models say about the rows, before any weight changes."""
        self._score_policy(rows, metrics)
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

    def _score_policy(self, rows: StepRows, metrics: dict[str, float]) -> None:
        """Old log-probs, where they are not those of the first update's own forward pass."""
        wanted = self._rows_to_score(rows)
        if wanted is not None:
            with timed(metrics, "old_log_prob"):
                rows.score(wanted, self._start_scores)

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
            return None
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

    @property
    def _of_vocabulary(self) -> frozenset[str]:
        """What is read from all logits of a token at the start of the step."""
        wanted = self.spec.advantage_needs & VOCABULARY
        proxies = self.settings.variance_proxies and "advantages" in self.spec.needs
        return wanted | {ENERGY} if proxies else wanted

    def _score_frozen(self, rows: StepRows, model: Frozen, name: str) -> None:
        scorer = model.scorer(self.temperature, self.settings.logits_bytes)
        with model.on_device():
            rows.score(rows.every, lambda micro: {name: scorer(micro).logprob})

    @torch.no_grad()
    def _teacher_logits(self, micro: MicroBatch) -> Tensor:
        assert self.teacher is not None  # see check()
        with self.teacher.on_device():
            return self.teacher.scorer(self.temperature).response_logits(micro)

    def _advantages(self, rows: StepRows, whole: Batch) -> dict[str, float]:
        if not self.spec.advantage_in_trainer:
            return {}
        batch, metrics = estimate(self.spec, whole, rows, self.group)
        return metrics | describe_estimate(batch)

    # the policy's updates ---------------------------------------------------------------
    def _train_policy(
        self, rows: StepRows, denominators: list[Denominator], step: int
    ) -> dict[str, float]:
        lr = self.policy.set_step(step)
        totals: dict[str, float] = {}
        log_ratios: list[Tensor] = []
        updates = 0
        for index, denominator in enumerate(denominators):
            # without a valid token a step would still move the weights by their momentum
            if denominator.tokens > 0:
                add_into(totals, self._update(rows, index, denominator, step, log_ratios))
                updates += 1
        metrics = {f"actor/{name}": value / updates for name, value in totals.items()}
        self._adapt(metrics, denominators)
        return metrics | {
            "actor/lr": lr,
            "actor/updates": float(updates),
            **ratios(log_ratios),
        }

    def _update(
        self,
        rows: StepRows,
        index: int,
        denominator: Denominator,
        step: int,
        log_ratios: list[Tensor],
    ) -> dict[str, float]:
        """One optimizer update; its metrics, summed over passes and ranks."""
        self.policy.begin_update()
        sums: dict[str, Tensor] = {}
        for micro in rows.passes(rows.plan.updates[index]):
            outcome = self.objective(micro, denominator, index == 0, step)
            outcome.loss.backward()
            if index == 0:
                rows.put("start_logprobs", micro, outcome.logprob)
            if outcome.old is not None:
                log_ratios.append((outcome.logprob - outcome.old)[own_tokens(micro.fields)])
            add_into(sums, outcome.metrics)
        totals = sum_over_ranks(self.group, sums)
        totals["grad_norm"] = self.policy.finish_update(step)
        return totals

    def _adapt(self, metrics: dict[str, float], denominators: list[Denominator]) -> None:
        """Move an adaptive KL coefficient by the step's KL, the same on every rank.

        Every epoch passes over the same rows; the step has them once.
        """
        if "actor/kl_loss" in metrics:
            metrics["actor/kl_coef"] = self.spec.kl_loss.coef
            rows = sum(d.rows for d in denominators) / self.settings.ppo_epochs
            self.spec.kl_loss.update(metrics["actor/kl_loss"], rows)

    # after the last update --------------------------------------------------------------
    def _correction(self, rows: StepRows) -> dict[str, float]:
        """How far the sampler was from the policy at the start of the step."""
        batch = rows.batch
        known = rows.known.get("start_logprobs")
        if known is None or "rollout_logprobs" not in batch or not self.spec.uses_old_logprobs:
            return {}
        return correction_metrics(
            self.spec.correction,
            batch["start_logprobs"],
            batch["rollout_logprobs"],
            own_tokens(batch) & known[:, None].to(self.device),
            batch.get("advantages"),
        )

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
        return {name: term.state_dict() for name, term in self._adaptive_terms().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over :meth:`state_dict`; a fixed coefficient stays what the config says."""
        for name, term in self._adaptive_terms().items():
            if name in state:
                term.load_state_dict(state[name])

    def _adaptive_terms(self) -> dict[str, KLTerm]:
        terms = {"kl_loss": self.spec.kl_loss, "kl_penalty": self.spec.kl_penalty}
        return {name: term for name, term in terms.items() if term is not None and term.adaptive}


def own_tokens(fields: Batch) -> Tensor:
    """bool ``[B, R]``: tokens that the policy sampled; a demonstration's had no sampler."""
    mask = fields["action_mask"]
    return mask & ~fields["expert_mask"] if "expert_mask" in fields else mask

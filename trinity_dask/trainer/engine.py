"""One rank's training: a collated batch in, optimizer updates and metrics out.

Invariant: the gradient of a mini-batch is the same for any number of micro-batches and
ranks, up to the order of floating-point sums; "old" log-probs are those of the weights at
the start of the step, for every mini-batch and epoch of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator
from trinity_dask.algorithm.rollout_correction import correction_metrics
from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.config.schema import Config, OptimizerConfig
from trinity_dask.trainer.batching import (
    RESPONSE_TENSORS,
    Batch,
    MicroBatch,
    UpdatePlan,
    Widths,
    micro_batches,
    plan_updates,
    sequence_batch,
    take,
)
from trinity_dask.trainer.gradients import GradientGroup
from trinity_dask.trainer.logprobs import Scorer
from trinity_dask.trainer.objective import Objective
from trinity_dask.trainer.optimizer import build_optimizer, build_schedule, set_learning_rate

_NOTHING = Denominator(tokens=0.0, rows=0.0)


@dataclass(frozen=True)
class EngineSettings:
    """The numbers of the config that a rank trains by."""

    optimizer: OptimizerConfig
    total_steps: Optional[int] = None
    temperature: float = 1.0
    autocast: Optional[torch.dtype] = None
    seed: int = 42
    grad_clip: float = 1.0
    ppo_epochs: int = 1
    mini_batches: int = 1
    min_mini_batch_rows: int = 1
    micro_batch_tokens: int = 65_536

    @classmethod
    def from_config(cls, cfg: Config, autocast: Optional[torch.dtype] = None) -> EngineSettings:
        trainer = cfg.trainer
        return cls(
            optimizer=cfg.algorithm.optimizer,
            total_steps=trainer.total_steps or cfg.buffer.total_steps,
            temperature=cfg.model.temperature,
            autocast=autocast,
            seed=cfg.seed,
            grad_clip=trainer.grad_clip,
            ppo_epochs=trainer.ppo_epochs,
            mini_batches=trainer.mini_batches,
            min_mini_batch_rows=trainer.min_mini_batch_rows,
            micro_batch_tokens=trainer.micro_batch_tokens,
        )


class TrainEngine:
    """Model, optimizer and schedule of one rank.

    Args:
        model: a Hugging Face causal language model, float32, on its device.
        spec: the algorithm.
        group: the ranks that share gradients (None: just this one).
        reference: the frozen reference policy, when the algorithm uses one.
    """

    def __init__(
        self,
        model: Any,
        spec: AlgorithmSpec,
        settings: EngineSettings,
        group: Optional[GradientGroup] = None,
        reference: Any = None,
    ) -> None:
        self.model = model
        self.spec = spec
        self.settings = settings
        self.group = group or GradientGroup()
        self.schedule = build_schedule(settings.optimizer, settings.total_steps)
        self.optimizer = build_optimizer(settings.optimizer, model.parameters())
        self.scorer = Scorer(model, settings.temperature, settings.autocast)
        self.objective = Objective(spec, self.scorer)
        self.reference = (
            None
            if reference is None
            else Scorer(reference, settings.temperature, settings.autocast)
        )
        self.device = next(model.parameters()).device

    def plan(
        self, lengths: np.ndarray, step: int, rank: int = 0, world_size: int = 1
    ) -> UpdatePlan:
        """This rank's share of a step whose rows have ``lengths`` tokens."""
        s = self.settings
        return plan_updates(
            lengths,
            seed=s.seed,
            step=step,
            epochs=s.ppo_epochs,
            mini_batches=s.mini_batches,
            min_mini_batch_rows=s.min_mini_batch_rows,
            rank=rank,
            world_size=world_size,
        )

    def train_step(
        self, batch: Batch, step: int, plan: Optional[UpdatePlan] = None
    ) -> dict[str, float]:
        """All updates of train step ``step`` (1 is the first).

        Args:
            batch: what ``experience.collate`` makes of this rank's rows, in the order of
                ``plan.rows``; with no plan, all rows of the step on a single rank.

        Returns:
            Metrics ``actor/*`` (means over the updates, global) and ``correction/*`` (this
            rank's rows).

        Raises:
            ValueError: a tensor that the algorithm needs is missing.
            FloatingPointError: the gradient is not finite; no weight was changed by it.
        """
        self.objective.check(batch)
        plan = plan or self.plan(batch["lengths"].numpy(), step)
        widths = Widths.of(batch)
        denominators = self._denominators(batch, plan)
        batch = self._to_device(batch)
        lr = self.settings.optimizer.lr * self.schedule.factor(step)
        set_learning_rate(self.optimizer, lr)
        scored = self._score_start(batch, plan, widths)
        totals: dict[str, float] = {}
        for index, rows in enumerate(plan.updates):
            _add(totals, self._update(batch, rows, widths, denominators[index], index == 0, step))
        updates = len(plan.updates) - int(totals.pop("skipped", 0.0))
        metrics = {f"actor/{name}": value / updates for name, value in totals.items()}
        metrics |= {"actor/lr": lr, "actor/updates": float(updates)}
        return metrics | self._correction(batch, scored)

    # before the first update ------------------------------------------------------------
    def _denominators(self, batch: Batch, plan: UpdatePlan) -> list[Denominator]:
        """Counts of every mini-batch over all ranks, by one all-reduce."""
        tokens = batch["action_mask"].sum(dim=1)
        counts = torch.zeros(len(plan.updates), 2, dtype=torch.float64)
        for index, rows in enumerate(plan.updates):
            of_rows = tokens[torch.from_numpy(rows)]
            counts[index, 0] = of_rows.sum()
            counts[index, 1] = (of_rows > 0).sum()
        counts = self.group.sum_(counts.to(self.group.device))
        return [Denominator(tokens=t, rows=r) for t, r in counts.tolist()]

    def _to_device(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return dict(batch)
        return {
            name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }

    def _score_start(self, batch: Batch, plan: UpdatePlan, widths: Widths) -> np.ndarray:
        """Log-probs that must be taken before any weight changes.

        The rows of the first update are left out: their log-probs come from its own
        forward pass, with the same weights. Returns the rows that will have them.
        """
        everything = np.arange(len(batch["action_mask"]))
        first = plan.updates[0]
        batch["start_logprobs"] = torch.zeros(batch["action_mask"].shape, device=self.device)
        if self.reference is not None:
            batch["ref_logprobs"] = torch.zeros_like(batch["start_logprobs"])
            self._score_into(batch, "ref_logprobs", self.reference, everything, widths)
        if not self.spec.uses_old_logprobs or self.spec.bypass_old_logprobs:
            return first
        later = np.setdiff1d(everything, first)
        self._score_into(batch, "start_logprobs", self.scorer, later, widths)
        return everything

    @torch.no_grad()
    def _score_into(
        self, batch: Batch, name: str, scorer: Scorer, rows: np.ndarray, widths: Widths
    ) -> None:
        for micro in self._micro_batches(batch, rows, widths):
            batch[name][micro.rows, : micro.response_width] = scorer(micro).logprob

    def _micro_batches(
        self, batch: Batch, rows: np.ndarray, widths: Widths
    ) -> Iterator[MicroBatch]:
        for part in micro_batches(rows, widths, self.settings.micro_batch_tokens):
            yield take(batch, part, widths)

    # one update -------------------------------------------------------------------------
    def _update(
        self,
        batch: Batch,
        rows: np.ndarray,
        widths: Widths,
        denominator: Denominator,
        first: bool,
        step: int,
    ) -> dict[str, float]:
        if denominator.tokens == 0:
            # no gradient at all; a step would still move the weights by their momentum
            return {"skipped": 1.0}
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        for micro in self._micro_batches(batch, rows, widths):
            loss, metrics, logprob = self.objective(micro, denominator, first)
            loss.backward()
            if first:
                batch["start_logprobs"][micro.rows, : micro.response_width] = logprob
            for name, value in metrics.items():
                sums[name] = sums[name] + value if name in sums else value
        totals = self._sum_over_ranks(sums)
        self.group.sum_gradients(self.model.parameters())
        totals["grad_norm"] = self._clip(step)
        self.optimizer.step()
        return totals

    def _sum_over_ranks(self, sums: dict[str, Tensor]) -> dict[str, float]:
        if not sums:  # this rank had no row of the mini-batch, but its peers wait for it
            sums = dict.fromkeys(self._metric_names(), torch.zeros(()))
        return self.group.sum_values({name: float(value) for name, value in sums.items()})

    def _metric_names(self) -> list[str]:
        """Names of the objective's metrics, from a row without valid tokens."""
        micro = sequence_batch([0, 0, 0], self.device)
        blank = torch.zeros(1, 2, device=self.device)
        fields = dict.fromkeys(RESPONSE_TENSORS, blank) | {"action_mask": blank > 0}
        with torch.no_grad():
            return list(self.objective(replace(micro, fields=fields), _NOTHING, True)[1])

    def _clip(self, step: int) -> float:
        """Clip the global gradient norm; returns it as it was before."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = float(
            torch.nn.utils.clip_grad_norm_(parameters, self.settings.grad_clip or math.inf)
        )
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of train step {step} is {norm}; the weights are still those "
                "before this update. Lower algorithm.optimizer.lr, or look for broken rewards "
                "and log-probs in the batch"
            )
        return norm

    # after the last update --------------------------------------------------------------
    def _correction(self, batch: Batch, scored: np.ndarray) -> dict[str, float]:
        """How far the sampler was from the policy at the start of the step."""
        if "rollout_logprobs" not in batch or not self.spec.uses_old_logprobs:
            return {}
        index = torch.from_numpy(scored)
        return correction_metrics(
            self.spec.correction,
            batch["start_logprobs"][index],
            batch["rollout_logprobs"][index],
            batch["action_mask"][index],
        )

    # other uses -------------------------------------------------------------------------
    @torch.no_grad()
    def sequence_logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """Log-prob of every token after the first: float32 ``[len(token_ids) - 1]``."""
        scorer = Scorer(self.model, temperature, self.settings.autocast)
        return scorer(sequence_batch(token_ids, self.device)).logprob[0].cpu().numpy()

    def state_tensors(self) -> dict[str, Tensor]:
        """Optimizer state and random generator by name, to be saved with the weights."""
        tensors = {"rng": torch.get_rng_state()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{key}|{name}"] = value
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over :meth:`state_tensors` of an equal engine."""
        parameters = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for label, value in tensors.items():
            if label == "rng":
                torch.set_rng_state(value.cpu())
                continue
            key, _, name = label.partition("|")
            state = self.optimizer.state[parameters[name]]
            state[key] = value.to(parameters[name].device).clone()

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Copy weights by parameter name into the model.

        Raises:
            ValueError: names or shapes are not the model's.
        """
        parameters = dict(self.model.named_parameters())
        if parameters.keys() != tensors.keys():
            raise ValueError(
                f"the checkpoint's {len(tensors)} tensors are not the model's "
                f"{len(parameters)}; first difference: "
                f"{sorted(parameters.keys() ^ tensors.keys())[0]!r}"
            )
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _add(totals: dict[str, float], values: dict[str, float]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + value

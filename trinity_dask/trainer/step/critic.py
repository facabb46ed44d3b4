"""The critic's part of a train step: values before, regression after.

Invariant: values and returns of a step are those from before its first update, for every
mini-batch and epoch; the gradient does not depend on micro-batches or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trinity_dask.algorithm.value_loss import value_loss
from trinity_dask.config.schema import CriticConfig
from trinity_dask.trainer.model.trainable import TrainableModel
from trinity_dask.trainer.model.value_model import ValueScorer
from trinity_dask.trainer.ranks.gradients import add_into
from trinity_dask.trainer.step.batching import MicroBatch, StepRows


@dataclass(frozen=True)
class Critic:
    """A trained value model and how it is trained."""

    model: TrainableModel
    cfg: CriticConfig

    @property
    def scorer(self) -> ValueScorer:
        return ValueScorer(self.model.module, self.model.autocast)

    def score(self, micro: MicroBatch) -> dict[str, Tensor]:
        return {"values": self.scorer(micro)}

    def update(self, rows: StepRows, step: int) -> dict[str, float]:
        """Regress on ``returns`` of the rows; metrics ``critic/*``, means over the updates."""
        metrics = {"critic/lr": self.model.set_step(step)}
        updates = rows.plan.critic_updates
        totals: dict[str, float] = {}
        done = 0
        for update, denominator in zip(updates, rows.counted(updates), strict=True):
            if denominator.tokens <= 0:
                continue
            self.model.begin_update()
            sums: dict[str, Tensor] = {}
            for micro in rows.passes(update):
                fields = micro.fields
                loss, parts = value_loss(
                    self.scorer(micro),
                    fields["values"],
                    fields["returns"],
                    fields["action_mask"],
                    denominator,
                    self.cfg.value_clip,
                )
                loss.backward()
                add_into(sums, parts)
            add_into(totals, rows.group.sum_values(sums))
            add_into(totals, {"grad_norm": self.model.finish_update(step)})
            done += 1
        return metrics | {f"critic/{name}": value / done for name, value in totals.items()}

"""Direct preference optimisation over pairs of rows."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator
from trinity_dask.algorithm.policy_losses.base import (
    POLICY_LOSS_FN,
    LossResult,
    PolicyLoss,
)


@POLICY_LOSS_FN.register_module("dpo")
class DPOLoss(PolicyLoss):
    """−(1−s)·log σ(βz) − s·log σ(−βz), mean over pairs: arXiv 2305.18290.

    Rows 2i and 2i+1 are chosen and rejected; z is the difference of their log-ratios to the
    reference, each summed over its valid tokens. s = ``label_smoothing``. The loss of a pair
    has no per-token form, so ``loss_agg_mode`` does not apply.
    """

    of_pairs = True

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if not beta > 0:
            raise ValueError(f"beta must be > 0 (got {beta}); 0.1 is usual")
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5) (got {label_smoothing})")
        self.beta, self.smoothing = beta, label_smoothing

    def __call__(
        self,
        *,
        logprob: Tensor,
        action_mask: Tensor,
        ref_logprob: Tensor,
        denominator: Optional[Denominator] = None,
        **_: Any,
    ) -> LossResult:
        if len(logprob) % 2:
            raise ValueError(
                f"dpo got {len(logprob)} rows; chosen and rejected rows alternate, so their "
                "number is even: keep pairs together (rows_per_unit=2)"
            )
        log_ratio = torch.where(action_mask, logprob - ref_logprob, 0.0).sum(dim=1)
        chosen, rejected = self.beta * log_ratio[0::2], self.beta * log_ratio[1::2]
        margin = chosen - rejected
        losses = -(1 - self.smoothing) * F.logsigmoid(margin)
        losses = losses - self.smoothing * F.logsigmoid(-margin)
        valid = action_mask.any(dim=1)
        both = valid[0::2] & valid[1::2]
        n_pairs = float(both.sum()) if denominator is None else denominator.n_pairs
        return self._mean_of_pairs(
            {
                "dpo_loss": losses,
                "chosen_reward": chosen.detach(),
                "rejected_reward": rejected.detach(),
                "accuracy_mean": (margin.detach() > 0).float(),
            },
            both,
            max(n_pairs, 1.0),
        )

    def _mean_of_pairs(self, values: dict[str, Tensor], valid: Tensor, n: float) -> LossResult:
        """The loss and all metrics as addends; a pair with an empty side counts for nothing."""
        means = {name: torch.where(valid, v, 0.0).sum() / n for name, v in values.items()}
        loss = means["dpo_loss"]
        return loss, {name: mean.detach() for name, mean in means.items()}

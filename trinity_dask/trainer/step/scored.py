"""Which rows of a step can be learned from.

Invariant: a row without a finite reward moves no other row: its tokens are in no statistic,
no loss and no count that a loss is divided by, for the policy and the critic alike. Where
the advantages do not come from rewards, no row is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.trainer.step.batching import Batch
from trinity_dask.trainer.step.step_rows import StepRows

COUNT = "advantage/unscored_rows"


def scored_mask(spec: AlgorithmSpec, whole: Batch) -> Tensor:
    """``action_mask`` of the global batch without its unscored rows: bool ``[B, R]``.

    For advantages that are computed in the trainer. A row is scored by its token rewards,
    finite at every token that the policy chose, or by a finite reward; a demonstration needs
    none. All rows stay when a teacher scores them, or when no row has a reward: the
    estimator does not live on rewards then.
    """
    mask, expert = whole["action_mask"], _experts(whole)
    if "teacher_logprobs" in spec.advantage_needs:
        return mask
    if "token_level_reward" in whole:
        finite = (torch.isfinite(whole["token_level_reward"]) | ~mask).all(dim=1)
    else:
        finite = torch.isfinite(whole["reward"])
        if not bool((finite & ~expert).any()):
            return mask
    return mask & (finite | expert)[:, None]


def drop_unscored(spec: AlgorithmSpec, rows: StepRows, whole: Batch) -> dict[str, float]:
    """Take the unscored ones of this rank's rows out of its mask, before anything is counted.

    Returns :data:`COUNT` over all ranks; nothing for losses without advantages.
    """
    reads = spec.advantage_in_trainer or "advantages" in spec.needs
    if spec.advantage_fn is None or not reads:
        return {}
    if spec.advantage_in_trainer:
        scored = scored_mask(spec, whole)[torch.from_numpy(rows.plan.rows), : rows.mask.shape[1]]
        scored = scored.to(rows.device)
    else:
        scored = rows.mask & _estimated(rows.batch)[:, None]
    dropped = (rows.mask.any(dim=1) & ~scored.any(dim=1)).cpu()
    rows.batch["action_mask"] = scored
    owned = torch.from_numpy(rows.plan.owned)  # another rank counts the others
    return rows.group.sum_values({COUNT: float(dropped[owned].sum())})


def _estimated(batch: Batch) -> Tensor:
    """Rows that the experience pipeline could say something about: bool ``[B]``.

    It gives advantage 0 to what has no reward; a function of the user's that goes by
    something else gives such rows an advantage, and they stay.
    """
    said = torch.isfinite(batch["reward"]) | _experts(batch)
    return said | (batch["advantages"] != 0).any(dim=1) if "advantages" in batch else said


def _experts(batch: Batch) -> Tensor:
    expert = batch.get("expert_mask")
    return torch.zeros_like(batch["reward"], dtype=torch.bool) if expert is None else expert.any(1)

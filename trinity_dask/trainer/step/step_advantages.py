"""Advantages that need the whole step: rewards per token, the KL penalty, the estimator.

Invariant: every rank computes over the *global* batch and so gets the same numbers; what
the models say about a row comes from the one rank that owns it. A row without a finite
reward moves no other row: its tokens are in no statistic, no loss and no count that a loss
is divided by, for the policy and the critic alike. Where the advantages do not come from
rewards, no row is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.trainer.model.value_model import explained_variance
from trinity_dask.trainer.step.batching import Batch, StepRows
from trinity_dask.trainer.step.row_metrics import bounds

# what models say about a token: name in this rank's rows -> name in the global batch
SCORED = {
    "start_logprobs": "old_logprobs",
    "ref_logprobs": "ref_logprobs",
    "teacher_logprobs": "teacher_logprobs",
    "values": "values",
    "entropys": "entropys",
    "necs": "necs",
}
GIVEN = ("rollout_logprobs", "returns", "reward_baselines")
COUNT = "advantage/unscored_rows"


# rows that can be learned from --------------------------------------------------------
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
        # the pipeline gives advantage 0 to what has no reward; a function of the user's that
        # goes by something else gives such rows an advantage, and they stay
        batch = rows.batch
        said = torch.isfinite(batch["reward"]) | _experts(batch)
        if "advantages" in batch:
            said = said | (batch["advantages"] != 0).any(dim=1)
        scored = rows.mask & said[:, None]
    dropped = (rows.mask.any(dim=1) & ~scored.any(dim=1)).cpu()
    rows.batch["action_mask"] = scored
    owned = torch.from_numpy(rows.plan.owned)  # another rank counts the others
    return rows.group.sum_values({COUNT: float(dropped[owned].sum())})


def _experts(batch: Batch) -> Tensor:
    expert = batch.get("expert_mask")
    return torch.zeros_like(batch["reward"], dtype=torch.bool) if expert is None else expert.any(1)


# the estimate -------------------------------------------------------------------------
def token_rewards(batch: Batch) -> Tensor:
    """float32 ``[B, R]``: the token rewards of the rows, or the reward at the last token that
    the policy chose (0 where there is no finite one)."""
    mask = batch["action_mask"]
    if "token_level_reward" in batch:
        return batch["token_level_reward"].float().nan_to_num(0.0, 0.0, 0.0)
    rewards = torch.zeros(mask.shape, device=mask.device)
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(dim=1)
    rows = (last >= 0).nonzero()[:, 0]
    rewards[rows, last[rows]] = batch["reward"][rows].nan_to_num(0.0, 0.0, 0.0)
    return rewards


def estimate(spec: AlgorithmSpec, whole: Batch, rows: StepRows) -> dict[str, float]:
    """Penalise, estimate, and give this rank its rows.

    ``whole`` is the collation of the step's rows. ``rows.batch`` gets ``advantages``,
    ``returns`` and the mask that the estimator left: tokens that it cut out are not trained
    on, and still counted. Returns metrics ``advantage/*`` and ``critic/*``.
    """
    width, scored = whole["action_mask"].shape[1], scored_mask(spec, whole)
    batch: Batch = {
        "token_level_rewards": token_rewards(whole),
        "action_mask": scored,
        "uid": [str(key) for key in whole["group"].tolist()],
        "run": whole["run"].tolist() if "run" in whole else [],
    }
    batch |= {name: whole[name] for name in GIVEN if name in whole}
    owned = rows.plan.owned
    for name, target in SCORED.items():
        if name in rows.batch:
            # every row is contributed by its owner alone, so a plain sum puts them together
            values = rows.batch[name]
            total = values.new_zeros(rows.plan.n_rows, width)
            total[rows.plan.rows[owned], : values.shape[1]] = values[owned]
            batch[target] = rows.group.sum_(total).cpu()
    if spec.bypass_old_logprobs and "rollout_logprobs" in whole:
        batch["old_logprobs"] = whole["rollout_logprobs"]
    metrics: dict[str, float] = {}
    if spec.kl_penalty is not None:
        batch, metrics = spec.kl_penalty(batch)
    batch, extra = spec.advantage_fn(batch)  # type: ignore[misc]
    metrics = {
        name if name.startswith("advantage/") else f"advantage/{name}": float(value)
        for name, value in (metrics | extra).items()
    }
    mine = torch.from_numpy(rows.plan.rows)
    for name in ("advantages", "returns"):
        valid = torch.where(scored, batch[name].float(), 0.0)
        rows.batch[name] = valid[mine, : rows.mask.shape[1]].to(rows.device)
    cut = (scored & ~batch["action_mask"])[mine, : rows.mask.shape[1]]
    rows.batch["action_mask"] = rows.mask & ~cut.to(rows.device)
    return metrics | describe_estimate(batch)


def describe_estimate(batch: Batch) -> dict[str, float]:
    """``critic/rewards``, ``advantages``, ``returns`` and ``values`` of the global batch.

    A reward is that of a row after the KL penalty; the others are over action tokens.
    """
    mask = batch["action_mask"]
    rewards = torch.where(mask, batch["token_level_rewards"], 0.0).sum(dim=1)
    metrics = bounds("critic/rewards", rewards[mask.any(dim=1)].numpy())
    for name in ("advantages", "returns", "values"):
        if name in batch:
            metrics |= bounds(f"critic/{name}", batch[name][mask].numpy())
    if "values" in batch:
        explained = explained_variance(batch["values"], batch["returns"], mask)
        metrics["critic/vf_explained_var"] = explained
    return metrics

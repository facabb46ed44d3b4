"""Advantages that need the whole step: rewards per token, the KL penalty, the estimator.

Invariant: every rank computes over the *global* batch and so gets the same numbers; what
the models say about a row comes from the one rank that owns it. A row without a finite
reward moves no other row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.trainer.model.value_model import explained_variance
from trinity_dask.trainer.ranks.gradients import GradientGroup
from trinity_dask.trainer.step.batching import Batch, UpdatePlan
from trinity_dask.trainer.step.row_metrics import bounds
from trinity_dask.trainer.step.scored import scored_mask
from trinity_dask.trainer.step.step_rows import StepRows

# what models say about a token: name in this rank's rows -> name in the global batch
SCORED = {
    "start_logprobs": "old_logprobs",
    "ref_logprobs": "ref_logprobs",
    "teacher_logprobs": "teacher_logprobs",
    "values": "values",
    "entropys": "entropys",
    "necs": "necs",
}
GIVEN = ("rollout_logprobs", "returns")


def last_valid(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows with a valid token, and the place of its last one; mask bool ``[B, R]``."""
    places = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, places, -1).amax(dim=1)
    return (last >= 0).nonzero()[:, 0], last


def token_rewards(batch: Batch) -> Tensor:
    """float32 ``[B, R]``: the token rewards of the rows, or the reward at the last token that
    the policy chose (0 where there is no finite one)."""
    mask = batch["action_mask"]
    if "token_level_reward" in batch:
        return batch["token_level_reward"].float().nan_to_num(0.0, 0.0, 0.0)
    rewards = torch.zeros(mask.shape, device=mask.device)
    rows, last = last_valid(mask)
    rewards[rows, last[rows]] = batch["reward"][rows].nan_to_num(0.0, 0.0, 0.0)
    return rewards


def gather_rows(values: Tensor, width: int, plan: UpdatePlan, group: GradientGroup) -> Tensor:
    """``[b, r]`` values of this rank's rows to ``[n_rows, width]`` of all ranks'.

    Every row is contributed by its owner alone, so a plain sum puts them together.
    """
    out = values.new_zeros(plan.n_rows, width)
    owned = torch.from_numpy(plan.owned)
    rows = torch.from_numpy(plan.rows[plan.owned])
    out[rows, : values.shape[1]] = values[owned.to(values.device)]
    return group.sum_(out)


def global_batch(spec: AlgorithmSpec, whole: Batch, rows: StepRows, group: GradientGroup) -> Batch:
    """The batch that an estimator reads; ``whole`` is the collation of the step's rows."""
    width = whole["action_mask"].shape[1]
    batch: Batch = {
        "token_level_rewards": token_rewards(whole),
        "action_mask": scored_mask(spec, whole),
        "uid": [str(key) for key in whole["group"].tolist()],
        "run": _list(whole.get("run")),
    }
    batch |= {name: whole[name] for name in GIVEN if name in whole}
    if "reward_baselines" in whole:
        batch["reward_baselines"] = whole["reward_baselines"]
    for name, target in SCORED.items():
        if name in rows.batch:
            batch[target] = gather_rows(rows.batch[name], width, rows.plan, group).cpu()
    if spec.bypass_old_logprobs and "rollout_logprobs" in whole:
        batch["old_logprobs"] = whole["rollout_logprobs"]
    return batch


def _list(value: Any) -> Sequence[int]:
    return [] if value is None else value.tolist()


def estimate(
    spec: AlgorithmSpec, whole: Batch, rows: StepRows, group: GradientGroup
) -> tuple[Batch, dict[str, float]]:
    """Penalise, estimate, and give this rank its rows.

    ``rows.batch`` gets ``advantages``, ``returns`` and the mask that the estimator left;
    returns the global batch and metrics ``advantage/*``.
    """
    batch = global_batch(spec, whole, rows, group)
    scored = batch["action_mask"]
    metrics: dict[str, float] = {}
    if spec.kl_penalty is not None:
        batch, extra = spec.kl_penalty(batch)
        metrics |= extra
    batch, extra = spec.advantage_fn(batch)  # type: ignore[misc]
    metrics |= extra
    _hand_out(batch, scored, rows)
    return batch, {_named(name): float(value) for name, value in metrics.items()}


def _hand_out(batch: Batch, scored: Tensor, rows: StepRows) -> None:
    """What the estimator made of this rank's rows; ``scored`` is the mask that it was given.

    Tokens that it cut out of the mask are not trained on, and still counted.
    """
    mine, width = torch.from_numpy(rows.plan.rows), rows.mask.shape[1]
    for name in ("advantages", "returns"):
        valid = torch.where(scored, batch[name].float(), 0.0)
        rows.batch[name] = valid[mine, :width].to(rows.device)
    cut = (scored & ~batch["action_mask"])[mine, :width]
    rows.batch["action_mask"] = rows.mask & ~cut.to(rows.device)


def _named(name: str) -> str:
    return name if name.startswith("advantage/") else f"advantage/{name}"


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

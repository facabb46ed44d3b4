"""Arithmetic over the tokens of a global batch, in float64.

Invariant: only tokens that the policy chose count. A masked token in the middle (a tool's
answer) does not end a sequence: what comes after reaches what came before, and is not
discounted for it. Whatever lies at masked places, NaN too, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.advantages.base import Batch

WHITEN_EPSILON = 1e-8


def fold_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards ``[B, R]`` float64, those at masked tokens moved to the choice before them.

    A reward that the environment gives at its own token was earned by the last token that
    the policy chose (by the first one, if there is none before). Rows without any lose it.
    """
    rewards = torch.where(mask | torch.isfinite(rewards), rewards, 0.0).double()
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = torch.where(mask, places, -1).cummax(dim=1).values
    first = mask.long().argmax(dim=1, keepdim=True)
    folded = torch.zeros_like(rewards).scatter_add_(1, torch.where(last < 0, first, last), rewards)
    return torch.where(mask, folded, 0.0)


def sequence_scores(batch: Batch) -> Tensor:
    """Sum of a row's token rewards: float64 ``[B]``."""
    return fold_rewards(batch["token_level_rewards"], batch["action_mask"]).sum(dim=1)


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Σ_k γ^k r over the valid tokens from each one on: float64 ``[B, R]``, 0 elsewhere."""
    rewards = fold_rewards(rewards, mask)
    if gamma == 1.0:
        return torch.where(mask, rewards.flip(1).cumsum(1).flip(1), 0.0)
    # time first, so that a step of the loop reads neighbouring memory
    earned, valid = rewards.T.contiguous(), mask.T.contiguous()
    carry, returns = torch.zeros_like(earned[:1].sum(dim=0)), torch.zeros_like(earned)
    for t in reversed(range(len(earned))):
        carry = torch.where(valid[t], earned[t] + gamma * carry, carry)
        returns[t] = carry
    return torch.where(mask, returns.T, 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x − mean)·rsqrt(var + 1e-8) over valid tokens, unbiased var; 0 at masked places.

    All 0 with fewer than two valid tokens, or with equal values: nothing stands out.
    """
    chosen = values[mask].double()
    if chosen.numel() < 2 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(values, dtype=torch.float64)
    scale = torch.rsqrt(chosen.var(unbiased=True) + WHITEN_EPSILON)
    return torch.where(mask, (values.double() - chosen.mean()) * scale, 0.0)


def masked_mean(values: Tensor, mask: Tensor) -> float:
    """Mean over valid tokens; 0 when there is none."""
    return float(values[mask].double().mean()) if bool(mask.any()) else 0.0


def rows_by_task(batch: Batch) -> dict[str, list[int]]:
    """Rows with a valid token, by task key, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for row, (uid, valid) in enumerate(
        zip(batch["uid"], batch["action_mask"].any(dim=1).tolist(), strict=True)
    ):
        if valid:
            groups.setdefault(uid, []).append(row)
    return groups


def group_scores(
    batch: Batch, score: Callable[[Sequence[float]], Sequence[float]]
) -> tuple[Tensor, dict[str, list[float]]]:
    """``score`` of the sequence scores of every group of two or more; else 0.

    Returns float64 ``[B]`` and the rewards by task.
    """
    rewards = sequence_scores(batch).tolist()
    result = torch.zeros(len(rewards), dtype=torch.float64, device=batch["action_mask"].device)
    of_task: dict[str, list[float]] = {}
    for uid, rows in rows_by_task(batch).items():
        of_task[uid] = [rewards[row] for row in rows]
        if len(rows) > 1:
            result[rows] = torch.tensor(score(of_task[uid]), dtype=torch.float64).to(result.device)
    return result, of_task


def set_token_advantages(
    batch: Batch, advantages: Tensor, returns: Optional[Tensor] = None
) -> Batch:
    """Store float32 ``advantages`` and ``returns`` (default: the same), 0 at masked places."""
    mask = batch["action_mask"]
    returns = advantages if returns is None else returns
    for name, values in (("advantages", advantages), ("returns", returns)):
        batch[name] = torch.where(mask, values, 0.0).float()
    return batch


def set_row_advantages(batch: Batch, scores: Tensor) -> Batch:
    """The same advantage and return on every valid token of a row; scores ``[B]``."""
    return set_token_advantages(batch, scores[:, None].expand(batch["action_mask"].shape))

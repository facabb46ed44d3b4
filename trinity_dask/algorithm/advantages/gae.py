"""Generalised advantage estimation with a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from trinity_dask.algorithm.advantages.base import ADVANTAGE_FN, Batch, require
from trinity_dask.algorithm.advantages.tokens import (
    fold_rewards,
    masked_mean,
    set_token_advantages,
    whiten,
)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1}: float64 ``[B, R]``.

    "Next" is the next valid token: a tool's tokens are no states, and cost no discount. After
    the last one V = 0, also for an answer that was cut off. arXiv 1506.02438.
    """
    # time first, so that a step of the loop reads neighbouring memory
    earned = fold_rewards(rewards, mask).T.contiguous()
    state = torch.where(mask, values, 0.0).double().T.contiguous()
    valid = mask.T.contiguous()
    advantages = torch.zeros_like(earned)
    carry = following = torch.zeros_like(earned[:1].sum(dim=0))
    for t in reversed(range(len(earned))):
        advantage = earned[t] + gamma * following - state[t] + gamma * lam * carry
        carry = torch.where(valid[t], advantage, carry)
        following = torch.where(valid[t], state[t], following)
        advantages[t] = carry
    return torch.where(mask, advantages.T, 0.0)


@ADVANTAGE_FN.register_module("ppo")
class PPOAdvantage:
    """δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1} (1506.02438), whitened at the end.

    Returns = A + V before A is whitened over the valid tokens of the global batch.
    """

    needs = frozenset({"values"})

    def __init__(self, gamma: float = 1.0, lam: float = 1.0) -> None:
        if not (0 <= gamma <= 1 and 0 <= lam <= 1):
            raise ValueError(f"gamma and lam must be in [0, 1] (got {gamma} and {lam})")
        self.gamma, self.lam = gamma, lam

    def __call__(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        require(batch, self.needs, "ppo")
        mask, values = batch["action_mask"], batch["values"]
        plain = gae(batch["token_level_rewards"], values, mask, self.gamma, self.lam)
        returns = plain + torch.where(mask, values, 0.0)
        batch = set_token_advantages(batch, whiten(plain, mask), returns)
        return batch, {
            "gae_mean": masked_mean(plain, mask),
            "returns_mean": masked_mean(returns, mask),
        }

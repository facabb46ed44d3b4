"""What a run with several steps earned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional


def run_reward(rows: Sequence[Any]) -> Optional[float]:
    """The last step's reward; None when it is not finite or no step has an action token."""
    reward = rows[-1].reward
    if reward is None or not math.isfinite(reward):
        return None
    return float(reward) if any(row.action_mask.any() for row in rows) else None


def step_rewards(rows: Sequence[Any], key: str) -> list[float]:
    """Reward of each step: ``info[key]``, else 0 and the run's reward at the last step."""
    last = len(rows) - 1
    return [
        float(row.info[key])
        if row.info.get(key) is not None
        else (float(row.reward or 0.0) if index == last else 0.0)
        for index, row in enumerate(rows)
    ]


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """Σ_k γ^k r_{t+k} for each t."""
    returns: list[float] = []
    carry = 0.0
    for reward in reversed(rewards):
        carry = reward + gamma * carry
        returns.append(carry)
    return returns[::-1]

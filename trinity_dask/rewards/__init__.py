"""What an answer earns: the reward functions that a configuration can name.

Invariant: a reward function is ``fn(response=..., truth=..., **more)`` and returns a
number or a dict of named numbers (their sum is the reward). It raises when it cannot tell.
"""

from typing import Any

from trinity_dask.registry import Registry

_MATH = "trinity_dask.rewards.math"

REWARD_FUNCTIONS: Registry[Any] = Registry(
    "reward function",
    {
        "accuracy_reward": f"{_MATH}:AccuracyReward",
        "math_reward": f"{_MATH}:MathReward",
        "format_reward": "trinity_dask.rewards.format:FormatReward",
        "countdown_reward": "trinity_dask.rewards.countdown:countdown_reward",
        "sort_digits_reward": "trinity_dask.demo.sort_digits:sort_digits_reward",
    },
)

__all__ = ["REWARD_FUNCTIONS"]

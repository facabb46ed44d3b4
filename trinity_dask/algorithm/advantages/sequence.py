"""In-trainer advantages from rewards alone: whitened returns and group baselines.

Invariant: all statistics are over the global batch; a group of one gets 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.advantages.base import ADVANTAGE_FN, Batch, require
from trinity_dask.algorithm.advantages.baselines import check_opmd, opmd_baseline
from trinity_dask.algorithm.advantages.groups import (
    GroupOfOneWarning,
    group_metrics,
    is_flat,
    mean,
    std,
)
from trinity_dask.algorithm.advantages.tokens import (
    group_scores,
    masked_mean,
    returns_to_go,
    set_row_advantages,
    set_token_advantages,
    whiten,
)

Result = tuple[Batch, dict[str, float]]


def check_gamma(gamma: float) -> None:
    """Raise ValueError for a discount outside [0, 1]."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1] (got {gamma})")


@ADVANTAGE_FN.register_module("reinforceplusplus")
class ReinforcePlusPlusAdvantage:
    """Discounted returns-to-go, whitened over all valid tokens of the batch (2501.03262).

    The discount is per valid token.
    """

    def __init__(self, gamma: float = 1.0) -> None:
        check_gamma(gamma)
        self.gamma = gamma

    def __call__(self, batch: Batch) -> Result:
        mask = batch["action_mask"]
        returns = returns_to_go(batch["token_level_rewards"], mask, self.gamma)
        metrics = {"returns_mean": masked_mean(returns, mask)}
        return set_token_advantages(batch, whiten(returns, mask), returns), metrics


class GroupBaseline:
    """Base: scores of a group's sequence rewards, the same on every token of a row."""

    def __init__(self) -> None:
        self._warn = GroupOfOneWarning()

    def __call__(self, batch: Batch) -> Result:
        scores, rewards = group_scores(batch, self.scores)
        self._warn([len(values) for values in rewards.values()])
        n_rows = len(batch["uid"])
        return self.finish(batch, scores), group_metrics(rewards, n_rows, n_rows)

    def scores(self, rewards: Sequence[float]) -> Sequence[float]:
        """Of the two or more rewards of one group."""
        raise TypeError(f"{type(self).__name__} defines no scores")

    def finish(self, batch: Batch, scores: Tensor) -> Batch:
        """Store the advantages that follow from the rows' scores ``[B]``."""
        return set_row_advantages(batch, scores)


@ADVANTAGE_FN.register_module("reinforceplusplus_baseline")
class ReinforcePlusPlusBaselineAdvantage(GroupBaseline):
    """r − group mean, no group std, whitened over all valid tokens of the batch."""

    def scores(self, rewards: Sequence[float]) -> Sequence[float]:
        center = mean(rewards)
        return [0.0 if is_flat(rewards) else r - center for r in rewards]

    def finish(self, batch: Batch, scores: Tensor) -> Batch:
        mask = batch["action_mask"]
        tokens = scores[:, None].expand(mask.shape)
        return set_token_advantages(batch, whiten(tokens, mask), tokens)


@ADVANTAGE_FN.register_module("rloo")
class RLOOAdvantage(GroupBaseline):
    """r − mean of the others = n/(n−1)·(r − mean), arXiv 2402.14740; n is each group's own."""

    def scores(self, rewards: Sequence[float]) -> Sequence[float]:
        center, factor = mean(rewards), len(rewards) / (len(rewards) - 1)
        return [0.0 if is_flat(rewards) else factor * (r - center) for r in rewards]


@ADVANTAGE_FN.register_module("grpo_verl")
class GRPOVerlAdvantage(GroupBaseline):
    """``grpo`` of the sequence rewards, computed in the trainer."""

    def __init__(self, epsilon: float = 1e-6) -> None:
        super().__init__()
        if epsilon < 0:
            raise ValueError(f"epsilon must be >= 0 (got {epsilon}); 1e-6 is usual")
        self.epsilon = epsilon

    def scores(self, rewards: Sequence[float]) -> Sequence[float]:
        if is_flat(rewards):
            return [0.0] * len(rewards)
        center, width = mean(rewards), std(rewards) + self.epsilon
        return [(r - center) / width for r in rewards]


@ADVANTAGE_FN.register_module("opmd_verl")
class OPMDVerlAdvantage(GroupBaseline):
    """``opmd`` of the sequence rewards, computed in the trainer."""

    def __init__(self, opmd_baseline: str = "mean", tau: float = 1.0) -> None:
        super().__init__()
        check_opmd(opmd_baseline, tau)
        self.kind, self.tau = opmd_baseline, tau

    def scores(self, rewards: Sequence[float]) -> Sequence[float]:
        baseline = opmd_baseline(rewards, self.kind, self.tau)
        return [r - baseline for r in rewards]


@ADVANTAGE_FN.register_module("asymre_verl")
class AsymREVerlAdvantage(GroupBaseline):
    """``asymre`` of the sequence rewards, computed in the trainer."""

    def __init__(self, baseline_shift: float = -0.1) -> None:
        super().__init__()
        self.shift = baseline_shift

    def scores(self, rewards: Sequence[float]) -> Sequence[float]:
        baseline = mean(rewards) + self.shift
        return [r - baseline for r in rewards]


@ADVANTAGE_FN.register_module("remax")
class RemaxAdvantage:
    """Returns-to-go − the reward of the task's greedy answer (arXiv 2310.10505).

    ``reward_baselines`` float32 ``[B]``; a row whose baseline is not finite gets 0.
    """

    needs = frozenset({"reward_baselines"})

    def __call__(self, batch: Batch) -> Result:
        require(batch, self.needs, "remax")
        mask = batch["action_mask"]
        baselines: Tensor = batch["reward_baselines"].double()[:, None]
        returns = returns_to_go(batch["token_level_rewards"], mask)
        advantages = torch.where(torch.isfinite(baselines), returns - baselines, 0.0)
        known: Optional[Tensor] = baselines[torch.isfinite(baselines)]
        metrics = {
            "baseline_mean": float(known.mean()) if known is not None and known.numel() else 0.0,
            "baseline_missing_count": float((~torch.isfinite(baselines)).sum()),
        }
        return set_token_advantages(batch, advantages, returns), metrics

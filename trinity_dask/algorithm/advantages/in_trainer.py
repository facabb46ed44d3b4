"""In-trainer advantages over the tokens of a global batch, in float64.

Invariant: all statistics are over the global batch. Only tokens that the policy chose count: a
masked token in the middle (a tool's answer) does not end a sequence, what comes after reaches
what came before and is not discounted for it. Whatever lies at masked places, NaN too, changes
nothing. A group of one run gets 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Optional

from trinity_dask.algorithm.advantages.base import ADVANTAGE_FN, Batch, require
from trinity_dask.algorithm.advantages.baselines import check_opmd, opmd_baseline
from trinity_dask.algorithm.advantages.groups import GroupOfOneWarning, Rewards, group_metrics
from trinity_dask.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

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


def group_scores(
    batch: Batch, score: Callable[[Rewards], Sequence[float]]
) -> tuple[Tensor, dict[str, Rewards]]:
    """``score`` of the sequence scores of every group of two runs or more; else 0.

    Returns float64 ``[B]`` and the rewards by task; rows without a valid token are in none.
    """
    rewards = fold_rewards(batch["token_level_rewards"], batch["action_mask"]).sum(dim=1).tolist()
    runs = batch.get("run") or range(len(rewards))
    valid = batch["action_mask"].any(dim=1).tolist()
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(batch["uid"]):
        if valid[row]:
            groups.setdefault(uid, []).append(row)
    result = torch.zeros(len(rewards), dtype=torch.float64)
    of_task: dict[str, Rewards] = {}
    for uid, rows in groups.items():
        of_task[uid] = Rewards([rewards[row] for row in rows], [runs[row] for row in rows])
        if of_task[uid].n_runs > 1:
            result[rows] = torch.tensor(score(of_task[uid]), dtype=torch.float64)
    return result.to(batch["action_mask"].device), of_task


def set_token_advantages(
    batch: Batch, advantages: Tensor, returns: Optional[Tensor] = None
) -> Batch:
    """Store float32 ``advantages`` and ``returns`` (default: the same), 0 at masked places."""
    mask = batch["action_mask"]
    returns = advantages if returns is None else returns
    for name, values in (("advantages", advantages), ("returns", returns)):
        batch[name] = torch.where(mask, values, 0.0).float()
    return batch


Result = tuple[Batch, dict[str, float]]


@ADVANTAGE_FN.register_module("reinforceplusplus")
class ReinforcePlusPlusAdvantage:
    """Discounted returns-to-go, whitened over all valid tokens of the batch (2501.03262).

    The discount is per valid token.
    """

    def __init__(self, gamma: float = 1.0) -> None:
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be in [0, 1] (got {gamma})")
        self.gamma = gamma

    def __call__(self, batch: Batch) -> Result:
        mask = batch["action_mask"]
        returns = returns_to_go(batch["token_level_rewards"], mask, self.gamma)
        metrics = {"returns_mean": masked_mean(returns, mask)}
        return set_token_advantages(batch, whiten(returns, mask), returns), metrics


class GroupBaseline:
    """Base: scores of a group's sequence rewards; each run counts once in its statistics."""

    def __init__(self) -> None:
        self._warn = GroupOfOneWarning()

    def __call__(self, batch: Batch) -> Result:
        scores, rewards = group_scores(batch, self.scores)
        self._warn([group.n_runs for group in rewards.values()])
        n_rows = len(batch["uid"])
        return self.finish(batch, scores), group_metrics(rewards, n_rows, n_rows)

    def scores(self, rewards: Rewards) -> Sequence[float]:
        """Of the rows of one group of two or more runs."""
        raise TypeError(f"{type(self).__name__} defines no scores")

    def finish(self, batch: Batch, scores: Tensor) -> Batch:
        """Store the advantages that follow from the rows' scores ``[B]``: the same at every
        token of a row."""
        return set_token_advantages(batch, scores[:, None].expand(batch["action_mask"].shape))


@ADVANTAGE_FN.register_module("reinforceplusplus_baseline")
class ReinforcePlusPlusBaselineAdvantage(GroupBaseline):
    """r − group mean, no group std, whitened over all valid tokens of the batch."""

    def scores(self, rewards: Rewards) -> Sequence[float]:
        center = rewards.mean()
        return [0.0 if rewards.is_flat else r - center for r in rewards.values]

    def finish(self, batch: Batch, scores: Tensor) -> Batch:
        mask = batch["action_mask"]
        tokens = scores[:, None].expand(mask.shape)
        return set_token_advantages(batch, whiten(tokens, mask), tokens)


@ADVANTAGE_FN.register_module("rloo")
class RLOOAdvantage(GroupBaseline):
    """r − mean of the others = n/(n−1)·(r − mean), arXiv 2402.14740; n is each group's own.

    The others are the other runs: the rows of one run do not compare with each other.
    """

    def scores(self, rewards: Rewards) -> Sequence[float]:
        if rewards.is_flat:
            return [0.0] * len(rewards.values)
        center, factor = rewards.mean(), rewards.n_runs / (rewards.n_runs - 1)
        of_runs, rows = rewards.of_runs(), zip(rewards.values, rewards.runs, strict=True)
        return [factor * (of_runs[run] - center) + (r - of_runs[run]) for r, run in rows]


@ADVANTAGE_FN.register_module("grpo_verl")
class GRPOVerlAdvantage(GroupBaseline):
    """``grpo`` of the sequence rewards, computed in the trainer."""

    def __init__(self, epsilon: float = 1e-6) -> None:
        super().__init__()
        if epsilon < 0:
            raise ValueError(f"epsilon must be >= 0 (got {epsilon}); 1e-6 is usual")
        self.epsilon = epsilon

    def scores(self, rewards: Rewards) -> Sequence[float]:
        if rewards.is_flat:
            return [0.0] * len(rewards.values)
        center, width = rewards.mean(), rewards.std() + self.epsilon
        return [(r - center) / width for r in rewards.values]


@ADVANTAGE_FN.register_module("opmd_verl")
class OPMDVerlAdvantage(GroupBaseline):
    """``opmd`` of the sequence rewards, computed in the trainer."""

    def __init__(self, opmd_baseline: str = "mean", tau: float = 1.0) -> None:
        super().__init__()
        check_opmd(opmd_baseline, tau)
        self.kind, self.tau = opmd_baseline, tau

    def scores(self, rewards: Rewards) -> Sequence[float]:
        baseline = opmd_baseline(rewards, self.kind, self.tau)
        return [r - baseline for r in rewards.values]


@ADVANTAGE_FN.register_module("asymre_verl")
class AsymREVerlAdvantage(GroupBaseline):
    """``asymre`` of the sequence rewards, computed in the trainer."""

    def __init__(self, baseline_shift: float = -0.1) -> None:
        super().__init__()
        self.shift = baseline_shift

    def scores(self, rewards: Rewards) -> Sequence[float]:
        baseline = rewards.mean() + self.shift
        return [r - baseline for r in rewards.values]


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

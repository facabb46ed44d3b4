"""GiGPO: the advantage of a run, plus that of a step among equal states of its task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trinity_dask.algorithm.advantages.base import ADVANTAGE_FN
from trinity_dask.algorithm.advantages.groups import (
    GroupOfOneWarning,
    discounted,
    group_by_run,
    group_by_task,
    mean,
    run_reward,
    spread,
    std,
    step_rewards,
    write,
)
from trinity_dask.registry import nearest

NORMS = ("none", "std")


@ADVANTAGE_FN.register_module("gigpo")
class GiGPOAdvantage:
    """A = A_E + omega·A_S, arXiv 2505.10978.

    A_E compares the sums of step rewards of the task's runs; A_S compares the discounted
    returns of all steps *of the same task* that share ``info[env_state_hash_key]``. Both are
    (x − mean)/(d + epsilon) with d = 1 (``fnorm`` none) or the sample std. A single run, or a
    state seen once, has nothing to compare with: 0. Steps without a hash share none.
    """

    def __init__(
        self,
        omega: float = 1.0,
        gamma: float = 1.0,
        fnorm: str = "none",
        epsilon: float = 1e-6,
        step_reward_key: str = "step_reward",
        env_state_hash_key: str = "env_state_hash",
    ) -> None:
        if fnorm not in NORMS:
            raise ValueError(f"fnorm {fnorm!r}{nearest(fnorm, NORMS)}")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be in [0, 1] (got {gamma})")
        self.omega, self.gamma, self.fnorm, self.epsilon = omega, gamma, fnorm, epsilon
        self.reward_key, self.hash_key = step_reward_key, env_state_hash_key
        self._warn = GroupOfOneWarning()

    def __call__(self, experiences: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
        tally = _Tally()
        sizes = []
        for rows in group_by_task(experiences).values():
            for row in rows:
                write(row, 0.0)
            runs = [r for r in group_by_run(rows).values() if self._is_scored(r)]
            sizes.append(len(runs))
            self._score_task(runs, tally)
        self._warn(sizes)
        tally.groups_of_one = sum(size == 1 for size in sizes)
        return list(experiences), tally.metrics(len(experiences))

    def _is_scored(self, run: Sequence[Any]) -> bool:
        own = [row.info.get(self.reward_key) for row in run]
        if any(r is not None and not math.isfinite(float(r)) for r in own):
            return False
        trainable = any(row.action_mask.any() for row in run)
        return trainable and (run_reward(run) is not None or own[-1] is not None)

    def _score_task(self, runs: list[list[Any]], tally: _Tally) -> None:
        rewards = [step_rewards(run, self.reward_key) for run in runs]
        totals = [math.fsum(values) for values in rewards]
        if totals:
            tally.means.append(mean(totals))
            tally.stds.append(std(totals))
        of_run = self._normalised(totals)
        steps = [row for run in runs for row in run]
        returns = [value for values in rewards for value in discounted(values, self.gamma)]
        of_step = self._among_equal_states(steps, returns, tally)
        episode = [a for a, run in zip(of_run, runs, strict=True) for _ in run]
        for row, a_e, a_s in zip(steps, episode, of_step, strict=True):
            write(row, a_e + self.omega * a_s)
            tally.abs_episode.append(abs(a_e))
            tally.abs_step.append(abs(a_s))

    def _among_equal_states(
        self, steps: list[Any], returns: list[float], tally: _Tally
    ) -> list[float]:
        buckets: dict[Any, list[int]] = {}
        for index, row in enumerate(steps):
            state = row.info.get(self.hash_key)
            buckets.setdefault(("", index) if state is None else ("state", state), []).append(index)
        scores = [0.0] * len(steps)
        for members in buckets.values():
            tally.sizes.append(len(members))
            values = self._normalised([returns[index] for index in members])
            for index, value in zip(members, values, strict=True):
                scores[index] = value
        return scores

    def _normalised(self, values: list[float]) -> list[float]:
        if len(values) < 2 or min(values) == max(values):
            return [0.0] * len(values)
        divisor = (1.0 if self.fnorm == "none" else std(values)) + self.epsilon
        return [(value - mean(values)) / divisor for value in values]


class _Tally:
    """What the metrics of GiGPO count."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.stds: list[float] = []
        self.sizes: list[int] = []
        self.abs_episode: list[float] = []
        self.abs_step: list[float] = []
        self.groups_of_one = 0

    def metrics(self, n_rows: int) -> dict[str, float]:
        shared = [size for size in self.sizes if size > 1]
        return {
            **spread("gigpo/episode_reward_mean", self.means),
            **spread("gigpo/episode_reward_std", self.stds),
            "anchor_groups_total": float(len(self.sizes)),
            "anchor_groups_size_gt1": float(len(shared)),
            "anchor_group_hit_ratio": sum(shared) / max(sum(self.sizes), 1),
            "mean_abs_A_E": mean(self.abs_episode),
            "mean_abs_A_S": mean(self.abs_step),
            "group_of_one_count": float(self.groups_of_one),
            "experience_count": float(n_rows),
        }

"""Group-relative advantages of runs with several steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from trinity_dask.algorithm.advantages.base import ADVANTAGE_FN
from trinity_dask.algorithm.advantages.groups import (
    GroupOfOneWarning,
    group_by_run,
    group_by_task,
    group_metrics,
    is_flat,
    mean,
    std,
    write,
)
from trinity_dask.algorithm.advantages.grpo import check_scaling, is_dropped
from trinity_dask.algorithm.advantages.runs import run_reward


@ADVANTAGE_FN.register_module("step_wise_grpo")
class StepWiseGRPOAdvantage:
    """A = (r − mean) / (s + epsilon) of the run's last reward, given to each of its steps.

    Every run counts once in its task's mean and std, however many steps it has; with
    ``enable_step_norm`` the advantage is divided by the run's number of steps. The other
    arguments are those of ``grpo``.
    """

    def __init__(
        self,
        epsilon: float = 1e-6,
        enable_step_norm: bool = False,
        std_threshold: Optional[float] = None,
        std_cal_level: str = "group",
    ) -> None:
        check_scaling(epsilon, std_threshold, std_cal_level)
        self.epsilon = epsilon
        self.step_norm = enable_step_norm
        self.std_threshold = std_threshold
        self.std_cal_level = std_cal_level
        self._warn = GroupOfOneWarning()

    def __call__(self, experiences: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
        tasks = {tid: group_by_run(rows) for tid, rows in group_by_task(experiences).items()}
        rewards = {
            tid: {rid: r for rid, rows in runs.items() if (r := run_reward(rows)) is not None}
            for tid, runs in tasks.items()
        }
        values = {tid: list(of_runs.values()) for tid, of_runs in rewards.items()}
        self._warn([len(group) for group in values.values()])
        batch_std = std([r for group in values.values() for r in group])
        kept = [tid for tid in tasks if not is_dropped(values[tid], self.std_threshold)]
        for tid in kept:
            self._score_task(tasks[tid], rewards[tid], batch_std)
        wanted = set(kept)
        result = [row for row in experiences if row.eid.tid in wanted]
        metrics = group_metrics(values, len(experiences), len(result))
        metrics["unscored_count"] = float(sum(len(runs) for runs in tasks.values())) - sum(
            map(len, values.values())
        )
        return result, metrics | {
            "experience_count": float(len(result)),
            "skipped_group_ratio": 1.0 - len(kept) / len(tasks) if tasks else 0.0,
        }

    def _score_task(
        self, runs: dict[str, list[Any]], rewards: dict[str, float], batch_std: float
    ) -> None:
        values = list(rewards.values())
        width = batch_std if self.std_cal_level == "batch" else std(values)
        divisor = 1.0 if self.std_cal_level == "none" else width + self.epsilon
        for rid, rows in runs.items():
            scored = rid in rewards and not is_flat(values)
            score = (rewards[rid] - mean(values)) / divisor if scored else 0.0
            for row in rows:
                write(row, score / len(rows) if self.step_norm else score)

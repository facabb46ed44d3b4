"""The greedy run that a group's rewards are compared with (ReMax, arXiv 2310.10505).

Invariant: the greedy run is no experience: nothing of it is trained on, only its reward
leaves, in ``info["reward_baseline"]`` of every experience of the group.
"""

from __future__ import annotations

from dataclasses import replace

from trinity_dask.explorer.rollout.runs import Runs
from trinity_dask.explorer.schedule.outcome import RunError
from trinity_dask.workflows import Task

BASELINE = "reward_baseline"


def greedy_task(task: Task) -> Task:
    """``task`` once, at temperature 0."""
    rollout_args = {**task.rollout_args, "temperature": 0.0}
    return replace(task, rollout_args=rollout_args, repeat_times=1, greedy_baseline=False)


def with_baseline(runs: Runs, greedy: Runs, n: int) -> Runs:
    """``runs`` with the reward of the greedy run, that of its last experience.

    Without it the group is of no use to its algorithm, so then all ``n`` runs count as failed.
    """
    if greedy.errors:
        return Runs(errors=[greedy.errors[0]] * n, retryable=greedy.retryable)
    reward = greedy.experiences[-1].reward
    if reward is None:
        error = RunError("ValueError", "the greedy baseline run came back without a reward")
        return Runs(errors=[error] * n)
    for experience in runs.experiences:
        experience.info[BASELINE] = float(reward)
    for metrics in runs.metrics:
        metrics[BASELINE] = float(reward)
    return runs

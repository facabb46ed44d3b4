"""The rules of scheduling, and the instructions that follow from them.

Invariant: plain data; the limit of an attempt never depends on evaluation tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from trinity_dask.config.fields import choices_of
from trinity_dask.config.schema import ExplorerConfig, OverRolloutConfig
from trinity_dask.explorer.schedule.tasks import AttemptOutcome, BatchId, SubTask

KEEP, REPLACE, DROP = choices_of(ExplorerConfig, "partial_group")


@dataclass(frozen=True)
class SchedulePolicy:
    """The rules. Times in seconds.

    ``attempt_timeout_s`` is enforced where the attempt runs; ``attempt_slack_s`` later the
    scheduler gives up an attempt that did not even report that. ``dynamic_ratio`` shortens
    it to a multiple of the mean training sub-task, once ``warmup_min_steps`` train batches
    are complete.
    """

    max_attempts: int = 3
    attempt_timeout_s: float = ExplorerConfig.max_timeout_s
    attempt_slack_s: float = 10.0
    fetch_timeout_s: float = 90.0  # from the end of an attempt until its payload is here
    batch_timeout_s: float = 5460.0
    recall_s: float = 5.0  # for attempts of a batch that is cut off to bring what they have
    max_repeat_times_per_runner: Optional[int] = None
    partial_group: str = KEEP
    return_partial_tasks: bool = True
    wait_after_min_s: float = OverRolloutConfig.wait_after_min_s
    dynamic_ratio: Optional[float] = None
    warmup_min_steps: int = 1
    failed_runs: int = 0  # of a batch that are remembered one by one

    @classmethod
    def from_config(cls, cfg: ExplorerConfig) -> SchedulePolicy:
        attempts = cfg.max_retry_times + 1
        dynamic = cfg.dynamic_timeout
        return cls(
            max_attempts=attempts,
            attempt_timeout_s=cfg.max_timeout_s,
            batch_timeout_s=cfg.batch_timeout_s or cfg.longest_batch_s,
            max_repeat_times_per_runner=cfg.max_repeat_times_per_runner,
            partial_group=cfg.partial_group,
            return_partial_tasks=cfg.over_rollout.return_partial_tasks,
            wait_after_min_s=cfg.over_rollout.wait_after_min_s,
            dynamic_ratio=dynamic.ratio if dynamic.enable else None,
            warmup_min_steps=dynamic.warmup_min_steps,
        )

    def tries_again(self, sub_task: SubTask, outcome: AttemptOutcome) -> bool:
        """Whether another attempt follows one that ended like this."""
        status = outcome.status
        if status.ok or not outcome.retryable or sub_task.attempts >= self.max_attempts:
            return False
        return not status.completed_runs or self.partial_group != KEEP

    @property
    def keep_partial(self) -> bool:
        """Whether finished runs of an unfinished group are of use."""
        return self.partial_group != DROP


class Pace:
    """How long training sub-tasks take, for the dynamic timeout.

    What succeeded says so, and what failed after a longer time than usual: it would have taken
    at least as long. So the limit grows again where tasks get longer. A failure may also be quick;
    that would shorten the time of the next attempts until these fail too.
    """

    def __init__(self, policy: SchedulePolicy) -> None:
        self._policy = policy
        self.total_running_time_s = 0.0
        self.total_completed_sub_tasks = 0
        self.completed_steps = 0

    def sub_task_done(self, outcome: AttemptOutcome) -> None:
        """An attempt has ended."""
        n = self.total_completed_sub_tasks
        slow = n > 0 and outcome.seconds * n > self.total_running_time_s
        if outcome.seconds > 0 and (outcome.status.ok or slow):
            self.total_running_time_s += outcome.seconds
            self.total_completed_sub_tasks = n + 1

    def limit_s(self, is_eval: bool = False) -> float:
        """Seconds that an attempt may take now."""
        policy = self._policy
        warm = self.completed_steps >= policy.warmup_min_steps and self.total_completed_sub_tasks
        if is_eval or policy.dynamic_ratio is None or not warm:
            return policy.attempt_timeout_s
        usual = self.total_running_time_s / self.total_completed_sub_tasks
        return min(policy.attempt_timeout_s, policy.dynamic_ratio * usual)


@dataclass(frozen=True)
class Submit:
    """Execute a sub-task in a lane of a worker for at most ``timeout_s``."""

    attempt_id: int
    sub_task: SubTask
    worker: str
    lane: int
    timeout_s: float


@dataclass(frozen=True)
class Cancel:
    """Stop an attempt; its report, should it still come, is ignored."""

    attempt_id: int


@dataclass(frozen=True)
class Recall:
    """Ask an attempt to come back now with the runs it has finished."""

    attempt_id: int


@dataclass(frozen=True)
class Ask:
    """Ask an attempt's worker whether it has begun, and how long ago. Workers of other explorers
    may be the same ones, so it may still wait there; the answer is ``SchedulerState.begun``."""

    attempt_id: int


@dataclass(frozen=True)
class Restart:
    """Kill a worker: something there neither ends nor lets itself be ended."""

    worker: str


@dataclass(frozen=True)
class Emit:
    """A task of the batch was finished; ``complete`` when it was the last one."""

    batch_id: BatchId
    complete: bool


Instruction = Submit | Cancel | Recall | Restart | Emit | Ask

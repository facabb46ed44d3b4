"""Where the explorer's tasks come from.

Invariant: the position after a batch was read is that batch's state; restoring it makes the
next batch the one that would have followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Optional

from trinity_dask.algorithm.table import resolve_algorithm
from trinity_dask.buffer.data.taskset import Taskset
from trinity_dask.buffer.data.taskset_mix import SELECTOR_METRIC, TasksetScheduler
from trinity_dask.buffer.errors import EndOfTasks
from trinity_dask.config import modes
from trinity_dask.config.schema import Config, TasksetConfig
from trinity_dask.registry import load_plugins
from trinity_dask.workflows import Task

WHOLE_SET = 1 << 31  # tasks; an evaluation reads its set in one batch


class TasksetReader:
    """The training tasksets, mixed, and the eval tasksets of a config.

    Raises:
        DataError: a file or column is missing (named).
        ValueError: two eval tasksets have one name.
    """

    def __init__(self, cfg: Config) -> None:
        source = cfg.buffer.explorer_input
        self._defaults: dict[str, Any] = {
            "default_workflow": source.default_workflow,
            "default_reward_fn": source.default_reward_fn,
        }
        self._train = self._open_train(cfg) if modes.explores(cfg.mode) else None
        names = [c.name or f"eval_{i}" for i, c in enumerate(source.eval_tasksets)]
        if len(set(names)) < len(names):
            raise ValueError(f"eval_tasksets need different names (got {names})")
        self.evals = dict(zip(names, map(self._eval, source.eval_tasksets), strict=True))

    def _open_train(self, cfg: Config) -> TasksetScheduler:
        load_plugins(cfg.plugin_dirs)  # they may register a function of the algorithm
        spec = resolve_algorithm(asdict(cfg.algorithm))
        return TasksetScheduler(
            cfg.buffer.explorer_input.train_tasksets,
            batch_size=cfg.buffer.batch_size,
            total_epochs=cfg.buffer.total_epochs,
            total_steps=cfg.buffer.total_steps,
            feedback_lag=cfg.explorer.max_inflight_batches,
            default_repeat_times=cfg.algorithm.repeat_times or spec.repeat_times,
            greedy_baseline=spec.needs_greedy_baseline,
            **self._defaults,
        )

    @property
    def train(self) -> TasksetScheduler:
        """The training tasks. Raises RuntimeError in a mode that only evaluates."""
        if self._train is None:
            raise RuntimeError("this mode has no training tasks")
        return self._train

    def _eval(self, cfg: TasksetConfig) -> Taskset:
        return Taskset(cfg, batch_size=WHOLE_SET, is_eval=True, **self._defaults)

    def read(self) -> Optional[list[Task]]:
        """The next training batch, or None at the end."""
        try:
            return self.train.read()
        except EndOfTasks:
            return None

    def read_more(self) -> list[Task]:
        """Tasks for another batch, which the schedule does not count: for a refill."""
        return self.train.read_extra(self.train.batch_size)

    def feedback(self, metric: Mapping[str, Any], step: int) -> None:
        """Tell the selectors how the batch of ``step`` went."""
        self.train.feedback({SELECTOR_METRIC: metric}, step)

    def read_eval(self, name: str) -> list[Task]:
        """Every task of an eval taskset."""
        taskset = self.evals[name]
        taskset.reset()
        try:
            return taskset.read()
        except EndOfTasks:
            return []

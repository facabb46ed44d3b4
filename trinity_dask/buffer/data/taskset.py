"""A taskset: batches of tasks from a file, in a resumable order.

Invariant: the state is the count of tasks given so far and what the selector knows.
Training reads whole batches only, ``total_steps`` of them or as many as ``total_epochs``
hold; evaluation reads every row once, the last batch shorter.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trinity_dask.buffer.data.readers import RowReader
from trinity_dask.buffer.data.selectors import Selector, make_selector
from trinity_dask.buffer.errors import DataError, EndOfTasks
from trinity_dask.config.schema import FormatConfig, TasksetConfig
from trinity_dask.experience.task import Task

log = logging.getLogger(__name__)


def prompt_column(fmt: FormatConfig) -> str:
    """The column that must hold the prompt (or the messages)."""
    return fmt.messages_key if fmt.prompt_type == "messages" else fmt.prompt_key


class Taskset:
    """Reads the rows of ``cfg.path`` as :class:`Task` batches.

    A row must have a value in the prompt column, and in ``format.response_key`` when a
    reward function is set; an empty key name switches its check off.

    Args:
        batch_size: tasks per :meth:`read`.
        total_epochs: passes over the file when ``total_steps`` is None (training only).
        default_workflow, default_reward_fn, default_repeat_times: used where ``cfg`` has
            none; an evaluation repeats once by default.
        taskset_id: written into every task's ``index``.
        greedy_baseline: of every training task.

    Raises:
        DataError: the file is missing or a row lacks a column (file, row, column named).
    """

    def __init__(
        self,
        cfg: TasksetConfig,
        *,
        batch_size: int,
        total_epochs: int = 1,
        total_steps: int | None = None,
        is_eval: bool = False,
        default_workflow: str | None = None,
        default_reward_fn: str | None = None,
        default_repeat_times: int | None = None,
        taskset_id: int = 0,
        greedy_baseline: bool = False,
    ) -> None:
        self.cfg = cfg
        self.name = cfg.name or cfg.path
        self.batch_size = batch_size
        self.is_eval = is_eval
        self._taskset_id = taskset_id
        self._reader = RowReader(cfg.path, cfg.split, self.name)
        self._template = self._new_template(
            default_workflow, default_reward_fn, default_repeat_times
        )
        self._template.greedy_baseline = greedy_baseline and not is_eval
        self._require_columns()
        steps = None if is_eval else total_steps
        epochs = 1 if is_eval else total_epochs
        self.total_tasks = steps * batch_size if steps else epochs * len(self._reader)
        self._selector = self._new_selector()
        self._read = 0

    def _new_template(
        self, workflow: str | None, reward_fn: str | None, repeat_times: int | None
    ) -> Task:
        cfg = self.cfg
        chosen = cfg.workflow or workflow
        if chosen is None:
            raise DataError(
                f"taskset {self.name!r} has no workflow; set its workflow key, or "
                "buffer.explorer_input.default_workflow"
            )
        default_repeat = 1 if self.is_eval else repeat_times or 1
        return Task(
            workflow=chosen,
            reward_fn=cfg.reward_fn or reward_fn,
            repeat_times=cfg.repeat_times or default_repeat,
            format_args=asdict(cfg.format),
            rollout_args={k: v for k, v in asdict(cfg.rollout_args).items() if v is not None},
            workflow_args=dict(cfg.workflow_args),
            reward_fn_args=dict(cfg.reward_fn_args),
            is_eval=self.is_eval,
        )

    def _require_columns(self) -> None:
        fmt = self.cfg.format
        needed = [prompt_column(fmt)]
        if self._template.reward_fn:
            needed.append(fmt.response_key)
        self._reader.require([column for column in needed if column])

    def _new_selector(self) -> Selector:
        return make_selector(self.cfg.data_selector, self._reader)

    def __len__(self) -> int:
        """Rows in the file."""
        return len(self._reader)

    @property
    def total_batches(self) -> int:
        """Batches that :meth:`read` gives from the start to the end."""
        whole, rest = divmod(self.total_tasks, self.batch_size)
        return whole + (1 if rest and self.is_eval else 0)

    def read(self) -> list[Task]:
        """The next batch. Raises :class:`EndOfTasks` when there is none."""
        left = self.total_tasks - self._read
        count = min(self.batch_size, left) if self.is_eval else self.batch_size
        if left <= 0 or count > left:
            raise EndOfTasks(f"taskset {self.name!r} gave all its {self._read} tasks")
        return self.take(count)

    def take(self, count: int) -> list[Task]:
        """The next ``count`` tasks in the selector's order, which goes round without an end."""
        indices = self._selector.get_indices(count)
        self._read += count
        return [self._task(index) for index in indices]

    def _task(self, index: int) -> Task:
        task = copy.deepcopy(self._template)  # a workflow may write into its arguments
        task.raw_task = self._reader[index]
        task.index = {"index": index, "taskset_id": self._taskset_id}
        fmt = self.cfg.format
        task.workflow = task.raw_task.get(fmt.workflow_key) or task.workflow
        task.reward_fn = task.raw_task.get(fmt.reward_fn_key) or task.reward_fn
        return task

    def update(self, indices: Sequence[int], values: Sequence[float]) -> None:
        """Tell the selector what was observed on rows ``indices``."""
        self._selector.update(indices, values)

    def reset(self) -> None:
        """Start again from the first task (each evaluation does)."""
        self._selector = self._new_selector()
        self._read = 0

    def state_dict(self) -> dict[str, Any]:
        """The position and the selector's knowledge, as JSON."""
        return {
            "read": self._read,
            "rows": len(self._reader),
            "selector": self._selector.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`: the next batch is the one after the saved ones."""
        if state["rows"] != len(self._reader):
            log.warning(
                "taskset %r had %d rows when its position was saved and has %d now; "
                "tasks may be repeated or left out",
                self.name,
                state["rows"],
                len(self._reader),
            )
        self._read = int(state["read"])
        self._selector.load_state_dict(state.get("selector", {"position": self._read}))

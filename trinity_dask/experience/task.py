"""A task: one row of a taskset together with how to run it.

Invariant: a task is plain data. Workflow and reward are *names*, resolved on the worker
that runs the task, so a task crosses process borders without carrying code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


class Args(dict[str, Any]):
    """A mapping whose entries are attributes too, as Trinity-RFT's workflows read them.

    A parameter that is not given is None.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy and pickle ask for
            raise AttributeError(name)
        return self.get(name)


@dataclass
class Task:
    """One question of a taskset, and how often and by which workflow it is answered.

    ``raw_task`` is the data set row as read. ``format_args`` are the fields of
    :class:`~trinity_dask.config.schema.FormatConfig`; ``rollout_args`` the sampling
    overrides (``temperature``, ``top_p``, ``top_k``, ``max_tokens``). ``repeat_times``
    is the group size in runs; ``greedy_baseline`` adds a run at temperature 0, whose reward
    becomes ``info["reward_baseline"]`` of the others. ``batch_id`` and ``task_id`` are
    stamped when the task is scheduled; ``index`` tells where the row came from
    (``{"index": i, "taskset_id": k}``), ``source`` its file and row, for messages. ``keep_rows``:
    the experiences of an evaluation are wanted too, to be looked at.
    """

    workflow: str
    reward_fn: Optional[str] = None
    raw_task: dict[str, Any] = field(default_factory=dict)
    repeat_times: int = 1
    format_args: dict[str, Any] = field(default_factory=dict)
    rollout_args: dict[str, Any] = field(default_factory=dict)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    greedy_baseline: bool = False
    batch_id: int | str = ""
    task_id: int | str = ""
    index: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    keep_rows: bool = False

    def __post_init__(self) -> None:
        self.format_args, self.rollout_args = Args(self.format_args), Args(self.rollout_args)
        if self.repeat_times < 1:
            raise ValueError(f"a task is run at least once (got repeat_times={self.repeat_times})")

    def column(self, kind: str, default: str) -> Any:
        """The row's value in the column that ``format_args`` names for ``kind``, or None."""
        key = self.format_args.get(kind) or default
        return self.raw_task.get(key)

    @property
    def wants_rows(self) -> bool:
        """Whether its experiences are of use, and not only what was measured."""
        return self.keep_rows or not self.is_eval

    @property
    def task_desc(self) -> Any:
        """The prompt of the row, or None when the row has no such column."""
        return self.column("prompt_key", "prompt")

    @property
    def truth(self) -> Any:
        """The expected answer of the row, or None when the row has no such column."""
        return self.column("response_key", "response")

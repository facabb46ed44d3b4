"""Tasksets: batches of tasks from files, in a resumable order; several mixed by their sizes.

Invariant: which tasks a batch holds is a function of the state alone, and the state is
complete: positions, what each selector has learned, and what was observed but is not to be
learned yet. So a run that is resumed at any step reads the batches of one that was not.
Training reads whole batches only; evaluation reads every row once, the last batch shorter.

How an explorer uses it::

    tasksets = TasksetScheduler(cfgs, batch_size=..., ..., feedback_lag=max_inflight_batches)
    tasks = tasksets.read()                      # raises EndOfTasks
    state = tasksets.state_dict()                # stored with the batch of these tasks
    tasksets.feedback(metrics, step)             # of a committed batch; pops selector_metric

and after a restart: ``load_state_dict`` of the last committed batch, then ``feedback`` of the
last ``feedback_lag`` committed batches (a step's second feedback is ignored).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from trinity_dask.buffer.data.prompts import check_text, prompt_of
from trinity_dask.buffer.data.readers import RowReader, compare_data
from trinity_dask.buffer.data.selectors import make_selector
from trinity_dask.buffer.data.skipping import Skipping
from trinity_dask.buffer.errors import DataError, EndOfTasks
from trinity_dask.buffer.store.ranges import Ranges
from trinity_dask.config.schema import TasksetConfig
from trinity_dask.experience.task import Task

SELECTOR_METRIC = "selector_metric"
State = dict[str, Any]
Observed = dict[str, dict[str, list[Any]]]  # taskset id -> {"indices": [...], "values": [...]}


class Taskset:
    """Reads the rows of ``cfg.path`` as :class:`Task` batches.

    A row must have a value in the prompt column, and in ``format.response_key`` when a
    reward function is set; an empty key name switches its check off. The next row that has
    them takes the place of one that has not; an evaluation leaves it out.

    Args:
        batch_size: tasks per :meth:`read`.
        total_epochs: passes over the file when ``total_steps`` is None (training only).
        default_workflow, default_reward_fn, default_repeat_times: used where ``cfg`` has
            none; an evaluation repeats once by default.
        taskset_id: written into every task's ``index``.
        greedy_baseline: of every training task.
        accept_other_data: a saved position in other data is used, with a warning.

    Raises:
        DataError: the file is missing, or no row of a sample has a column (one lacks it, with
            ``format.empty_rows=refuse``); file, row and column are named.
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
        accept_other_data: bool = True,
    ) -> None:
        self.cfg = cfg
        self.name = cfg.name or cfg.path
        self.batch_size = batch_size
        self.is_eval = is_eval
        self._taskset_id = taskset_id
        self._reader = RowReader.of(cfg)
        workflow = cfg.workflow or default_workflow
        if workflow is None:
            raise DataError(
                f"taskset {self.name!r} has no workflow; set its workflow key, or "
                "buffer.explorer_input.default_workflow"
            )
        fmt = cfg.format
        self._template = Task(
            workflow=workflow,
            reward_fn=cfg.reward_fn or default_reward_fn,
            repeat_times=cfg.repeat_times or (1 if is_eval else default_repeat_times or 1),
            format_args=asdict(fmt),
            rollout_args={k: v for k, v in asdict(cfg.rollout_args).items() if v is not None},
            workflow_args=dict(cfg.workflow_args),
            reward_fn_args=dict(cfg.reward_fn_args),
            is_eval=is_eval,
            greedy_baseline=greedy_baseline and not is_eval,
        )
        needed = [fmt.messages_key if fmt.prompt_type == "messages" else fmt.prompt_key]
        if self._template.reward_fn:
            needed.append(fmt.response_key)
        self._needed = [column for column in needed if column]
        self._reader.require(self._needed, some=fmt.empty_rows == "skip")
        self._skipping = Skipping(self.name, len(self._reader), fmt)
        self._accept_other_data = accept_other_data
        steps = None if is_eval else total_steps
        epochs = 1 if is_eval else total_epochs
        self.total_tasks = steps * batch_size if steps else epochs * len(self._reader)
        self._selector = make_selector(cfg.data_selector, self._reader)
        self._read = 0

    def __len__(self) -> int:
        """Rows in the file."""
        return len(self._reader)

    @property
    def skipped(self) -> int:
        """Rows that could not be used, of those looked at so far."""
        return self._skipping.count

    @property
    def total_batches(self) -> int:
        """Batches that :meth:`read` gives from the start to the end."""
        whole, rest = divmod(self.total_tasks, self.batch_size)
        return whole + (1 if rest and self.is_eval else 0)

    def read(self) -> list[Task]:
        """The next batch: whole in training, at the end of an evaluation a shorter one.

        Raises:
            EndOfTasks: there is none.
        """
        left = self.total_tasks - self._read
        count = min(self.batch_size, left) if self.is_eval else self.batch_size
        if left <= 0 or count > left:
            raise EndOfTasks(f"taskset {self.name!r} gave all its {self._read} tasks")
        return self.take(count)

    def take(self, count: int) -> list[Task]:
        """The next ``count`` tasks in the selector's order, which goes round without an end."""
        indices = self._selector.get_indices(count)
        self._read += count
        if self.is_eval:  # another row in its place would be evaluated twice
            tried = [self._skipping.attempt(index, self.task) for index in indices]
            return [task for task in tried if task is not None]
        return [self._skipping.usable(index, self.task) for index in indices]

    def task(self, index: int) -> Task:
        """The task of a row. Raises UnusableRow when it is empty, DataError for no text."""
        row, fmt, where = self._reader[index], self.cfg.format, self._reader.where(index)
        self._reader.check(index, row, self._needed)
        for column in self._needed:
            check_text(row[column], f"{where}: column {column!r}")
        if fmt.messages_key if fmt.prompt_type == "messages" else fmt.prompt_key:
            prompt_of(row, fmt, where)  # refused here, not by each worker
        task = copy.deepcopy(self._template)  # a workflow may write into its arguments
        task.raw_task, task.source = row, where
        task.index = {"index": index, "taskset_id": self._taskset_id}
        task.workflow = row.get(fmt.workflow_key) or task.workflow
        task.reward_fn = row.get(fmt.reward_fn_key) or task.reward_fn
        return task

    def update(self, indices: Sequence[int], values: Sequence[float]) -> None:
        """Tell the selector what was observed on rows ``indices``."""
        self._selector.update(indices, values)

    @property
    def learned_keys(self) -> tuple[str, ...]:
        """What of the selector's state its updates alone decide."""
        return tuple(getattr(self._selector, "LEARNED", ()))

    def reset(self) -> None:
        """Start again from the first task (each evaluation does)."""
        self._selector = make_selector(self.cfg.data_selector, self._reader)
        self._read = 0

    def state_dict(self) -> dict[str, Any]:
        """The position and the selector's knowledge, as JSON."""
        return {
            "read": self._read,
            "rows": len(self._reader),
            "fingerprint": self._reader.fingerprint,
            "selector": self._selector.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue after :meth:`state_dict`: the next batch is the one after the saved ones.

        Returns whether the data is what it was; of other data only the position is taken, not
        what a selector had learned of the rows.

        Raises:
            DataError: the data is not what it was, and that is not accepted.
        """
        known = compare_data(self._reader, state, accept=self._accept_other_data)
        self._read = int(state["read"])
        selector = state.get("selector", {"position": self._read})
        self._selector.load_state_dict(selector if known else {"position": selector["position"]})
        return known


class TasksetScheduler:
    """Training batches from one or more tasksets.

    Epoch ``e`` is the list that has the number of each taskset as often as the taskset has
    rows, shuffled by ``default_rng(e)``. A batch takes the next ``batch_size`` numbers,
    over the epoch's edge where needed; each taskset, in order of first appearance, then
    gives its share by its own selector. ``task.index`` is ``{"index", "taskset_id"}``.

    Args:
        cfgs: the tasksets; the place in the list is the ``taskset_id``.
        total_epochs: passes over all rows when ``total_steps`` is None; whole batches only.
        feedback_lag: feedback of step s is learned before step ``s + feedback_lag`` is read,
            not earlier, however early it comes: the order of batches must not hang on which
            batch happened to finish first. Set it to the number of batches in flight.
        defaults: ``default_workflow`` etc. of :class:`Taskset`.

    Raises:
        DataError: a file or column is missing (named), or there is not one whole batch.
        ValueError: no taskset.
    """

    def __init__(
        self,
        cfgs: Sequence[TasksetConfig],
        *,
        batch_size: int,
        total_epochs: int = 1,
        total_steps: int | None = None,
        feedback_lag: int = 1,
        **defaults: Any,
    ) -> None:
        if not cfgs:
            raise ValueError("no taskset: set buffer.explorer_input.taskset or .tasksets")
        self.tasksets = [
            Taskset(cfg, batch_size=batch_size, taskset_id=number, **defaults)
            for number, cfg in enumerate(cfgs)
        ]
        self.batch_size = batch_size
        self.total_batches = total_steps or total_epochs * len(self) // batch_size
        if self.total_batches == 0:
            raise DataError(
                f"the tasksets have {len(self)} rows, in {total_epochs} epochs fewer than one "
                f"batch of buffer.batch_size={batch_size}; lower it, or raise buffer.total_epochs"
            )
        self.feedback_lag = feedback_lag
        self._steps = 0  # batches read
        self._taken = 0  # tasks given, those of read_extra included
        self._learned = 0  # feedback up to this step is learned
        self._received = Ranges()  # steps whose feedback has come
        self._pending: dict[int, Observed] = {}  # step -> feedback to be learned later
        # number of a taskset -> last step whose rows were those of other data
        self._other_until: dict[str, int] = {}
        self._order: tuple[int, np.ndarray] | None = None  # epoch, its list

    def __len__(self) -> int:
        """Rows in all files."""
        return sum(map(len, self.tasksets))

    @property
    def skipped(self) -> int:
        """Rows that could not be used, of those looked at so far."""
        return sum(taskset.skipped for taskset in self.tasksets)

    # -- reading --------------------------------------------------------------------

    def read(self) -> list[Task]:
        """The next batch. Raises :class:`EndOfTasks` when there is none."""
        if self._steps >= self.total_batches:
            raise EndOfTasks(f"the tasksets gave all their {self._steps} batches")
        self._steps += 1
        due = self._steps - self.feedback_lag
        for step in sorted(step for step in self._pending if step <= due):
            self._learn(self._pending.pop(step))
        self._learned = max(self._learned, due)
        return self.read_extra(self.batch_size)

    def read_extra(self, count: int) -> list[Task]:
        """``count`` further tasks for the batch that was read last.

        They move the position but not the schedule, which counts batches: a refill neither
        ends the training earlier nor changes its number of steps.
        """
        numbers: list[int] = []
        while len(numbers) < count:
            epoch, offset = divmod(self._taken + len(numbers), len(self))
            if self._order is None or self._order[0] != epoch:
                order = np.repeat(np.arange(len(self.tasksets)), [len(t) for t in self.tasksets])
                np.random.default_rng(epoch).shuffle(order)
                self._order = (epoch, order)
            numbers += self._order[1][offset : offset + count - len(numbers)].tolist()
        self._taken += count
        shares = Counter(numbers)  # in order of first appearance
        return [task for number, n in shares.items() for task in self.tasksets[number].take(n)]

    # -- feedback -------------------------------------------------------------------

    def feedback(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Learn from a batch: pops ``selector_metric`` out of ``metrics``, if it is there.

        Its value is ``{taskset_id: {"indices": [...], "values": [...]}}``. With ``step``, the
        batch's number from 1, it is learned ``feedback_lag`` steps later, and a second time
        of the same step is ignored; without, it is learned now.

        Raises:
            ValueError: there is no such taskset or row.
        """
        observed = metrics.pop(SELECTOR_METRIC, None)
        if observed is None:
            return
        plain = self._checked(observed, step)
        if step is None:
            self._learn(plain)
        elif step not in self._received:
            self._received.add(step, step + 1)
            self._pending[step] = plain

    def _checked(self, observed: Mapping[Any, Mapping[str, Any]], step: int | None) -> Observed:
        """As plain JSON, without what is about rows of other data."""
        plain: Observed = {}
        if step is not None:
            until = self._other_until
            observed = {n: o for n, o in observed.items() if step > until.get(str(n), 0)}
        for key, found in observed.items():
            number = int(key)  # JSON has no integer keys
            if not 0 <= number < len(self.tasksets):
                raise ValueError(
                    f"feedback about taskset {number}; there are {len(self.tasksets)} tasksets"
                )
            indices = [int(index) for index in found["indices"]]
            if indices and not 0 <= min(indices) <= max(indices) < len(self.tasksets[number]):
                raise ValueError(
                    f"feedback about row {max(indices)} of taskset {number}, which has "
                    f"{len(self.tasksets[number])} rows"
                )
            values = [float(value) for value in found["values"]]
            plain[str(number)] = {"indices": indices, "values": values}
        return plain

    def _learn(self, observed: Observed) -> None:
        for number, found in observed.items():
            self.tasksets[int(number)].update(found["indices"], found["values"])

    # -- state ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next batches depend on, as JSON."""
        return {
            "steps": self._steps,
            "taken": self._taken,
            "learned": self._learned,
            "received": self._received.to_list(),
            "pending": [[step, observed] for step, observed in self._pending.items()],
            "other_until": dict(self._other_until),
            "tasksets": [taskset.state_dict() for taskset in self.tasksets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`, or after the state of a single ``Taskset``.

        Raises:
            ValueError: the state is that of another number of tasksets.
        """
        if "tasksets" not in state:
            taken, single = int(state["read"]), state
            state = {"steps": taken // self.batch_size, "taken": taken, "tasksets": [single]}
            state |= {"received": [], "pending": []}
        if len(state["tasksets"]) != len(self.tasksets):
            raise ValueError(
                f"the saved position is that of {len(state['tasksets'])} tasksets, the "
                f"configuration has {len(self.tasksets)}; start a new job directory"
            )
        self._steps, self._taken = int(state["steps"]), int(state["taken"])
        self._learned = int(state.get("learned", max(self._steps - self.feedback_lag, 0)))
        self._received = Ranges(state["received"])
        self._pending = {int(step): dict(observed) for step, observed in state["pending"]}
        self._other_until = dict(state.get("other_until", {}))
        for number, saved in enumerate(state["tasksets"]):
            if not self.tasksets[number].load_state_dict(saved):
                self._other_until[str(number)] = self._steps
                for observed in self._pending.values():
                    observed.pop(str(number), None)

    def split(self, state: State) -> tuple[State, State]:
        """A :meth:`state_dict` without what selectors learned, and that alone."""
        slim, apart = [], []
        for taskset, saved in zip(self.tasksets, state["tasksets"], strict=True):
            keys, selector = taskset.learned_keys, saved["selector"]
            rest = {key: value for key, value in selector.items() if key not in keys}
            slim.append({**saved, "selector": rest})
            learned = {key: selector[key] for key in keys if key in selector}
            apart.append({"fingerprint": saved["fingerprint"], "selector": learned})
        return {**state, "tasksets": slim}, {"learned": state["learned"], "tasksets": apart}

    def joined(
        self, state: State, apart: State | None, told: Mapping[int, Mapping[str, Any]]
    ) -> State:
        """The whole of a state that was split.

        Args:
            apart: what had been learned at an earlier step; None, or that of a later step or of
                other data, for nothing.
            told: the ``selector_metric`` of every step. Those between ``apart`` and ``state`` are
                learned again, in the order of the steps as at the first time.
        """
        if "tasksets" not in state or "learned" not in state:
            return state  # of an earlier version, which did not split
        begun, mine = 0, [saved["fingerprint"] for saved in state["tasksets"]]
        theirs = [] if apart is None else [saved["fingerprint"] for saved in apart["tasksets"]]
        if apart is not None and apart["learned"] <= state["learned"] and mine == theirs:
            begun = apart["learned"]
            pairs = zip(state["tasksets"], apart["tasksets"], strict=True)
            whole = [{**a, "selector": {**a["selector"], **b["selector"]}} for a, b in pairs]
            state = {**state, "tasksets": whole}
        self.load_state_dict(state)
        for step in sorted(step for step in told if begun < step <= state["learned"]):
            self._learn(self._checked(told[step], step))
        return self.state_dict()

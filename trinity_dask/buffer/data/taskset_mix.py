"""Several tasksets as one stream of batches, mixed by their sizes.

Invariant: which tasks a batch holds is a function of the state alone, and the state is
complete: positions, what each selector has learned, and what was observed but is not to be
learned yet. So a run that is resumed at any step reads the batches of one that was not.

How an explorer uses it::

    tasksets = TasksetScheduler(cfgs, batch_size=..., ..., feedback_lag=max_inflight_batches)
    tasks = tasksets.read()                      # raises EndOfTasks
    state = tasksets.state_dict()                # stored with the batch of these tasks
    tasksets.feedback(metrics, step)             # of a committed batch; pops selector_metric

and after a restart: ``load_state_dict`` of the last committed batch, then ``feedback`` of the
last ``feedback_lag`` committed batches (a step's second feedback is ignored).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trinity_dask.buffer.data.taskset import Taskset
from trinity_dask.buffer.errors import DataError, EndOfTasks
from trinity_dask.buffer.store.ranges import Ranges
from trinity_dask.config.schema import TasksetConfig
from trinity_dask.experience.task import Task

log = logging.getLogger(__name__)

SELECTOR_METRIC = "selector_metric"
Observed = dict[str, dict[str, list[Any]]]  # taskset id -> {"indices": [...], "values": [...]}


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
        defaults: ``default_workflow`` etc. of :class:`~trinity_dask.buffer.data.taskset.Taskset`.

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
        self._received = Ranges()  # steps whose feedback has come
        self._pending: dict[int, Observed] = {}  # step -> feedback to be learned later
        self._order: tuple[int, np.ndarray] | None = None  # epoch, its list

    def __len__(self) -> int:
        """Rows in all files."""
        return sum(map(len, self.tasksets))

    # -- reading --------------------------------------------------------------------

    def read(self) -> list[Task]:
        """The next batch. Raises :class:`EndOfTasks` when there is none."""
        if self._steps >= self.total_batches:
            raise EndOfTasks(f"the tasksets gave all their {self._steps} batches")
        self._steps += 1
        self._learn_due()
        return self._take(self.batch_size)

    def read_extra(self, count: int) -> list[Task]:
        """``count`` further tasks for the batch that was read last.

        They move the position but not the schedule, which counts batches: a refill neither
        ends the training earlier nor changes its number of steps.
        """
        return self._take(count)

    def _take(self, count: int) -> list[Task]:
        numbers = self._numbers(count)
        self._taken += count
        shares = Counter(numbers)  # in order of first appearance
        return [task for number, n in shares.items() for task in self.tasksets[number].take(n)]

    def _numbers(self, count: int) -> list[int]:
        numbers: list[int] = []
        while len(numbers) < count:
            epoch, offset = divmod(self._taken + len(numbers), len(self))
            numbers += self._epoch_order(epoch)[offset : offset + count - len(numbers)].tolist()
        return numbers

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            order = np.repeat(np.arange(len(self.tasksets)), [len(t) for t in self.tasksets])
            np.random.default_rng(epoch).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

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
        plain = self._checked(observed)
        if step is None:
            self._learn(plain)
        elif step not in self._received:
            self._received.add(step, step + 1)
            self._pending[step] = plain

    def _checked(self, observed: Mapping[Any, Mapping[str, Any]]) -> Observed:
        plain: Observed = {}
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

    def _learn_due(self) -> None:
        due = self._steps - self.feedback_lag
        for step in sorted(step for step in self._pending if step <= due):
            self._learn(self._pending.pop(step))

    def _learn(self, observed: Observed) -> None:
        for number, found in observed.items():
            self.tasksets[int(number)].update(found["indices"], found["values"])

    # -- state ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next batches depend on, as JSON."""
        return {
            "steps": self._steps,
            "taken": self._taken,
            "received": self._received.to_list(),
            "pending": [[step, observed] for step, observed in self._pending.items()],
            "tasksets": [taskset.state_dict() for taskset in self.tasksets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after :meth:`state_dict`, or after the state of a single ``Taskset``.

        Raises:
            ValueError: the state is that of another number of tasksets.
        """
        if "tasksets" not in state:
            state = self._from_single(state)
        if len(state["tasksets"]) != len(self.tasksets):
            raise ValueError(
                f"the saved position is that of {len(state['tasksets'])} tasksets, the "
                f"configuration has {len(self.tasksets)}; start a new job directory"
            )
        self._steps, self._taken = int(state["steps"]), int(state["taken"])
        self._received = Ranges(state["received"])
        self._pending = {int(step): observed for step, observed in state["pending"]}
        for taskset, saved in zip(self.tasksets, state["tasksets"], strict=True):
            taskset.load_state_dict(saved)

    def _from_single(self, state: dict[str, Any]) -> dict[str, Any]:
        """The form of this class for a position that one taskset has saved by itself."""
        taken = int(state["read"])
        steps = taken // self.batch_size
        return {"steps": steps, "taken": taken, "received": [], "pending": [], "tasksets": [state]}

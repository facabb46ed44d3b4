"""The explorer's tasks: where they come from, and the state from which a resumed run reads on.

Invariant: the state stored with the commit of step *s* makes a resumed run read, for the steps
after *s*, the tasks that this run read for them. A refill takes further tasks while later
batches are in flight; those are then read again from the state they were read from, and
everything else continues from one position. What a selector learns from a step takes effect a
fixed number of steps later, so it is stored with the step and told again. All that it has learned
is large, so no commit stores it: it is the sum of what the steps told, and a file of it, which is
only written after a commit and hence never ahead of one, saves the summing from the first. While
a thread reads, nothing else looks at the reader's state or changes it: a commit stores the position
from before the read, and what a selector is told waits for its end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Optional

from trinity_dask.algorithm.table import resolve_algorithm
from trinity_dask.buffer.data.taskset import SELECTOR_METRIC, Taskset, TasksetScheduler
from trinity_dask.buffer.errors import EndOfTasks
from trinity_dask.config import modes
from trinity_dask.config.schema import Config
from trinity_dask.registry import load_plugins
from trinity_dask.workflows import Task

State = dict[str, Any]
KEEP_EVERY = 32  # steps learned between two files of what selectors know
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
        self.evals = {
            name: Taskset(taskset, batch_size=WHOLE_SET, is_eval=True, **self._defaults)
            for name, taskset in zip(names, source.eval_tasksets, strict=True)
        }

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
            accept_other_data=cfg.buffer.accept_other_data,
            **self._defaults,
        )

    @property
    def train(self) -> TasksetScheduler:
        """The training tasks. Raises RuntimeError in a mode that only evaluates."""
        if self._train is None:
            raise RuntimeError("this mode has no training tasks")
        return self._train

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


class TaskStream:
    """Reads train batches of ``reader``. Used on one event loop; files are read in threads."""

    def __init__(self, reader: TasksetReader) -> None:
        self._reader = reader
        self._before: dict[int, State] = {}  # of each step that is not committed
        self._pinned_to = 0  # steps up to this one were read before the order was disturbed
        self._replay: deque[State] = deque()
        self._observed: dict[int, Mapping[str, Any]] = {}
        self._reading = asyncio.Lock()
        self._position: Optional[State] = None  # where it goes on; set while a thread reads
        self._untold: list[tuple[int, Mapping[str, Any]]] = []  # feedback that came meanwhile
        self._kept_at = 0  # the step up to which the last `learned` goes
        self._learned: Optional[State] = None

    @property
    def skipped_rows(self) -> int:
        """Rows of the train files that could not be used, so far; others took their places."""
        return self._reader.train.skipped

    async def read(self, step: int) -> Optional[list[Task]]:
        """The tasks of ``step``, or None at the end."""
        async with self._reading:
            if self._replay:
                return await self._read_again(step)
            with self._position_kept() as before:
                tasks = await asyncio.to_thread(self._reader.read)
            if tasks is not None:
                self._before[step] = before
            return tasks

    async def _read_again(self, step: int) -> Optional[list[Task]]:
        self._before[step] = self._replay.popleft()
        self._pinned_to = step
        with self._position_kept() as now:
            self._reader.train.load_state_dict(self._before[step])
            try:
                return await asyncio.to_thread(self._reader.read)
            finally:
                self._reader.train.load_state_dict(now)

    async def read_more(self) -> list[Task]:
        """Further tasks, for a refill."""
        async with self._reading:
            with self._position_kept():
                tasks = await asyncio.to_thread(self._reader.read_more)
            self._pinned_to = max(self._before, default=self._pinned_to)
            return tasks

    @contextmanager
    def _position_kept(self) -> Iterator[State]:
        """Around a read in a thread; gives the position before it."""
        self._position = self._reader.train.state_dict()
        try:
            yield self._position
        finally:
            self._position = None
            untold, self._untold = self._untold, []
            for step, metric in untold:
                self._reader.feedback(metric, step)

    def feedback(self, step: int, metric: Mapping[str, Any]) -> None:
        """What the batch of ``step`` says about its tasks, for selectors that learn."""
        self._observed[step] = metric
        if self._position is None:
            self._reader.feedback(metric, step)
        else:
            self._untold.append((step, metric))

    # state ----------------------------------------------------------------------------
    def state_at(self, step: int) -> State:
        """``taskset_state`` (``replay``, ``selector_metric``) to store with the commit of
        ``step``."""
        self._before.pop(step, None)
        later = sorted(s for s in self._before if s > step)
        replay = [self._before[s] for s in later if s <= self._pinned_to]
        free = [self._before[s] for s in later if s > self._pinned_to]
        replay += list(self._replay)
        here = self._position or self._reader.train.state_dict()
        states = [free[0] if free else here, *replay]
        slim, apart = zip(*map(self._reader.train.split, states), strict=True)
        state: State = {"taskset_state": slim[0]}
        if step in self._observed:
            state["selector_metric"] = dict(self._observed.pop(step))
        # of the states that this commit or a later one stores, the first to be read again
        oldest = apart[1] if replay else apart[0]
        learns = any(saved["selector"] for saved in oldest["tasksets"])
        if learns and oldest["learned"] >= self._kept_at + KEEP_EVERY:
            self._learned, self._kept_at = oldest, oldest["learned"]
        return state | ({"replay": list(slim[1:])} if replay else {})

    def take_learned(self) -> Optional[State]:
        """What selectors know, when it is time to keep it: after the commit whose state was asked
        for last. Each is given once."""
        learned, self._learned = self._learned, None
        return learned

    def load(
        self,
        saved: Mapping[str, Any],
        recent: Iterable[tuple[int, Mapping[str, Any]]] = (),
        learned: Optional[State] = None,
        told: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Continue after the commit that stored ``saved``.

        Args:
            recent: the last steps with what was stored with them, ``saved`` included.
            learned: what :meth:`take_learned` gave last, if it was kept.
            told: the ``selector_metric`` of every committed step that has one.
        """
        train = self._reader.train
        self._before.clear()
        self._kept_at = 0 if learned is None else int(learned["learned"])
        self._replay = deque(train.joined(s, learned, told) for s in saved.get("replay", []))
        train.load_state_dict(train.joined(saved["taskset_state"], learned, told))
        for step, stored in recent:
            if "selector_metric" in stored:
                self._reader.feedback(stored["selector_metric"], step)

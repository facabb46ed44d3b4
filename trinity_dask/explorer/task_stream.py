"""The explorer's tasks, step by step, and the state from which a resumed run reads the same.

Invariant: the state stored with the commit of step *s* makes a resumed run read, for the steps
after *s*, the tasks that this run read for them. A refill takes further tasks while later
batches are in flight; those are then read again from the state they were read from, and
everything else continues from one position. What a selector learns from a step takes effect a
fixed number of steps later, so it is stored with the step and told again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Optional

from trinity_dask.explorer.taskset_reader import TasksetReader
from trinity_dask.workflows import Task

State = dict[str, Any]


class TaskStream:
    """Reads train batches of ``reader``. Used on one event loop; files are read in threads."""

    def __init__(self, reader: TasksetReader) -> None:
        self._reader = reader
        self._before: dict[int, State] = {}  # of each step that is not committed
        self._pinned_to = 0  # steps up to this one were read before the order was disturbed
        self._replay: deque[State] = deque()
        self._observed: dict[int, Mapping[str, Any]] = {}
        self._reading = asyncio.Lock()

    async def read(self, step: int) -> Optional[list[Task]]:
        """The tasks of ``step``, or None at the end."""
        async with self._reading:
            if self._replay:
                return await self._read_again(step)
            before = self._reader.train.state_dict()
            tasks = await asyncio.to_thread(self._reader.read)
            if tasks is not None:
                self._before[step] = before
            return tasks

    async def _read_again(self, step: int) -> Optional[list[Task]]:
        now = self._reader.train.state_dict()
        self._before[step] = self._replay.popleft()
        self._pinned_to = step
        self._reader.train.load_state_dict(self._before[step])
        try:
            return await asyncio.to_thread(self._reader.read)
        finally:
            self._reader.train.load_state_dict(now)

    async def read_more(self) -> list[Task]:
        """Further tasks, for a refill."""
        async with self._reading:
            tasks = await asyncio.to_thread(self._reader.read_more)
            self._pinned_to = max(self._before, default=self._pinned_to)
            return tasks

    def feedback(self, step: int, metric: Mapping[str, Any]) -> None:
        """What the batch of ``step`` says about its tasks, for selectors that learn."""
        self._observed[step] = metric
        self._reader.feedback(metric, step)

    # state ----------------------------------------------------------------------------
    def state_at(self, step: int) -> State:
        """``taskset_state`` (``replay``, ``selector_metric``) to store with the commit of
        ``step``."""
        self._before.pop(step, None)
        later = sorted(s for s in self._before if s > step)
        replay = [self._before[s] for s in later if s <= self._pinned_to]
        free = [self._before[s] for s in later if s > self._pinned_to]
        replay += list(self._replay)
        state = {"taskset_state": free[0] if free else self._reader.train.state_dict()}
        if step in self._observed:
            state["selector_metric"] = dict(self._observed.pop(step))
        return state | ({"replay": replay} if replay else {})

    def load(
        self, saved: Mapping[str, Any], recent: Iterable[tuple[int, Mapping[str, Any]]] = ()
    ) -> None:
        """Continue after the commit that stored ``saved``; ``recent`` are the last steps with
        what was stored with them, ``saved`` included."""
        self._before.clear()
        self._replay = deque(saved.get("replay", []))
        self._reader.train.load_state_dict(saved["taskset_state"])
        for step, stored in recent:
            if "selector_metric" in stored:
                self._reader.feedback(stored["selector_metric"], step)

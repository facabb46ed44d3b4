"""What each lane of a worker is doing: the live table.

Invariant: a worker runs one sub-task in each of its lanes at a time, but for one that was cut off
and cleans up, which changes nothing of its successor's; a lane keeps the facts of its last one
until the next begins.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional

STATE_CHARS = 200


@dataclass
class Lane:
    """One lane. ``begin_time`` and ``terminate_time`` are seconds since the epoch."""

    runner_id: int | str
    workflow_id: str = ""
    repeat_cnt: int = 0
    begin_time: float = 0.0
    terminate_time: Optional[float] = None
    models: list[Any] = field(default_factory=list)  # of the sub-task that runs
    first_version: Optional[int] = None  # of the model when the sub-task began
    final: dict[str, Any] = field(default_factory=dict)  # model facts of the last sub-task

    def add_model(self, model: Any) -> None:
        """A model that the sub-task uses."""
        self.models.append(model)
        if self.first_version is None:
            self.first_version = _version(model)

    def state(self) -> dict[str, Any]:
        """The lane's row, as values that any message can carry: others are shortened text.

        What workflows stored with ``set_workflow_state`` comes first, so that it cannot hide a
        fact of the lane.
        """
        until = self.terminate_time or time.time()
        row = {
            **(self.final if self.terminate_time else self.model_facts()),
            "runner_id": self.runner_id,
            "workflow_id": self.workflow_id,
            "repeat_cnt": self.repeat_cnt,
            "begin_time": self.begin_time,
            "terminate_time": self.terminate_time,
            "running_time": round(until - self.begin_time, 3),
        }
        simple = (int, float, str, type(None))
        return {
            str(key): value if type(value) in simple else str(value)[:STATE_CHARS]
            for key, value in row.items()
        }

    def versions(self) -> Optional[tuple[int, int]]:
        """Version of the model when the sub-task began, and now; None when it has none."""
        now = [version for model in self.models if (version := _version(model)) is not None]
        return None if self.first_version is None else (self.first_version, max(now))

    def model_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for model in self.models:
            facts.update(getattr(model, "get_workflow_state", dict)())
        versions = self.versions()
        facts["model_version"] = None if versions is None else versions[1]
        return facts


def _version(model: Any) -> Optional[int]:
    version = getattr(model, "model_version", None)
    return None if version is None else int(version)


class Lanes:
    """The lanes of one runner process; made as they are needed, numbered from 0."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lanes: dict[int | str, Lane] = {}
        self._free: list[int] = []
        self._n_own = 0

    @contextmanager
    def occupied(
        self, workflow_id: str, repeat_cnt: int, number: Optional[int] = None
    ) -> Iterator[Lane]:
        """Lane ``number``, or the lowest free one of our own, while a sub-task runs."""
        own = None
        if number is None:
            own = heapq.heappop(self._free) if self._free else self._n_own
            self._n_own = max(self._n_own, own + 1)
        key = number if own is None else f"{self._name}/{own}"
        assert key is not None
        # a new object: an attempt that was cut off may still clean up in the place it had
        self._lanes[key] = lane = Lane(key, workflow_id, repeat_cnt, time.time())
        try:
            yield lane
        finally:
            lane.terminate_time = time.time()
            lane.final = lane.model_facts()
            lane.models = []  # an idle lane holds no history of experiences
            if own is not None:
                heapq.heappush(self._free, own)

    def states(self) -> list[dict[str, Any]]:
        """A row of every lane that has run something, in order of first use."""
        return [lane.state() for lane in self._lanes.values()]

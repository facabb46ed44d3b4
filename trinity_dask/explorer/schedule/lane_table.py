"""Lanes as users see them (Trinity-RFT's runners): what each one does.

Invariant: a lane belongs to one worker for as long as that worker is known; its state is what
it does now, or did last.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from trinity_dask.explorer.schedule.policy import Submit

State = dict[str, Any]
TIMES = ("begin_time", "terminate_time", "running_time", "runner_id")


class LaneTable:
    """The state of every lane by its number, the ``runner_id`` of users.

    ``workflow_id`` (batch/task/run), ``repeat_cnt``, ``model_version``, ``begin_time``,
    ``terminate_time`` (None: still running), ``running_time`` (seconds), and what the
    workflow stored itself. Empty for a lane that has done nothing yet.
    """

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def add(self, lanes: Iterable[int]) -> None:
        for lane in lanes:
            self._states.setdefault(lane, {})

    def begins(self, submit: Submit) -> None:
        known = self._states.get(submit.lane, {})
        self._states[submit.lane] = {
            **{k: v for k, v in known.items() if k == "model_version"},
            "workflow_id": submit.sub_task.name,
            "repeat_cnt": submit.sub_task.repeat_times,
            "begin_time": time.time(),
            "terminate_time": None,
        }

    def ends(self, lane: int, workflow_id: str, seen: State) -> None:
        """``seen``: what the worker told about the attempt, the workflow's own state included."""
        state = self._states.get(lane, {})
        if state.get("workflow_id") == workflow_id:
            state.update({k: v for k, v in seen.items() if k not in ("begin_time", "runner_id")})
            state["terminate_time"] = time.time()

    def learn(self, states: list[State]) -> None:
        """What workers report of lanes that are at work; anything older changes nothing."""
        for seen in states:
            state = self._states.get(seen["runner_id"], {})
            at_work = seen["terminate_time"] is None
            if at_work and state.get("workflow_id") == seen["workflow_id"]:
                state.update({k: v for k, v in seen.items() if k not in TIMES})

    def busy(self, limit: int) -> list[State]:
        """States of those at work, at most ``limit``, the longest at it first."""
        at_work = [
            {"runner_id": lane, **state}
            for lane, state in self._states.items()
            if state and state.get("terminate_time") is None
        ]
        return sorted(at_work, key=lambda state: state["begin_time"])[:limit]

    def states(self) -> dict[int, State]:
        """The states of all lanes, with ``running_time`` up to date."""
        now = time.time()
        for state in self._states.values():
            if state.get("begin_time") is not None:
                until = state.get("terminate_time") or now
                state["running_time"] = until - state["begin_time"]
        return {lane: dict(state) for lane, state in self._states.items()}

"""Runners as users see them: the lanes of the workers, and what each one does.

Invariant: a runner id is a lane of one place for as long as that place exists; a runner's
state is what it does now, or did last.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Optional

from rich.console import Console
from rich.table import Table

from trinity_dask.config.schema import Config
from trinity_dask.explorer.schedule.outcome import Outcome, Status
from trinity_dask.explorer.schedule.places import ROLLOUT
from trinity_dask.explorer.schedule.policy import Submit
from trinity_dask.workflows import Task

FIRST_FIELDS = ("workflow_id", "repeat_cnt", "model_version", "running_time")
WIDTH = 160

# (slot, group, runner id, task, repeat_times, run_id_base, timeout_s, collect_partial_runs)
Attempt = Callable[..., Awaitable[tuple[Outcome, bytes]]]


class RunnerWrapper:
    """One lane of a worker: it executes one sub-task at a time.

    ``rollout_model_id`` is the number of the engine that it samples from,
    ``auxiliary_model_ids`` are those of the auxiliary models. ``execute`` runs one attempt
    on its worker; ``restart`` ends that worker's process.
    """

    def __init__(
        self,
        runner_id: int,
        rollout_model_id: int,
        auxiliary_model_ids: Iterable[int],
        config: Config,
        place: str = "",
        group: str = ROLLOUT,
        execute: Optional[Attempt] = None,
        restart: Optional[Callable[[str], Awaitable[Any]]] = None,
    ) -> None:
        self.runner_id = runner_id
        self.rollout_model_id = rollout_model_id
        self.auxiliary_model_ids = list(auxiliary_model_ids)
        self.config = config
        self.place = place
        self.group = group
        self.state: dict[str, Any] = {}
        self._execute = execute
        self._restart = restart

    async def prepare(self) -> None:
        """Workers prepare themselves at their first sub-task."""

    def update_state(self) -> dict[str, Any]:
        """The state with ``running_time`` (seconds since ``begin_time``) brought up to date."""
        begin = self.state.get("begin_time")
        if begin is not None:
            end = self.state.get("terminate_time") or time.time()
            self.state["running_time"] = end - begin
        return self.state

    def begins(self, submit: Submit) -> None:
        known = {k: v for k, v in self.state.items() if k == "model_version"}
        self.state = {
            **known,
            "workflow_id": submit.sub_task.name,
            "repeat_cnt": submit.sub_task.repeat_times,
            "begin_time": time.time(),
            "terminate_time": None,
        }

    def ends(self, seen: dict[str, Any]) -> None:
        """``seen``: what the worker told about the attempt, the workflow's own state included."""
        self.state.update({k: v for k, v in seen.items() if k not in ("begin_time", "runner_id")})
        self.state["terminate_time"] = time.time()

    def learn(self, seen: dict[str, Any]) -> None:
        """What the worker says of a sub-task that runs: model version, the workflow's state."""
        if self.state.get("workflow_id") == seen["workflow_id"]:
            kept = ("begin_time", "terminate_time", "running_time", "runner_id")
            self.state.update({k: v for k, v in seen.items() if k not in kept})

    async def run_with_retry(
        self,
        task: Task,
        repeat_times: int,
        run_id_base: int = 0,
        timeout: Optional[float] = None,
        collect_partial_runs: bool = True,
    ) -> tuple[Status, bytes, int, float]:
        """Run a task on this runner outside of any batch, trying again while runs fail.

        Returns status (its last metrics dict is ``time/task_execution``), payload, runner id
        and seconds. ``timeout`` bounds each attempt.

        Raises:
            RuntimeError: the runner belongs to no scheduler.
        """
        if self._execute is None:
            raise RuntimeError(f"runner {self.runner_id} belongs to no started scheduler")
        started = time.monotonic()
        limit = self.config.explorer.max_timeout_s if timeout is None else timeout
        job = (task, repeat_times, run_id_base, limit, collect_partial_runs)
        for _ in range(self.config.explorer.max_retry_times + 1):
            outcome, payload = await self._execute(self.place, self.group, self.runner_id, *job)
            status = outcome.status
            enough = status.ok or (collect_partial_runs and status.completed_runs > 0)
            if enough or not outcome.retryable:
                break
        seconds = time.monotonic() - started
        metrics = [*status.metrics, {"time/task_execution": seconds}]
        total = Status(status.completed_runs, status.total_runs, metrics, status.message)
        return total, payload, self.runner_id, seconds

    async def restart_runner(self) -> None:
        """Kill the worker's process; its nanny starts it again. For runner workers only."""
        if self._restart is None:
            raise RuntimeError(f"runner {self.runner_id} belongs to no started scheduler")
        await self._restart(self.place)


class RunnerTable:
    """All runners by id."""

    def __init__(self) -> None:
        self._runners: dict[int, RunnerWrapper] = {}

    def add(self, runner: RunnerWrapper) -> None:
        self._runners.setdefault(runner.runner_id, runner)

    def get(self, runner_id: int) -> Optional[RunnerWrapper]:
        return self._runners.get(runner_id)

    def __iter__(self) -> Any:
        return iter(self._runners.values())

    def learn(self, states: list[dict[str, Any]]) -> None:
        """What workers report of runners that are at work; anything older changes nothing."""
        for state in states:
            runner = self._runners.get(state["runner_id"])
            if runner is not None and state["terminate_time"] is None:
                runner.learn(state)

    def busy(self, limit: int) -> list[dict[str, Any]]:
        """States of those at work, at most ``limit``, the longest at it first."""
        at_work = [r for r in self if r.state and r.state.get("terminate_time") is None]
        at_work.sort(key=lambda runner: runner.state["begin_time"])
        return [{"runner_id": r.runner_id, **r.state} for r in at_work[:limit]]

    def states(self) -> dict[int, dict[str, Any]]:
        return {r.runner_id: dict(r.update_state()) for r in self}

    def render(self) -> str:
        """An aligned table of the runners that have done something."""
        states = {i: s for i, s in self.states().items() if s}
        names = dict.fromkeys([*FIRST_FIELDS, *(k for s in states.values() for k in s)])
        table = Table(box=None, pad_edge=False)
        for name in ("runner", *names):
            table.add_column(name, no_wrap=True)
        for runner_id, state in states.items():
            table.add_row(str(runner_id), *(_text(state.get(name)) for name in names))
        console = Console(width=WIDTH, no_color=True)
        with console.capture() as captured:
            console.print(table)
        return captured.get().rstrip()


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

"""Carries out what :class:`SchedulerState` decides, and tells it what happened.

Invariant: every event of the world (a report, a worker that comes or goes, a deadline) is
given to the state once, and the instructions that follow are carried out before the event
loop turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Optional

from distributed import Client

from trinity_dask.cluster.runners import kill_runner
from trinity_dask.cluster.slots import slot_resource
from trinity_dask.config.schema import Config
from trinity_dask.explorer.rollout.recall import recall
from trinity_dask.explorer.rollout.subtask import RunnerSettings, SubTaskSpec, group_of, run_subtask
from trinity_dask.explorer.schedule.dispatch import Dispatcher, Job, Report
from trinity_dask.explorer.schedule.membership import Membership
from trinity_dask.explorer.schedule.outcome import Outcome
from trinity_dask.explorer.schedule.pending import UNROUTED
from trinity_dask.explorer.schedule.places import ROLLOUT, RUNNER
from trinity_dask.explorer.schedule.policy import Cancel, Emit, Instruction, Recall, Restart, Submit
from trinity_dask.explorer.schedule.runner_table import RunnerTable, RunnerWrapper
from trinity_dask.explorer.schedule.state import SchedulerState
from trinity_dask.explorer.schedule.tasks import BatchId
from trinity_dask.explorer.schedule.waits import BatchWaits
from trinity_dask.workflows import Task

log = logging.getLogger("trinity_dask.scheduler")

READY_GRACE_S = 30.0


class Hands:
    """One life of a scheduler, from its start to its stop."""

    def __init__(
        self,
        cfg: Config,
        state: SchedulerState,
        client: Client,
        runners: RunnerTable,
        waits: BatchWaits,
    ) -> None:
        self._cfg = cfg
        self._state = state
        self._client = client
        self._runners = runners
        self._waits = waits
        self._settings = RunnerSettings.from_config(cfg)
        self._prefix = f"rollout-{uuid.uuid4().hex[:8]}"
        self._groups: dict[str, str] = {}  # workflow -> group of workers
        self._dispatcher = Dispatcher(client, self._ended, self._reported, self._failed)
        ready_s = cfg.explorer.rollout_model.prepare_timeout_s + READY_GRACE_S
        self._membership = Membership(
            client, ready_s, self._place_up, self._place_lost, self._settings
        )
        self._timer: Optional[asyncio.TimerHandle] = None
        self._timer_due = 0.0
        self._background: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        await self._membership.start()

    async def stop(self) -> None:
        """Every batch must be discarded before."""
        if self._timer is not None:
            self._timer.cancel()
        await self._membership.stop()
        await self._dispatcher.close()
        for place in list(self._state.places):
            self._state.place_lost(place.name, time.monotonic())
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # instructions ---------------------------------------------------------------------
    def schedule(self, tasks: Sequence[Task], batch_id: BatchId) -> None:
        self.apply(self._state.schedule(batch_id, tasks, time.monotonic(), self._group_of))

    def apply(self, instructions: Sequence[Instruction]) -> None:
        self._dispatcher.cancel([i.attempt_id for i in instructions if isinstance(i, Cancel)])
        # one that a later instruction took back is not out any more
        running = self._state.running
        submits = [i for i in instructions if isinstance(i, Submit) and i.attempt_id in running]
        if submits:
            self._submit(submits)
        for instruction in instructions:
            if isinstance(instruction, Restart):
                self._spawn(self._restart(instruction.place))
        recalls = [i.attempt_id for i in instructions if isinstance(i, Recall)]
        for place, keys in self._dispatcher.keys_by_place(recalls).items():
            self._spawn(self._recall(place, keys))
        if any(isinstance(i, Emit) for i in instructions):
            self._spawn(self._waits.notify())
        self._set_timer()

    def _submit(self, submits: Sequence[Submit]) -> None:
        self._dispatcher.submit([self._job(submit) for submit in submits])
        for submit in submits:
            runner = self._runners.get(submit.runner_id)
            if runner is not None:
                runner.begins(submit)
        self._state.started([submit.attempt_id for submit in submits], time.monotonic())

    def _job(self, submit: Submit) -> Job:
        sub_task = submit.sub_task
        wrapper = sub_task.task
        task = replace(wrapper.task, batch_id=wrapper.batch_id, task_id=wrapper.task_id)
        # unique for ever: a key used again right after a cancel gives a cancelled future
        key = f"{self._prefix}-{sub_task.name}-{submit.attempt_id}"
        spec = SubTaskSpec(
            task,
            sub_task.repeat_times,
            sub_task.run_id_base,
            submit.timeout_s,
            self._state.policy.keep_partial,
            self._settings,
            self._settings.key,
            self._engine_for(submit.runner_id) if sub_task.group == RUNNER else None,
            submit.runner_id,
            key,
        )
        return Job(submit.attempt_id, key, spec, submit.place, sub_task.group)

    def _engine_for(self, runner_id: int) -> Optional[str]:
        """The engine that a runner worker's lane samples from: lanes are spread over all."""
        engines = sorted(p.name for p in self._state.places if p.group == ROLLOUT and p.up)
        return engines[runner_id % len(engines)] if engines else None

    async def _recall(self, place: str, keys: list[str]) -> None:
        address = self._membership.address(place)
        if address is not None:
            try:
                await self._client.run(recall, keys, workers=[address], asynchronous=True)
            except OSError as error:  # it is dying; its attempts are lost with it
                log.warning("attempts at %s could not be recalled: %s", place, error)

    async def _restart(self, place: str) -> None:
        try:
            await kill_runner(self._client, place)
        except (ValueError, RuntimeError, TimeoutError, OSError) as error:
            # it is gone already, or does not come back; its group goes on without it
            log.warning("runner %s was not restarted: %s", place, error)

    # events ---------------------------------------------------------------------------
    def _ended(self, attempt_ids: list[int]) -> None:
        self.apply(self._state.ended(attempt_ids, time.monotonic()))

    def _reported(self, reports: list[Report]) -> None:
        instructions: list[Instruction] = []
        now = time.monotonic()
        for report in reports:
            attempt = self._state.running.get(report.attempt_id)
            if report.outcome is not None:
                if attempt is not None:
                    self._note_end(attempt.runner_id, attempt.sub_task.name, report.outcome)
                done = self._state.finished
                instructions += done(report.attempt_id, report.outcome, report.payload, now)
            elif report.error is not None:
                instructions += self._state.failed(report.attempt_id, report.error, now)
        self.apply(instructions)

    def _note_end(self, runner_id: int, name: str, outcome: Outcome) -> None:
        runner = self._runners.get(runner_id)
        if runner is not None and runner.state.get("workflow_id") == name:
            runner.ends(outcome.runner)

    def _failed(self, error: BaseException) -> None:
        self._waits.failure = error
        self._spawn(self._waits.notify())

    def _place_up(self, slot: str, capacity: int, group: str) -> None:
        instructions = self._state.place_up(slot, capacity, time.monotonic(), group)
        for lane in self._state.places[slot].lanes:
            self._runners.add(self._runner(lane, slot, group))
        self.apply(instructions)
        self._spawn(self._waits.notify())

    def _place_lost(self, slot: str) -> None:
        log.warning("worker of %s was lost; its sub-tasks run again", slot)
        self.apply(self._state.place_lost(slot, time.monotonic()))

    def _runner(self, lane: int, slot: str, group: str) -> RunnerWrapper:
        engine = slot if group == ROLLOUT else self._engine_for(lane)
        number = int(engine.rpartition("-")[2]) if engine else 0
        return RunnerWrapper(lane, number, [], self._cfg, slot, group, self._execute, self._restart)

    async def _execute(
        self,
        slot: str,
        group: str,
        runner_id: int,
        task: Task,
        repeat_times: int,
        run_id_base: int,
        timeout_s: float,
        partial: bool,
    ) -> tuple[Outcome, bytes]:
        """One attempt outside of any batch, at a given place."""
        engine = self._engine_for(runner_id) if group == RUNNER else None
        settings = (self._settings, self._settings.key, engine, runner_id)
        spec = SubTaskSpec(task, repeat_times, run_id_base, timeout_s, partial, *settings)
        future = self._client.submit(
            run_subtask,
            spec,
            key=f"{self._prefix}-single-{uuid.uuid4().hex}",
            resources={slot_resource(slot): 1, group: 1},
            pure=False,
        )
        async with asyncio.timeout(timeout_s + self._state.policy.attempt_slack_s):
            payload = await future
        return Outcome.of_payload(payload), payload

    # where workflows run --------------------------------------------------------------
    def _group_of(self, task: Task) -> str:
        """The group of workers for a task; unknown until its workflow has been looked at."""
        known = self._groups.get(task.workflow)
        if known is not None:
            return known
        explorer, runners = self._cfg.explorer, self._cfg.cluster.runner
        if explorer.run_on != "auto" or runners.n_workers < 1:
            return group_of(task.workflow, self._cfg)
        self._groups[task.workflow] = UNROUTED
        self._spawn(self._look_at(task.workflow))
        return UNROUTED

    async def _look_at(self, workflow: str) -> None:
        """In a thread: it loads the user's code."""
        try:
            group = await asyncio.to_thread(group_of, workflow, self._cfg)
        except Exception as error:  # user code; it fails again, as data, where it is run
            log.warning("workflow %s cannot be looked at: %r", workflow, error)
            group = ROLLOUT
        self._groups[workflow] = group
        self.apply(self._state.route(workflow, group, time.monotonic()))

    # ----------------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _set_timer(self) -> None:
        due = self._state.next_deadline()
        if self._timer is not None:
            if due == self._timer_due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer_due = due
            delay = max(due - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.apply(self._state.tick(time.monotonic()))

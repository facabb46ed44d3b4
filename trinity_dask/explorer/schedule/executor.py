"""Carries out on Dask what :class:`SchedulerState` decides, and tells it what happened.

Invariant: every event of the world (an end, a report, a worker that comes or goes, a deadline)
is given to the state once, and the instructions that follow are carried out before the event
loop turns. Nothing here polls. A finished future is announced at once, so that its lane is
given away while its payload is still being fetched; payloads are fetched worker by worker,
all that are ready in one go, so that a dead worker delays nobody else's. As many futures
are held as attempts are out.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

from distributed import Client, Future, KilledWorker

from trinity_dask.aio import Background, Changes, ended
from trinity_dask.cluster.runners import kill_runner
from trinity_dask.cluster.slots import slot_resource
from trinity_dask.config.schema import Config
from trinity_dask.explorer.rollout.subtask import RunnerSettings, SubTaskSpec, group_of, run_subtask
from trinity_dask.explorer.rollout.user_code import recall
from trinity_dask.explorer.schedule.lane_table import LaneTable
from trinity_dask.explorer.schedule.membership import Membership
from trinity_dask.explorer.schedule.pending import UNROUTED
from trinity_dask.explorer.schedule.policy import Cancel, Emit, Instruction, Recall, Restart, Submit
from trinity_dask.explorer.schedule.state import WORKER_LOST, SchedulerState
from trinity_dask.explorer.schedule.tasks import AttemptOutcome, RunError
from trinity_dask.explorer.schedule.workers import ROLLOUT, RUNNER
from trinity_dask.workflows import Task

log = logging.getLogger("trinity_dask.scheduler")

READY_GRACE_S = 30.0
GATHER_TIMEOUT_S = 60.0


@dataclass
class _Out:
    """An attempt that is out: its future, its worker, and the task that waits for its end."""

    future: Future
    worker: str
    watcher: asyncio.Task[None]


class Executor:
    """One life of a scheduler, from its start to its stop.

    ``changes`` is told when a task was finished or a worker came up, and fails when results
    cannot be collected any more.
    """

    def __init__(
        self,
        cfg: Config,
        state: SchedulerState,
        client: Client,
        lanes: LaneTable,
        changes: Changes,
    ) -> None:
        self._cfg = cfg
        self._state = state
        self._client = client
        self._lanes = lanes
        self._changes = changes
        self._settings = RunnerSettings.from_config(cfg)
        self._prefix = f"rollout-{uuid.uuid4().hex[:8]}"
        self._groups: dict[str, str] = {}  # workflow -> group of workers
        self._out: dict[int, _Out] = {}
        self._ended: list[int] = []
        self._to_fetch: dict[str, list[int]] = {}
        self._fetchers: dict[str, asyncio.Task[None]] = {}
        ready_s = cfg.explorer.rollout_model.prepare_timeout_s + READY_GRACE_S
        self._membership = Membership(
            client, ready_s, self._worker_up, self._worker_lost, self._settings
        )
        self._timer: Optional[asyncio.TimerHandle] = None
        self._timer_due = 0.0
        self._background = Background("scheduler")
        self._cancelling: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        await self._membership.start()

    async def stop(self) -> None:
        """Every batch must be discarded before."""
        if self._timer is not None:
            self._timer.cancel()
        await self._membership.stop()
        self._cancel(list(self._out))
        await ended(self._fetchers.values())
        await asyncio.gather(*self._cancelling, return_exceptions=True)
        for worker in list(self._state.workers):
            self._state.worker_lost(worker.name, time.monotonic())
        await self._background.close()

    # instructions ---------------------------------------------------------------------
    def apply(self, instructions: Sequence[Instruction]) -> None:
        """Carry out what the state has decided."""
        self._cancel([i.attempt_id for i in instructions if isinstance(i, Cancel)])
        # one that a later instruction took back is not out any more
        running = self._state.running
        submits = [i for i in instructions if isinstance(i, Submit) and i.attempt_id in running]
        if submits:
            self._submit(submits)
        recalls: dict[str, list[str]] = {}
        for instruction in instructions:
            if isinstance(instruction, Restart):
                self._background.start(self._restart(instruction.worker))
            elif isinstance(instruction, Recall) and instruction.attempt_id in self._out:
                out = self._out[instruction.attempt_id]
                recalls.setdefault(out.worker, []).append(str(out.future.key))
        for worker, keys in recalls.items():
            self._background.start(self._recall(worker, keys))
        if any(isinstance(i, Emit) for i in instructions):
            self._changes.notify()
        due = self._state.next_deadline()
        if self._timer is not None and due != self._timer_due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and due is not None:
            self._timer_due = due
            delay = max(due - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.apply(self._state.tick(time.monotonic()))

    def _submit(self, submits: Sequence[Submit]) -> None:
        """All of a worker at once: one graph costs the Dask scheduler less than many."""
        by_worker: dict[tuple[str, str], list[Submit]] = {}
        for submit in submits:
            by_worker.setdefault((submit.worker, submit.sub_task.group), []).append(submit)
        loop = asyncio.get_running_loop()
        for (worker, group), some in by_worker.items():
            specs = [self._spec(submit) for submit in some]
            futures = self._client.map(
                run_subtask,
                specs,
                key=[spec.key for spec in specs],
                resources={slot_resource(worker): 1, group: 1},
                pure=False,
                priority=0,
            )
            for submit, future in zip(some, futures, strict=True):
                watcher = loop.create_task(self._watch(submit.attempt_id, future))
                self._out[submit.attempt_id] = _Out(future, worker, watcher)
                self._lanes.begins(submit)
        self._state.started([submit.attempt_id for submit in submits], time.monotonic())

    def _spec(self, submit: Submit) -> SubTaskSpec:
        sub_task = submit.sub_task
        scheduled, engine = sub_task.task, None
        if sub_task.group == RUNNER:  # its lanes are spread over all engines
            engines = sorted(w.name for w in self._state.workers if w.group == ROLLOUT and w.up)
            engine = engines[submit.lane % len(engines)] if engines else None
        return SubTaskSpec(
            replace(scheduled.task, batch_id=scheduled.batch_id, task_id=scheduled.task_id),
            sub_task.repeat_times,
            sub_task.run_id_base,
            submit.timeout_s,
            self._state.policy.keep_partial,
            self._settings,
            engine,
            submit.lane,
            # unique for ever: a key used again right after a cancel gives a cancelled future
            f"{self._prefix}-{sub_task.name}-{submit.attempt_id}",
        )

    def _cancel(self, attempt_ids: Sequence[int]) -> None:
        """Stop attempts; nothing is reported of them any more."""
        outs = [out for a in attempt_ids if (out := self._out.pop(a, None)) is not None]
        for out in outs:
            out.watcher.cancel()
        if outs:
            cancel = self._client.cancel([out.future for out in outs], asynchronous=True)
            going_on = [task for task in self._cancelling if not task.done()]
            self._cancelling = [*going_on, self._background.start(cancel)]

    async def _recall(self, worker: str, keys: list[str]) -> None:
        address = self._membership.addresses.get(worker)
        if address is not None:
            try:
                await self._client.run(recall, keys, workers=[address], asynchronous=True)
            except OSError as error:  # it is dying; its attempts are lost with it
                log.warning("attempts at %s could not be recalled: %s", worker, error)

    async def _restart(self, worker: str) -> None:
        try:
            await kill_runner(self._client, worker)
        except (ValueError, RuntimeError, TimeoutError, OSError) as error:
            # it is gone already, or does not come back; its group goes on without it
            log.warning("runner %s was not restarted: %s", worker, error)

    # events: attempts -----------------------------------------------------------------
    async def _watch(self, attempt_id: int, future: Future) -> None:
        # not distributed.wait: that costs a timer and three tasks for each future
        assert future._state is not None
        await future._state.wait()
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._announce)
        self._ended.append(attempt_id)

    def _announce(self) -> None:
        """What ended in this turn of the loop, together."""
        over, self._ended = [a for a in self._ended if a in self._out], []
        for attempt_id in over:
            worker = self._out[attempt_id].worker
            self._to_fetch.setdefault(worker, []).append(attempt_id)
            if worker not in self._fetchers:
                self._fetchers[worker] = asyncio.ensure_future(self._fetch(worker))
        self.apply(self._state.ended(over, time.monotonic()))

    async def _fetch(self, worker: str) -> None:
        """What has ended at a worker, until nothing has; an error ends all waiting."""
        try:
            while ready := self._to_fetch.pop(worker, []):
                futures = {a: self._out[a].future for a in ready if a in self._out}
                payloads: dict[int, bytes] = {}  # one that was lost meanwhile is missing
                finished = {a: f for a, f in futures.items() if f.status == "finished"}
                try:
                    async with asyncio.timeout(GATHER_TIMEOUT_S):
                        if finished:
                            payloads = await self._client.gather(
                                finished, errors="skip", direct=True, asynchronous=True
                            )
                except (TimeoutError, OSError) as error:
                    log.warning("%d results could not be fetched: %s", len(finished), error)
                errors = {a: await _error_of(f) for a, f in futures.items() if a not in payloads}
                instructions: list[Instruction] = []
                now = time.monotonic()
                for attempt_id in futures:
                    if self._out.pop(attempt_id, None) is None:
                        continue  # cancelled meanwhile
                    if attempt_id in errors:
                        instructions += self._state.failed(attempt_id, errors[attempt_id], now)
                        continue
                    payload = payloads[attempt_id]
                    outcome = AttemptOutcome.of_payload(payload)
                    attempt = self._state.running.get(attempt_id)
                    if attempt is not None:
                        self._lanes.ends(attempt.lane, attempt.sub_task.name, outcome.runner)
                    instructions += self._state.finished(attempt_id, outcome, payload, now)
                self.apply(instructions)
        except Exception as error:
            log.exception("results of rollouts cannot be collected any more")
            failure = RuntimeError(f"rollouts cannot be collected: {error}")
            failure.__cause__ = error
            self._changes.fail(failure)
        finally:
            self._fetchers.pop(worker, None)

    # events: workers ------------------------------------------------------------------
    def _worker_up(self, slot: str, capacity: int, group: str) -> None:
        instructions = self._state.worker_up(slot, capacity, time.monotonic(), group)
        self._lanes.add(self._state.workers[slot].lanes)
        self.apply(instructions)
        self._changes.notify()

    def _worker_lost(self, slot: str) -> None:
        log.warning("worker of %s was lost; its sub-tasks run again", slot)
        self.apply(self._state.worker_lost(slot, time.monotonic()))

    # where workflows run --------------------------------------------------------------
    def group_of(self, task: Task) -> str:
        """The group of workers for a task; unknown until its workflow has been looked at."""
        known = self._groups.get(task.workflow)
        if known is not None:
            return known
        explorer, runners = self._cfg.explorer, self._cfg.cluster.runner
        if explorer.run_on != "auto" or runners.n_workers < 1:
            return group_of(task.workflow, self._cfg)
        self._groups[task.workflow] = UNROUTED
        self._background.start(self._look_at(task.workflow))
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


async def _error_of(future: Future) -> RunError:
    """Why a future has no result."""
    if future.status == "error":
        error = await future.exception()
        kind = WORKER_LOST if isinstance(error, (KilledWorker, OSError)) else type(error).__name__
        return RunError(kind, f"{type(error).__name__}: {error}")
    return RunError(WORKER_LOST, f"its Dask task is {future.status}")

"""The scheduler: decisions of :class:`SchedulerState`, carried out with Dask futures.

Invariant: every event of the world (an end, a report, a worker that comes or goes, a deadline)
is given to the state once, and the instructions that follow are carried out before the event
loop turns. Nothing here polls: a waiter is woken when its batch moves, one timer stands for the
next deadline. A finished future is announced at once, so that its lane is given away while its
payload is still being fetched; payloads are fetched worker by worker, all that are ready in
one go, so that a dead worker delays nobody else's. As many futures are held as attempts are
out. Everything runs on one event loop.
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
from trinity_dask.cluster.context import worker_client
from trinity_dask.cluster.runners import kill_runner
from trinity_dask.cluster.slots import slot_resource
from trinity_dask.config.schema import Config
from trinity_dask.explorer.rollout.subtask import RunnerSettings, SubTaskSpec, group_of, run_subtask
from trinity_dask.explorer.rollout.user_code import ran_s, recall
from trinity_dask.explorer.rollout.workflow_runner import outcome_of
from trinity_dask.explorer.schedule.lane_table import LaneTable
from trinity_dask.explorer.schedule.membership import Membership
from trinity_dask.explorer.schedule.pending import UNROUTED
from trinity_dask.explorer.schedule.policy import (
    Ask,
    Cancel,
    Emit,
    Instruction,
    Recall,
    Restart,
    SchedulePolicy,
    Submit,
)
from trinity_dask.explorer.schedule.state import WORKER_LOST, SchedulerState
from trinity_dask.explorer.schedule.tasks import BatchId, BatchResult, Counts, RunError
from trinity_dask.explorer.schedule.worker_watch import WorkerWatch
from trinity_dask.explorer.schedule.workers import ROLLOUT, RUNNER
from trinity_dask.workflows import Task

log = logging.getLogger("trinity_dask.scheduler")

SHOWN = 16
LATE_S = 1.0
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
        run: str = "",
    ) -> None:
        self._cfg = cfg
        self._state = state
        self._client = client
        self._lanes = lanes
        self._changes = changes
        self._settings = RunnerSettings.from_config(cfg, run)
        self._prefix = f"rollout-{uuid.uuid4().hex[:8]}"
        self._groups: dict[str, str] = {}  # workflow -> group of workers
        self._out: dict[int, _Out] = {}
        self._ended: list[int] = []
        self._to_fetch: dict[str, list[int]] = {}
        self._fetchers: dict[str, asyncio.Task[None]] = {}
        ready_s = cfg.explorer.rollout_model.prepare_timeout_s + READY_GRACE_S
        self.membership = Membership(
            client,
            ready_s,
            self._worker_up,
            self._worker_lost,
            self._settings,
            self._worker_left,
        )
        self._timer: Optional[asyncio.TimerHandle] = None
        self._timer_due = 0.0
        self._background = Background("scheduler")
        self._cancelling: list[asyncio.Task[Any]] = []

    async def stop(self) -> None:
        """Every batch must be discarded before."""
        if self._timer is not None:
            self._timer.cancel()
        await self.membership.stop()
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
        asked = {i.attempt_id for i in instructions if isinstance(i, Ask)} & self._out.keys()
        for worker in {self._out[a].worker for a in asked}:
            mine = {str(o.future.key): a for a in asked if (o := self._out[a]).worker == worker}
            self._background.start(self._ask(worker, mine))
        if any(isinstance(i, Emit) for i in instructions):
            self._changes.notify()
        due = self._state.next_deadline()
        if self._timer is not None and due != self._timer_due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and due is not None:
            self._timer_due = due
            delay = max(due - time.monotonic(), 0.0)

            def tick() -> None:
                self._timer = None
                self.apply(self._state.tick(time.monotonic()))

            self._timer = asyncio.get_running_loop().call_later(delay, tick)

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
        address = self.membership.addresses.get(worker)
        if address is not None:
            try:
                await self._client.run(recall, keys, workers=[address], asynchronous=True)
            except OSError as error:  # it is dying; its attempts are lost with it
                log.warning("attempts at %s could not be recalled: %s", worker, error)

    async def _ask(self, worker: str, attempts: dict[str, int]) -> None:
        """Which of some attempts, by their keys, have begun at their worker. One that does not
        say so in time is taken to be stuck."""
        address = self.membership.addresses.get(worker)
        if address is None:
            return
        try:
            told = await self._client.run(
                ran_s, list(attempts), workers=[address], asynchronous=True
            )
        except OSError as error:
            log.warning("%s could not be asked for its sub-tasks: %s", worker, error)
            return
        seconds = {attempts[key]: s for key, s in told[address].items()}
        self.apply(self._state.begun(seconds, time.monotonic()))

    async def _restart(self, worker: str) -> None:
        try:
            await kill_runner(self._client, worker)
        except (ValueError, RuntimeError, TimeoutError, OSError) as error:
            # it is gone already, or does not come back; its group goes on without it
            log.warning("runner %s was not restarted: %s", worker, error)

    # events: attempts -----------------------------------------------------------------
    async def _watch(self, attempt_id: int, future: Future) -> None:
        """Until a future is finished; what ended in one turn of the loop is announced together."""

        def announce() -> None:
            over, self._ended = [a for a in self._ended if a in self._out], []
            for ended_id in over:
                worker = self._out[ended_id].worker
                self._to_fetch.setdefault(worker, []).append(ended_id)
                if worker not in self._fetchers:
                    self._fetchers[worker] = asyncio.ensure_future(self._fetch(worker))
            self.apply(self._state.ended(over, time.monotonic()))

        # not distributed.wait: that costs a timer and three tasks for each future
        assert future._state is not None
        await future._state.wait()
        if not self._ended:
            asyncio.get_running_loop().call_soon(announce)
        self._ended.append(attempt_id)

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
                    outcome = outcome_of(payload)
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

    def _worker_left(self, slot: str) -> None:
        log.info("worker of %s is about to leave; others take over its sub-tasks", slot)
        self.apply(self._state.worker_left(slot, time.monotonic()))

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


class Scheduler:
    """Runs batches of tasks on the rollout and runner workers.

    The workers are found by their slots, each taking as many sub-tasks as its resource
    ``rollout`` (``runner``) says; ``slots`` bounds those in flight over all of them (None: no
    bound beyond that). ``client`` is an asynchronous client of the loop the scheduler is used
    on; None means that of the worker it runs in. ``run`` is the launch of a run whose engines are
    used (empty: any).

    Public: :meth:`start`, :meth:`stop`, :meth:`wait_for_lanes`; :meth:`schedule`,
    :meth:`get_results`, :meth:`abort_batch`, :meth:`set_slots`; ``state`` (batches, workers,
    attempts), ``lanes`` (what each lane does) and :meth:`status` to look at; ``changes`` to
    wait for anything of them; :attr:`executor` while it is started.
    """

    def __init__(
        self,
        cfg: Config,
        slots: Optional[int] = None,
        client: Optional[Client] = None,
        run: str = "",
    ) -> None:
        self._cfg = cfg
        self._client = client
        self._run = run
        policy = SchedulePolicy.from_config(cfg.explorer)
        self._policy = replace(policy, failed_runs=cfg.monitor.record_failed)
        self.state = SchedulerState(self._policy, slots)
        self.lanes = LaneTable()
        self.changes = Changes()
        self._executor: Optional[Executor] = None
        self.watch: Optional[WorkerWatch] = None

    # life -----------------------------------------------------------------------------
    async def start(self) -> None:
        """Find the workers and begin to hand out; calling it again changes nothing."""
        if self._executor is not None:
            return
        client = self._client or await worker_client()
        self.changes.failure = None
        parts = self.state, client, self.lanes, self.changes
        self._executor = Executor(self._cfg, *parts, run=self._run)
        await self._executor.membership.start()
        interval_s = self._cfg.explorer.runner_state_report_interval_s
        self.watch = WorkerWatch(client, interval_s, self.lanes.learn)
        self.watch.start()

    async def wait_for_lanes(self, n: int, timeout: float) -> None:
        """Until workers with ``n`` lanes in all are up.

        They come up one after another, and the first ones take whatever is scheduled before
        the others are there.

        Raises:
            TimeoutError: not within ``timeout`` seconds; says which workers are up.
        """

        def up() -> dict[str, int]:
            return {w.name: w.capacity for w in self.state.workers if w.up}

        if not await self.changes.until(lambda: sum(up().values()) >= n, timeout):
            known = ", ".join(f"{name}: {lanes}" for name, lanes in up().items()) or "none"
            raise TimeoutError(f"not {n} lanes after {timeout:g} s; workers that are up: {known}")

    async def stop(self) -> None:
        """Cancel and forget everything. The scheduler can be started again."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        if self.watch is not None:
            await self.watch.stop()
        for batch_id in list(self.state.batches):
            executor.apply(self.state.discard(batch_id, time.monotonic())[1])
        await executor.stop()
        self.changes.notify()

    @property
    def executor(self) -> Executor:
        """Raises RuntimeError while the scheduler is not started."""
        if self._executor is None:
            raise RuntimeError("the scheduler is not started; await start() first")
        return self._executor

    # batches --------------------------------------------------------------------------
    def schedule(self, tasks: Sequence[Task], batch_id: BatchId) -> None:
        """Queue tasks under ``batch_id`` and start what fits. An empty list is ignored.

        Raises:
            RuntimeError: not started, or results cannot be collected any more.
        """
        if self.changes.failure is not None:
            raise self.changes.failure
        executor, now = self.executor, time.monotonic()
        executor.apply(self.state.schedule(batch_id, tasks, now, executor.group_of))

    async def get_results(
        self,
        batch_id: BatchId,
        min_num: Optional[int] = None,
        timeout: Optional[float] = None,
        clear_timeout_tasks: bool = True,
        wait_after_min_s: Optional[float] = None,
        return_partial_tasks: Optional[bool] = None,
    ) -> BatchResult:
        """Results of a batch once all of its tasks are finished; takes them out.

        With ``min_num`` (tasks), ``wait_after_min_s`` (None: as configured) after that many
        are finished what is there is returned. After ``timeout`` seconds the same; with
        ``clear_timeout_tasks`` the rest is cancelled then, otherwise it goes on and a later
        call returns it. Finished runs of tasks that are cut off are kept, unless
        ``return_partial_tasks`` is False (None: as configured). An unknown batch gives an
        empty result at once.

        Raises:
            RuntimeError: the scheduler cannot collect results any more (says why).
        """
        state, until = self.state, self.changes.until
        deadline = None if timeout is None else time.monotonic() + timeout
        batch = state.batches.get(batch_id)
        if batch is not None and min_num is not None and min_num > len(batch.tasks):
            log.warning(
                "batch %s has %d tasks, fewer than min_num=%d; waiting for all of them",
                batch_id,
                len(batch.tasks),
                min_num,
            )
        in_time = await until(lambda: state.enough(batch_id, min_num), timeout)
        grace = self._policy.wait_after_min_s if wait_after_min_s is None else wait_after_min_s
        if in_time and grace > 0:
            if deadline is not None:
                grace = min(grace, max(deadline - time.monotonic(), 0.0))
            await until(lambda: state.enough(batch_id), grace)
        if clear_timeout_tasks and not state.enough(batch_id):
            # ask what runs for what it has, then cancel the rest
            cut, partial = state.cancel_unfinished, return_partial_tasks
            self._apply(cut(batch_id, time.monotonic(), partial, recall=True))
            await until(lambda: state.enough(batch_id), self._policy.recall_s)
            self._apply(cut(batch_id, time.monotonic(), partial, restart=not in_time))
        return state.drain(batch_id)

    async def abort_batch(
        self, batch_id: BatchId, return_partial_tasks: bool = False, restart_runners: bool = True
    ) -> Counts:
        """Cancel what is left of a batch; its final run counts.

        All of it is forgotten, unless ``return_partial_tasks``: then its finished runs can
        still be taken. ``restart_runners``: runner workers that execute a blocking workflow
        of it are killed and come back.
        """
        now = time.monotonic()
        if return_partial_tasks:
            self._apply(self.state.cancel_unfinished(batch_id, now, True, restart_runners))
            batch = self.state.batches.get(batch_id)
            return batch.counts if batch else Counts()
        counts, instructions = self.state.discard(batch_id, now, restart_runners)
        self._apply(instructions)
        self.changes.notify()
        return counts

    def set_slots(self, slots: Optional[int]) -> None:
        """Bound the sub-tasks in flight; starts what now fits."""
        self._apply(self.state.set_limit(slots, time.monotonic()))

    def _apply(self, instructions: Sequence[Instruction]) -> None:
        if self._executor is not None:
            self._executor.apply(instructions)

    # state ----------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """``in_flight`` sub-tasks; ``runners``: states of the busiest lanes, the longest at work
        first; ``late_workers``: event loops more than a second behind, with the seconds."""
        lags = self.watch.lags() if self.watch is not None else {}
        late = {name: round(lag, 1) for name, lag in lags.items() if lag > LATE_S}
        busy = self.lanes.busy(SHOWN)
        return {"in_flight": len(self.state.running), "runners": busy, "late_workers": late}

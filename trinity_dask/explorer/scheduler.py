"""The scheduler's hands: Dask futures for the decisions of :class:`SchedulerState`.

Invariant: nothing here polls. A finished future frees its slot at once and wakes the
collector, which fetches all results that have become ready since its last round in one go; a
waiter is woken when its
batch moves; one timer stands for the next deadline. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Optional

from distributed import Client, Future, KilledWorker

from trinity_dask.cluster.context import worker_client
from trinity_dask.config.schema import Config, ExplorerConfig
from trinity_dask.explorer.scheduler_state import (
    WORKER_LOST,
    Cancel,
    Instruction,
    Progress,
    SchedulePolicy,
    SchedulerState,
    Submit,
)
from trinity_dask.explorer.status import Outcome, RunError
from trinity_dask.explorer.subtask import RunnerSettings, SubTaskSpec, run_subtask
from trinity_dask.explorer.tasks import (
    BatchId,
    BatchResult,
    CompletedTaskResult,
    Counts,
    RunningTaskState,
    TaskWrapper,
    sort_batch_id,
)
from trinity_dask.workflows import Task

__all__ = [
    "BatchResult",
    "CompletedTaskResult",
    "RunningTaskState",
    "Scheduler",
    "TaskWrapper",
    "sort_batch_id",
]

log = logging.getLogger("trinity_dask.scheduler")

GATHER_TIMEOUT_S = 60.0
ROLLOUT_RESOURCE = {"rollout": 1}


def policy_of(cfg: ExplorerConfig) -> SchedulePolicy:
    """The scheduling rules that the configuration states."""
    attempts = cfg.max_retry_times + 1
    batch_timeout_s = cfg.batch_timeout_s or attempts * cfg.max_timeout_s + 60.0
    return SchedulePolicy(
        max_attempts=attempts,
        attempt_timeout_s=cfg.max_timeout_s,
        batch_timeout_s=batch_timeout_s,
        max_repeat_times_per_runner=cfg.max_repeat_times_per_runner,
        keep_partial=cfg.partial_group == "keep",
    )


class Scheduler:
    """Runs batches of tasks on the rollout workers.

    ``slots`` bounds the sub-tasks in flight (the sum of the workers' ``rollout``
    resources). ``client`` is an asynchronous client of the loop the scheduler is used on;
    None means that of the worker it runs in.
    """

    def __init__(self, cfg: Config, slots: int, client: Optional[Client] = None) -> None:
        self._policy = policy_of(cfg.explorer)
        self._settings = RunnerSettings.from_config(cfg)
        self.state = SchedulerState(self._policy, slots)
        self._client = client
        self._prefix = f"rollout-{uuid.uuid4().hex[:8]}"
        self._futures: dict[int, Future] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._finished: list[int] = []
        self._ready = asyncio.Event()
        self._unfetched: list[int] = []
        self._fetch_now = asyncio.Event()
        self._moved = asyncio.Condition()
        self._timer: Optional[asyncio.TimerHandle] = None
        self._timer_due = 0.0
        self._collectors: list[asyncio.Task[None]] = []
        self._failure: Optional[BaseException] = None

    # life -----------------------------------------------------------------------------
    async def start(self) -> None:
        """Begin to collect results; calling it again changes nothing."""
        if self._client is None:
            self._client = await worker_client()
        if not self._collectors:
            self._failure = None
            loop = asyncio.get_running_loop()
            loops = (self._refill, self._collect)
            self._collectors = [loop.create_task(self._guarded(run)) for run in loops]

    async def stop(self) -> None:
        """Cancel and forget everything. The scheduler can be started again."""
        for batch_id in list(self.state.batches):
            await self.abort_batch(batch_id)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [*self._watchers, *self._collectors]
        self._collectors = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watchers.clear()

    # batches --------------------------------------------------------------------------
    def schedule(self, tasks: Sequence[Task], batch_id: BatchId) -> None:
        """Queue tasks under ``batch_id`` and start what fits. An empty list is ignored.

        Raises:
            RuntimeError: not started, or its collector failed.
        """
        self._require_running()
        self._apply(self.state.schedule(batch_id, tasks, time.monotonic()))

    async def get_results(
        self,
        batch_id: BatchId,
        min_num: Optional[int] = None,
        timeout: Optional[float] = None,
        clear_timeout_tasks: bool = True,
        wait_after_min_s: float = 0.0,
    ) -> BatchResult:
        """Results of a batch once all of its tasks are finished; takes them out.

        With ``min_num`` (tasks), ``wait_after_min_s`` after that many are finished what is
        there is returned. After ``timeout`` seconds the same; with ``clear_timeout_tasks``
        the rest is cancelled then (its finished runs are kept), otherwise it goes on and a
        later call returns it. An unknown batch gives an empty result at once.

        Raises:
            RuntimeError: the scheduler cannot collect results any more (says why).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        complete = await self._wait_for(batch_id, min_num, deadline)
        if not complete and min_num is not None and wait_after_min_s > 0:
            grace = time.monotonic() + wait_after_min_s
            until = grace if deadline is None else min(grace, deadline)
            complete = await self._wait_for(batch_id, None, until)
        if not complete and clear_timeout_tasks:
            self._apply(self.state.cancel_unfinished(batch_id, time.monotonic()))
        return self.state.drain(batch_id)

    async def abort_batch(self, batch_id: BatchId) -> Counts:
        """Cancel what is left of a batch and forget all of it; its final run counts."""
        counts, instructions = self.state.discard(batch_id, time.monotonic())
        self._apply(instructions)
        await self._notify()
        return counts

    def discard_completed_results(self, batch_id: BatchId) -> None:
        """Forget the results of a batch that were not taken."""
        self.state.drain(batch_id)

    def has_step(self, batch_id: BatchId) -> bool:
        """Whether anything of the batch is pending, running or not yet taken."""
        return batch_id in self.state.batches

    def set_slots(self, slots: int) -> None:
        """Rollout capacity has changed; starts what now fits."""
        self._apply(self.state.set_slots(slots, time.monotonic()))

    @property
    def in_flight(self) -> int:
        return len(self.state.running)

    @property
    def pending(self) -> int:
        return self.state.pending_count

    # instructions ---------------------------------------------------------------------
    def _apply(self, instructions: Sequence[Instruction]) -> None:
        submits = [i for i in instructions if isinstance(i, Submit)]
        cancels = [i.attempt_id for i in instructions if isinstance(i, Cancel)]
        self._cancel(cancels)
        self._submit(submits)
        if any(isinstance(i, Progress) for i in instructions):
            asyncio.get_running_loop().create_task(self._notify())
        self._set_timer()

    def _submit(self, submits: Sequence[Submit]) -> None:
        """All at once: one graph costs the Dask scheduler far less than one per sub-task."""
        if not submits:
            return
        assert self._client is not None
        futures = self._client.map(
            run_subtask,
            [self._spec(s) for s in submits],
            key=[self._key(s) for s in submits],
            resources=ROLLOUT_RESOURCE,
            pure=False,
            priority=0,
        )
        loop = asyncio.get_running_loop()
        for submit, future in zip(submits, futures, strict=True):
            self._futures[submit.attempt_id] = future
            watcher = loop.create_task(self._watch(submit.attempt_id, future))
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)

    def _spec(self, submit: Submit) -> SubTaskSpec:
        sub_task = submit.sub_task
        wrapper = sub_task.task
        return SubTaskSpec(
            replace(wrapper.task, batch_id=wrapper.batch_id, task_id=wrapper.task_id),
            sub_task.repeat_times,
            sub_task.run_id_base,
            self._policy.attempt_timeout_s,
            self._policy.keep_partial,
            self._settings,
            self._settings.key,
        )

    def _key(self, submit: Submit) -> str:
        # unique for ever: a key used again right after a cancel gives a cancelled future
        wrapper = submit.sub_task.task
        return f"{self._prefix}-{wrapper.batch_id}/{wrapper.task_id}-{submit.attempt_id}"

    def _cancel(self, attempt_ids: Sequence[int]) -> None:
        futures = [f for a in attempt_ids if (f := self._futures.pop(a, None)) is not None]
        if futures:
            assert self._client is not None
            cancelling = asyncio.ensure_future(self._client.cancel(futures, asynchronous=True))
            self._watchers.add(cancelling)
            cancelling.add_done_callback(self._watchers.discard)

    # results --------------------------------------------------------------------------
    async def _watch(self, attempt_id: int, future: Future) -> None:
        # not distributed.wait: that costs a timer and three tasks for each future
        assert future._state is not None
        await future._state.wait()
        self._finished.append(attempt_id)
        self._ready.set()

    async def _guarded(self, run: Callable[[], Awaitable[None]]) -> None:
        try:
            await run()
        except Exception as error:
            log.exception("results of rollouts cannot be collected any more")
            self._failure = error
            await self._notify()

    async def _refill(self) -> None:
        """Give the slots of ended attempts away before their payloads are fetched.

        Workers that wait for a round of fetching would stand idle half of the time when
        tasks are short.
        """
        while True:
            await self._ready.wait()
            self._ready.clear()
            ended, self._finished = self._finished, []
            self._unfetched += ended
            self._fetch_now.set()
            self._apply(self.state.ended(ended, time.monotonic()))

    async def _collect(self) -> None:
        while True:
            await self._fetch_now.wait()
            self._fetch_now.clear()
            batch, self._unfetched = self._unfetched, []
            await self._collect_some([a for a in batch if a in self._futures])

    async def _collect_some(self, attempt_ids: Sequence[int]) -> None:
        futures = {a: self._futures.pop(a) for a in attempt_ids}
        good = {a: f for a, f in futures.items() if f.status == "finished"}
        payloads = await self._fetch(good)
        instructions: list[Instruction] = []
        now = time.monotonic()
        for attempt_id, future in futures.items():
            payload = payloads.get(attempt_id)
            if payload is None:
                error = await _error_of(future)
                instructions += self.state.lost(attempt_id, error, now)
            else:
                outcome = Outcome.of_payload(payload)
                instructions += self.state.finished(attempt_id, outcome, payload, now)
        self._apply(instructions)

    async def _fetch(self, futures: dict[int, Future]) -> dict[int, Any]:
        """Payloads of finished futures; one that was lost meanwhile is missing."""
        if not futures:
            return {}
        assert self._client is not None
        try:
            async with asyncio.timeout(GATHER_TIMEOUT_S):
                return await self._client.gather(
                    futures, errors="skip", direct=True, asynchronous=True
                )
        except (TimeoutError, OSError) as error:
            log.warning("%d results could not be fetched: %s", len(futures), error)
            return {}

    # waiting --------------------------------------------------------------------------
    def _complete(self, batch_id: BatchId) -> bool:
        batch = self.state.batches.get(batch_id)
        return batch is None or batch.complete

    def _enough(self, batch_id: BatchId, min_num: Optional[int]) -> bool:
        batch = self.state.batches.get(batch_id)
        return min_num is not None and batch is not None and batch.emitted >= min_num

    async def _wait_for(
        self, batch_id: BatchId, min_num: Optional[int], deadline: Optional[float]
    ) -> bool:
        """Until complete, ``min_num`` tasks are there, or the deadline; whether complete."""

        def moved() -> bool:
            done = self._complete(batch_id) or self._enough(batch_id, min_num)
            return done or self._failure is not None

        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(left), self._moved:
                await self._moved.wait_for(moved)
        except TimeoutError:
            pass  # the caller looks at what there is
        if self._failure is not None:
            raise RuntimeError(f"rollouts cannot be collected: {self._failure}") from self._failure
        return self._complete(batch_id)

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    def _require_running(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"rollouts cannot be collected: {self._failure}") from self._failure
        if not self._collectors:
            raise RuntimeError("the scheduler is not started; await start() first")

    def _set_timer(self) -> None:
        due = self.state.next_deadline()
        if self._timer is not None:
            if due == self._timer_due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            delay = max(due - time.monotonic(), 0.0)
            self._timer_due = due
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._apply(self.state.tick(time.monotonic()))


async def _error_of(future: Future) -> RunError:
    """Why a future has no result."""
    if future.status == "error":
        error = await future.exception()
        kind = WORKER_LOST if isinstance(error, (KilledWorker, OSError)) else type(error).__name__
        return RunError(kind, f"{type(error).__name__}: {error}")
    return RunError(WORKER_LOST, f"its Dask task is {future.status}")

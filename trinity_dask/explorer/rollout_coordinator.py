"""The life of a batch: submitted, run, put through the pipeline, committed.

Invariant: a batch is finalised once, whoever asks and however often; what was collected is
kept until it is committed, so a failed pipeline or a full disk loses nothing but time. A
train batch exists from its commit on, with accounts that balance.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, Optional

from distributed import Client

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.config.schema import Config
from trinity_dask.explorer.batches import (
    EVAL,
    TRAIN,
    Batch,
    Feedback,
    Meta,
    Refill,
    RolloutState,
    eval_prefix,
    no_meta,
    refill_id,
)
from trinity_dask.explorer.metrics import batch_metrics, eval_batch_metrics
from trinity_dask.explorer.processing import BatchFailed, Processed, Processing, count_groups
from trinity_dask.explorer.schedule.live import lag_metrics, live_status
from trinity_dask.explorer.schedule.scheduler import Scheduler
from trinity_dask.explorer.schedule.tasks import BatchId, BatchResult, Counts
from trinity_dask.workflows import Task

log = logging.getLogger("trinity_dask.coordinator")

COMMIT_GRACE_S = 5.0


class RolloutCoordinator:
    """Owns the scheduler and the experience pipeline of one explorer.

    ``buffer`` receives the committed batches; ``client`` as in :class:`Scheduler`.
    """

    def __init__(
        self,
        cfg: Config,
        buffer: Optional[ExperienceBuffer] = None,
        run_id: str = "",
        client: Optional[Client] = None,
    ) -> None:
        self.cfg = cfg
        self.run_id = run_id
        self._buffer = buffer
        self._client = client
        self._processing: Optional[Processing] = None
        self._scheduler: Optional[Scheduler] = None
        self._batches: dict[BatchId, Batch] = {}
        self._counts = Counts()
        self._failures: Counter[str] = Counter()
        self._verb = "bench" if cfg.mode == "bench" else "eval"

    # life -----------------------------------------------------------------------------
    async def prepare(self, slots: Optional[int] = None) -> None:
        """Build the pipeline (``bench`` has none), then start the scheduler with at most
        ``slots`` sub-tasks at a time (None: as many as the workers take). Idempotent."""
        if self._processing is None and self.cfg.mode != "bench":
            self._processing = Processing(self.cfg)
        if self._scheduler is None:
            self._scheduler = Scheduler(self.cfg, slots, self._client)
            await self._scheduler.start()

    async def shutdown(self) -> None:
        """Cancel everything that runs and stop the scheduler. Idempotent."""
        scheduler, self._scheduler = self._scheduler, None
        self._batches.clear()
        if scheduler is not None:
            await scheduler.stop()

    def set_slots(self, slots: Optional[int]) -> None:
        """Bound the sub-tasks in execution, on rollout and runner workers together."""
        self.scheduler.set_slots(slots)

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("RolloutCoordinator.prepare() was not called, or it is shut down")
        return self._scheduler

    @property
    def processing(self) -> Processing:
        if self._processing is None:
            raise RuntimeError(
                f"there is no experience pipeline in mode {self.cfg.mode!r}, or "
                "RolloutCoordinator.prepare() was not called"
            )
        return self._processing

    # batches --------------------------------------------------------------------------
    async def submit_batch(
        self,
        batch_id: BatchId,
        tasks: Sequence[Task],
        batch_type: str,
        min_wait_num: Optional[int] = None,
        meta: Meta = no_meta,
        refill: Optional[Refill] = None,
        feedback: Optional[Feedback] = None,
    ) -> None:
        """Start a batch; an empty list of tasks stays pending.

        Args:
            min_wait_num: tasks that suffice to finalise it (over-rollout); None: all.
            meta: called when a train batch is committed; JSON-able, stored with it.
            refill: reads further tasks when operators drop groups of a train batch, up to
                ``buffer.max_refill_batches`` times; an empty list ends that.
            feedback: called with the pipeline's ``selector_metric`` before the commit.

        Raises:
            ValueError: a batch of this id is active, or the type is not train or eval.
        """
        if batch_type not in (TRAIN, EVAL):
            raise ValueError(f"batch type {batch_type!r} is unknown; it is {TRAIN!r} or {EVAL!r}")
        if batch_id in self._batches:
            raise ValueError(f"batch {batch_id!r} is active already; finalize or abort it first")
        batch = Batch(batch_id, batch_type, len(tasks), min_wait_num, meta, refill, feedback)
        if tasks:
            self.scheduler.schedule(tasks, batch_id)
            batch.state = RolloutState.RUNNING
        self._batches[batch_id] = batch

    async def finalize_train_batch(
        self, batch_id: BatchId, timeout: Optional[float] = None
    ) -> dict[str, Any]:
        """Wait for the batch, process it, commit it; a second caller gets the same result.

        Returns ``batch_id``, ``batch_type``, ``finished_task_count``, ``metrics`` and
        ``accounts``. The batch's own deadline always applies: what is unfinished then is
        cancelled and counted.

        Raises:
            KeyError: unknown batch. ValueError: it is an eval batch.
            TimeoutError: not enough tasks were finished within ``timeout`` seconds. The
                batch goes on, what was collected is kept, and it can be finalised again.
            BatchFailed: no run succeeded; nothing is committed.
        """
        return await self._finalize(batch_id, TRAIN, timeout)

    async def finalize_eval_batch(
        self, batch_id: BatchId, timeout: Optional[float] = None
    ) -> dict[str, Any]:
        """Wait for an eval batch and summarise it; tasks that are missing are only counted."""
        return await self._finalize(batch_id, EVAL, timeout)

    async def _finalize(
        self, batch_id: BatchId, batch_type: str, timeout: Optional[float]
    ) -> dict[str, Any]:
        batch = self._batch(batch_id, batch_type)
        async with batch.lock:
            if batch.result is None:
                batch.result = await self._finish(batch, timeout)
                self._batches.pop(batch_id, None)
        return batch.result

    def _batch(self, batch_id: BatchId, batch_type: str) -> Batch:
        batch = self._batches[batch_id]
        if batch.batch_type != batch_type:
            raise ValueError(f"batch {batch_id!r} is a {batch.batch_type} batch")
        return batch

    async def _finish(self, batch: Batch, timeout: Optional[float]) -> dict[str, Any]:
        if batch.state is not RolloutState.FINALIZING:
            await self._collect(batch, timeout)
        # what was collected stays for another try when the pipeline or the commit fails
        batch.state = RolloutState.FINALIZING
        assert batch.collected is not None
        finish = self._finish_train if batch.batch_type == TRAIN else self._finish_eval
        result = await finish(batch)
        batch.state = RolloutState.FINALIZED
        batch.collected = None
        return result

    async def _collect(self, batch: Batch, timeout: Optional[float]) -> None:
        """Wait for the batch's results and keep them in it."""
        is_eval = batch.batch_type == EVAL
        over = self.cfg.explorer.over_rollout
        part = await self.scheduler.get_results(
            batch.batch_id,
            min_num=batch.min_wait_num,
            timeout=timeout,
            clear_timeout_tasks=is_eval,
            wait_after_min_s=0.0 if is_eval else over.wait_after_min_s,
        )
        batch.collect(part)
        if not part.complete and not is_eval:
            await self._leave_rest(batch, timeout)
        assert batch.collected is not None
        self._count(batch.collected)

    async def _leave_rest(self, batch: Batch, timeout: Optional[float]) -> None:
        """Cancel what over-rollout does not wait for; runs that are finished are kept."""
        assert batch.collected is not None
        finished = sum(status.completed_runs > 0 for status in batch.collected.statuses)
        if batch.min_wait_num is None or finished < batch.min_wait_num:
            raise TimeoutError(
                f"batch {batch.batch_id!r}: {finished} of {batch.wanted_tasks} tasks finished "
                f"within {timeout:g} s; it goes on and can be finalised again"
            )
        batch.collect(await self.scheduler.get_results(batch.batch_id, timeout=0.0))

    def _count(self, result: BatchResult) -> None:
        counts = result.counts
        self._counts += counts
        self._failures.update(result.failures)
        if counts.failed or counts.cancelled:
            log.warning(
                "batch %s: %d of %d runs failed %s, %d were cancelled; first error: %s",
                result.batch_id,
                counts.failed,
                counts.scheduled,
                result.failures,
                counts.cancelled,
                result.first_error,
            )

    # train ----------------------------------------------------------------------------
    async def _finish_train(self, batch: Batch) -> dict[str, Any]:
        assert batch.collected is not None
        counts = batch.collected.counts
        if counts.scheduled and not counts.succeeded:
            raise BatchFailed(
                f"no run of batch {batch.batch_id!r} succeeded ({counts.failed} failed, "
                f"{counts.cancelled} cancelled); first error: {_quote(batch.collected)}"
            )
        table, metrics, filtered = await self._filled(batch)
        collected = batch.collected
        selector_metric = metrics.pop("selector_metric", None)
        if selector_metric and batch.feedback is not None:
            batch.feedback(selector_metric)
        rows = {"produced": table.num_rows + filtered, "committed": table.num_rows}
        accounts = {**asdict(collected.counts), **rows, "filtered": filtered}
        metrics |= _run_metrics(collected, "rollout")
        metrics |= batch_metrics([s.metrics[0] for s in collected.statuses], "rollout")
        metrics |= lag_metrics(self._scheduler)
        if self._buffer is not None:
            meta = {**batch.meta(), "accounts": accounts, "metrics": metrics}
            await _whole(self._buffer.commit(batch.batch_id, table, meta))
        return {**_summary(batch, collected), "metrics": metrics, "accounts": accounts}

    async def _filled(self, batch: Batch) -> Processed:
        """The processed batch, refilled while operators left fewer groups than wanted.

        A refill is rolled out beside the schedule: it makes the batch whole and is no step.
        """
        while True:
            assert batch.collected is not None
            done = await asyncio.to_thread(self.processing.process, batch.collected.payloads)
            limit = self.cfg.buffer.max_refill_batches
            if limit:
                done[1]["rollout/refill_batches"] = float(batch.refills)
            missing = batch.wanted_tasks - count_groups(done[0])
            if batch.refill is None or batch.refills >= limit or missing <= 0:
                return done
            tasks = await batch.refill()
            if not tasks:
                return done
            await self._roll_out_more(batch, tasks, missing)

    async def _roll_out_more(self, batch: Batch, tasks: Sequence[Task], missing: int) -> None:
        batch.refills += 1
        more = refill_id(batch.batch_id, batch.refills)
        log.info("batch %s lacks %d groups; refill %s", batch.batch_id, missing, more)
        self.scheduler.schedule(tasks, more)
        try:
            result = await self.scheduler.get_results(more)
        except BaseException:
            await self.scheduler.abort_batch(more)
            raise
        self._count(result)
        batch.add(result)

    async def process_experiences(self, payloads: Sequence[bytes]) -> dict[str, float]:
        """Put payloads through the pipeline without a batch; its metrics.

        Raises:
            RuntimeError: there is no pipeline (mode bench, or not prepared).
        """
        if not payloads:
            return {}
        return (await asyncio.to_thread(self.processing.process, payloads))[1]

    # eval -----------------------------------------------------------------------------
    async def _finish_eval(self, batch: Batch) -> dict[str, Any]:
        collected = batch.collected
        assert collected is not None
        prefix = eval_prefix(batch.batch_id, self._verb)
        done = [s.metrics[0] for s in collected.statuses if s.completed_runs]
        metrics = eval_batch_metrics(done, prefix, self.cfg.monitor.detailed_stats)
        metrics[f"{prefix}/finished_task_count"] = float(len(done))
        metrics[f"{prefix}/failed_runs"] = float(collected.counts.failed)
        error = None if done else collected.first_error
        return {**_summary(batch, collected), "metrics": metrics, "error": error}

    async def abort_batch(
        self, batch_id: BatchId, reason: str, keep_partial_results: bool = False
    ) -> Optional[BatchResult]:
        """Cancel a batch and forget it; nothing happens when it is unknown or finalised.

        With ``keep_partial_results`` what was finished is returned instead of dropped.
        """
        batch = self._batches.pop(batch_id, None)
        if batch is None:
            return None
        kept = None
        if keep_partial_results:
            batch.collect(await self.scheduler.get_results(batch_id, timeout=0.0))
            kept = batch.collected
        counts = await self.scheduler.abort_batch(batch_id)
        batch.state = RolloutState.ABORTED
        log.info("batch %s aborted (%s): %s", batch_id, reason, kept.counts if kept else counts)
        return kept

    async def abort_all(self, reason: str, batch_types: Collection[str] = (TRAIN, EVAL)) -> None:
        """Abort every batch of these types that is not finalised."""
        for batch_id in [b.batch_id for b in self._batches.values() if b.batch_type in batch_types]:
            await self.abort_batch(batch_id, reason)

    # queries --------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """``in_flight`` sub-tasks, ``failures`` (failed runs by error type) so far, and of
        :func:`live_status` what each runner does."""
        in_flight = self._scheduler.in_flight if self._scheduler is not None else 0
        counted = {"in_flight": in_flight, "failures": dict(self._failures)}
        return {**counted, **live_status(self._scheduler)}

    async def stats(self) -> dict[str, Any]:
        """:meth:`status`, plus ``pending`` sub-tasks and the run counts of finished batches."""
        pending = self._scheduler.pending if self._scheduler is not None else 0
        return {**self.status(), "pending": pending, "runs": asdict(self._counts)}


async def _whole(commit: Coroutine[Any, Any, Any]) -> None:
    """Await a commit; a cancelled caller still sees it through.

    A commit cut off half-way may or may not exist. Only one that is still waiting for room
    after ``COMMIT_GRACE_S`` is given up.
    """
    task = asyncio.ensure_future(commit)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=COMMIT_GRACE_S)
        task.cancel()
        raise


def _summary(batch: Batch, collected: BatchResult) -> dict[str, Any]:
    return {
        "batch_id": batch.batch_id,
        "batch_type": batch.batch_type,
        "finished_task_count": len(collected.statuses),
    }


def _run_metrics(collected: BatchResult, prefix: str) -> dict[str, float]:
    counts = collected.counts
    return {
        f"{prefix}/finished_task_count": float(len(collected.statuses)),
        f"{prefix}/failed_runs": float(counts.failed),
        f"{prefix}/cancelled_runs": float(counts.cancelled),
        f"{prefix}/retries": float(collected.retries),
    }


def _quote(collected: BatchResult) -> str:
    error = collected.first_error
    if error is None:
        return "none; every run was cancelled at the batch's deadline"
    return f"{error}\n{error.traceback}".rstrip()

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
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Optional

import pyarrow as pa
from distributed import Client

from trinity_dask.algorithm.table import resolve_algorithm
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.buffer.pipeline import ExperiencePipeline
from trinity_dask.config.schema import Config
from trinity_dask.experience.payload import decode
from trinity_dask.explorer.batch_stats import row_statistics
from trinity_dask.explorer.metrics import batch_metrics, eval_batch_metrics
from trinity_dask.explorer.scheduler import Scheduler
from trinity_dask.explorer.tasks import BatchId, BatchResult, Counts
from trinity_dask.workflows import Task

log = logging.getLogger("trinity_dask.coordinator")

TRAIN, EVAL = "train", "eval"
TRUNCATED_ALARM = 0.5
COMMIT_GRACE_S = 5.0


class BatchFailed(RuntimeError):
    """No run of a batch succeeded; the message quotes the first error."""


class RolloutState(Enum):
    """States of a batch, in order."""

    PENDING = "pending"  # registered, no tasks
    RUNNING = "running"
    FINALIZING = "finalizing"
    FINALIZED = "finalized"
    ABORTED = "aborted"


@dataclass
class Batch:
    """One batch between ``submit_batch`` and the end of its finalisation."""

    batch_id: BatchId
    batch_type: str
    task_count: int
    min_wait_num: Optional[int]
    meta: dict[str, Any]
    state: RolloutState = RolloutState.PENDING
    collected: Optional[BatchResult] = None
    result: Optional[dict[str, Any]] = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


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
        self._pipeline: Optional[ExperiencePipeline] = None
        self._scheduler: Optional[Scheduler] = None
        self._batches: dict[BatchId, Batch] = {}
        self._counts = Counts()
        self._failures: Counter[str] = Counter()

    # life -----------------------------------------------------------------------------
    async def prepare(self, slots: int) -> None:
        """Build the pipeline, then start the scheduler with ``slots`` places. Idempotent."""
        if self._pipeline is None:
            advantage_fn = resolve_algorithm(asdict(self.cfg.algorithm)).advantage_fn
            self._pipeline = ExperiencePipeline(self.cfg.buffer.operators, advantage_fn)
        if self._scheduler is None:
            self._scheduler = Scheduler(self.cfg, slots, self._client)
            await self._scheduler.start()

    async def shutdown(self) -> None:
        """Cancel everything that runs and stop the scheduler. Idempotent."""
        scheduler, self._scheduler = self._scheduler, None
        self._batches.clear()
        if scheduler is not None:
            await scheduler.stop()

    def set_slots(self, slots: int) -> None:
        """Rollout capacity has changed."""
        self.scheduler.set_slots(slots)

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("RolloutCoordinator.prepare() was not called, or it is shut down")
        return self._scheduler

    # batches --------------------------------------------------------------------------
    async def submit_batch(
        self,
        batch_id: BatchId,
        tasks: Sequence[Task],
        batch_type: str,
        min_wait_num: Optional[int] = None,
        meta: Optional[dict[str, Any]] = None,
    ) -> None:
        """Start a batch. ``meta`` (JSON-able) is stored with a train batch at its commit.

        Raises:
            ValueError: a batch of this id is active, or the type is not train or eval.
        """
        if batch_type not in (TRAIN, EVAL):
            raise ValueError(f"batch type {batch_type!r} is unknown; it is {TRAIN!r} or {EVAL!r}")
        if batch_id in self._batches:
            raise ValueError(f"batch {batch_id!r} is active already; finalize or abort it first")
        batch = Batch(batch_id, batch_type, len(tasks), min_wait_num, dict(meta or {}))
        if tasks:
            self.scheduler.schedule(tasks, batch_id)
            batch.state = RolloutState.RUNNING
        self._batches[batch_id] = batch

    async def finalize_train_batch(
        self, batch_id: BatchId, timeout: Optional[float] = None
    ) -> dict[str, Any]:
        """Wait for the batch, process it, commit it; a second caller gets the same result.

        Returns ``batch_id``, ``batch_type``, ``finished_task_count``, ``metrics`` and
        ``accounts``. The batch's own deadline always applies; ``timeout`` may shorten it.

        Raises:
            KeyError: unknown batch. ValueError: it is an eval batch.
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
        if batch.collected is None:
            batch.collected = await self._collect(batch, timeout)
        batch.state = RolloutState.FINALIZING
        try:
            finish = self._finish_train if batch.batch_type == TRAIN else self._finish_eval
            result = await finish(batch, batch.collected)
        except BaseException:
            batch.state = RolloutState.RUNNING  # what was collected stays for another try
            raise
        batch.state = RolloutState.FINALIZED
        batch.collected = None
        return result

    async def _collect(self, batch: Batch, timeout: Optional[float]) -> BatchResult:
        result = await self.scheduler.get_results(
            batch.batch_id, min_num=batch.min_wait_num, timeout=timeout
        )
        self._counts += result.counts
        self._failures.update(result.failures)
        if result.counts.failed or result.counts.cancelled:
            log.warning(
                "batch %s: %d of %d runs failed %s, %d were cancelled; first error: %s",
                batch.batch_id,
                result.counts.failed,
                result.counts.scheduled,
                result.failures,
                result.counts.cancelled,
                result.first_error,
            )
        return result

    # train ----------------------------------------------------------------------------
    async def _finish_train(self, batch: Batch, collected: BatchResult) -> dict[str, Any]:
        counts = collected.counts
        if counts.scheduled and not counts.succeeded:
            raise BatchFailed(
                f"no run of batch {batch.batch_id!r} succeeded ({counts.failed} failed, "
                f"{counts.cancelled} cancelled); first error: {_quote(collected)}"
            )
        table, metrics, filtered = await asyncio.to_thread(self._process, collected.payloads)
        rows = {"produced": table.num_rows + filtered, "committed": table.num_rows}
        accounts = {**asdict(counts), **rows, "filtered": filtered}
        metrics |= _run_metrics(collected, "rollout")
        metrics |= batch_metrics([s.metrics[0] for s in collected.statuses], "rollout")
        if self._buffer is not None:
            meta = {**batch.meta, "accounts": accounts, "metrics": metrics}
            await _whole(self._buffer.commit(batch.batch_id, table, meta))
        return {**_summary(batch, collected), "metrics": metrics, "accounts": accounts}

    def _process(self, payloads: Sequence[bytes]) -> tuple[pa.Table, dict[str, float], int]:
        """Rows to commit, metrics, rows filtered out. Runs in a thread."""
        assert self._pipeline is not None
        tables = [decode(payload)[0] for payload in payloads]
        statistics = row_statistics(pa.concat_tables(tables)) if tables else {}
        table, metrics, filtered = self._pipeline.process(tables)
        produced = sum(t.num_rows for t in tables)
        if produced != table.num_rows + filtered:
            raise RuntimeError(
                f"the pipeline got {produced} rows and returned {table.num_rows}, but says it "
                f"filtered {filtered}"
            )
        _warn_truncated(statistics)
        self._require_prompts(statistics)
        return table, {**metrics, **statistics}, filtered

    def _require_prompts(self, statistics: dict[str, float]) -> None:
        """A batch in which no prompt fitted has nothing to learn from, and neither has the next."""
        if statistics.get("rollout/prompt_truncated_share") == 1.0:
            raise BatchFailed(
                "every prompt of the batch is longer than model.max_prompt_tokens = "
                f"{self.cfg.model.max_prompt_tokens}, so nothing was sampled; raise it (and "
                "model.max_model_len), or shorten the prompts or the workflow's system prompt"
            )

    async def process_experiences(self, payloads: Sequence[bytes]) -> dict[str, float]:
        """Put payloads through the pipeline without a batch; its metrics."""
        if not payloads:
            return {}
        return (await asyncio.to_thread(self._process, payloads))[1]

    # eval -----------------------------------------------------------------------------
    async def _finish_eval(self, batch: Batch, collected: BatchResult) -> dict[str, Any]:
        prefix = eval_prefix(batch.batch_id)
        done = [s.metrics[0] for s in collected.statuses if s.completed_runs]
        metrics = eval_batch_metrics(done, prefix)
        metrics[f"{prefix}/finished_task_count"] = float(len(done))
        metrics[f"{prefix}/failed_runs"] = float(collected.counts.failed)
        return {**_summary(batch, collected), "metrics": metrics}

    async def abort_batch(self, batch_id: BatchId, reason: str) -> None:
        """Cancel a batch and forget it; nothing happens when it is unknown or finalised."""
        batch = self._batches.pop(batch_id, None)
        if batch is None:
            return
        counts = await self.scheduler.abort_batch(batch_id)
        batch.state = RolloutState.ABORTED
        log.info("batch %s aborted (%s): %s", batch_id, reason, counts)

    async def abort_all(self, reason: str, batch_types: Collection[str] = (TRAIN, EVAL)) -> None:
        """Abort every batch of these types that is not finalised."""
        for batch_id in [b.batch_id for b in self._batches.values() if b.batch_type in batch_types]:
            await self.abort_batch(batch_id, reason)

    # queries --------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """``in_flight`` sub-tasks and ``failures`` (failed runs by error type) so far."""
        in_flight = self._scheduler.in_flight if self._scheduler is not None else 0
        return {"in_flight": in_flight, "failures": dict(self._failures)}

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


def eval_prefix(batch_id: BatchId) -> str:
    """``eval/<name>`` of an eval batch called ``"<step>/<name>"``."""
    return f"eval/{str(batch_id).partition('/')[2] or batch_id}"


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


def _warn_truncated(statistics: dict[str, float]) -> None:
    share = statistics.get("rollout/truncated_share", 0.0)
    if share > TRUNCATED_ALARM:
        log.warning(
            "%.0f %% of the responses were cut at their maximal length; rewards of cut answers "
            "say little. Raise model.max_response_tokens",
            100 * share,
        )

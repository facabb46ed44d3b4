"""The life of a batch: submitted, run, put through the pipeline, committed.

Invariant: a batch is finalised once, whoever asks and however often; what was collected is
kept until it is committed, so a failed pipeline or a full disk loses nothing but time. A
train batch exists from its commit on, with accounts that balance: rows in = rows out + filtered.
Operators see a whole batch, and the batch stays one table: what no step looks at is never
converted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Optional

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from distributed import Client

from trinity_dask.algorithm.table import resolve_algorithm
from trinity_dask.buffer.data.taskset import SELECTOR_METRIC
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.buffer.operators.operators import OPERATORS
from trinity_dask.config.schema import Config, OperatorConfig
from trinity_dask.experience import PROMPT_TRUNCATED, RESPONSE_TRUNCATED, Experience
from trinity_dask.experience.schema import SCHEMA, LazyRows, decode, group_codes
from trinity_dask.explorer.batches import (
    EVAL,
    TRAIN,
    Batch,
    Feedback,
    Meta,
    Refill,
    RolloutState,
    refill_id,
)
from trinity_dask.explorer.metrics import batch_metrics, eval_batch_metrics
from trinity_dask.explorer.schedule.scheduler import Scheduler
from trinity_dask.explorer.schedule.tasks import BatchId, BatchResult, Counts
from trinity_dask.explorer.schedule.workers import Worker
from trinity_dask.records.batch import Dropped, Why, failed_table
from trinity_dask.records.layout import FAILED, FILTERED
from trinity_dask.records.writer import Recorder, entries
from trinity_dask.registry import build, load_plugins
from trinity_dask.workflows import Task

log = logging.getLogger("trinity_dask.coordinator")

Metrics = dict[str, Any]
AdvantageFn = Callable[[list[Experience]], tuple[list[Experience], Metrics]]
PREFIX = "experience_pipeline"
# a cut answer is masked or punished, never both: punishing what is masked moves the others
EXCLUSIVE = ("mask_response_truncated", "overlong_penalty")
COMMIT_GRACE_S = 5.0
TRUNCATED_ALARM = 0.5


class BatchAborted(RuntimeError):
    """A batch was aborted while it was being finalised; nothing of it is committed."""


class BatchFailed(RuntimeError):
    """Nothing of a batch can be trained on; the message quotes the first error."""


class Coordinator:
    """Owns the scheduler and the experience pipeline of one explorer.

    ``buffer`` receives the committed batches; ``client`` as in :class:`Scheduler`.
    """

    def __init__(
        self,
        cfg: Config,
        buffer: Optional[ExperienceBuffer] = None,
        run_id: str = "",
        client: Optional[Client] = None,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.cfg = cfg
        self.run_id = run_id
        self._guard = guard
        self._buffer = buffer
        self._client = client
        self._pipeline: Optional[ExperiencePipeline] = None
        self._scheduler: Optional[Scheduler] = None
        self._batches: dict[BatchId, Batch] = {}
        self._counts = Counts()
        self._failures: Counter[str] = Counter()
        self._verb = "bench" if cfg.mode == "bench" else "eval"
        self._recorder = Recorder(cfg) if cfg.job_dir else None

    # life -----------------------------------------------------------------------------
    async def prepare(self, slots: Optional[int] = None) -> None:
        """Build the pipeline (``bench`` has none), then start the scheduler with at most
        ``slots`` sub-tasks at a time (None: as many as the workers take). Idempotent."""
        if self._pipeline is None and self.cfg.mode != "bench":
            self._pipeline = ExperiencePipeline.from_config(self.cfg)
        if self._scheduler is None:
            self._scheduler = Scheduler(self.cfg, slots, self._client, self.run_id)
            await self._scheduler.start()
            if self._recorder is not None and self._buffer is not None:
                manifests = await self._buffer.manifests()
                await asyncio.to_thread(self._recorder.sweep, manifests)

    async def shutdown(self) -> None:
        """Cancel everything that runs and stop the scheduler. Idempotent."""
        scheduler, self._scheduler = self._scheduler, None
        for batch in self._batches.values():
            batch.state = RolloutState.ABORTED
        self._batches.clear()
        if scheduler is not None:
            await scheduler.stop()

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("Coordinator.prepare() was not called, or it is shut down")
        return self._scheduler

    @property
    def pipeline(self) -> ExperiencePipeline:
        if self._pipeline is None:
            raise RuntimeError(
                f"there is no experience pipeline in mode {self.cfg.mode!r}, or "
                "Coordinator.prepare() was not called"
            )
        return self._pipeline

    # batches --------------------------------------------------------------------------
    async def submit_batch(
        self,
        batch_id: BatchId,
        tasks: Sequence[Task],
        batch_type: str,
        min_wait_num: Optional[int] = None,
        meta: Meta = dict,
        refill: Optional[Refill] = None,
        feedback: Optional[Feedback] = None,
    ) -> None:
        """Start a batch; an empty list of tasks stays pending.

        Args:
            min_wait_num: tasks that suffice to finalise it (over-rollout); None: all.
            meta: called when a train batch is committed; JSON-able, stored with it. Of an
                evaluation ``step``, ``model_version`` and ``eval``, its name: its answers are
                recorded under these.
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
        if batch_type == EVAL and self._recorder is not None and "eval" in meta():
            tasks = with_rows_kept(tasks, self.cfg.monitor.record_eval)
        batch = Batch(batch_id, batch_type, len(tasks), min_wait_num, meta, refill, feedback)
        if tasks:
            self.scheduler.schedule(tasks, batch_id)
            batch.state = RolloutState.RUNNING
        self._batches[batch_id] = batch

    async def finalize_batch(
        self, batch_id: BatchId, batch_type: str, timeout: Optional[float] = None
    ) -> dict[str, Any]:
        """Wait for a batch, then process and commit it (train), or summarise it (eval).

        A second caller gets the same result: ``batch_id``, ``batch_type``,
        ``finished_task_count``, ``metrics``, and ``accounts`` (train) or ``error`` (eval). The
        batch's own deadline always applies: what is unfinished then is cancelled and counted.

        Raises:
            KeyError: unknown batch. ValueError: it is of the other type.
            TimeoutError: not enough tasks of a train batch were finished within ``timeout``
                seconds. It goes on, what was collected is kept, and it can be finalised again.
            BatchFailed: no run of a train batch succeeded; nothing is committed.
            BatchAborted: it was aborted, or the coordinator shut down, meanwhile.
        """
        batch = self._batches[batch_id]
        if batch.batch_type != batch_type:
            raise ValueError(f"batch {batch_id!r} is a {batch.batch_type} batch")
        async with batch.lock:
            if batch.result is None:
                finish = self._finish_train if batch_type == TRAIN else self._finish_eval
                found = await finish(batch, timeout)
                batch.result = {"batch_id": batch_id, "batch_type": batch_type, **found}
                batch.state, batch.collected = RolloutState.FINALIZED, None
                self._batches.pop(batch_id, None)
        return batch.result

    async def _collect(self, batch: Batch, timeout: Optional[float]) -> BatchResult:
        """Wait for the batch's results and keep them in it, for another try when the pipeline
        or the commit fails. What over-rollout does not wait for is cancelled; its finished
        runs are kept."""
        if batch.state is RolloutState.FINALIZING:
            assert batch.collected is not None
            return batch.collected
        is_eval = batch.batch_type == EVAL
        over = self.cfg.explorer.over_rollout
        part = _joined(
            batch.collected,
            await self.scheduler.get_results(
                batch.batch_id,
                min_num=batch.min_wait_num,
                timeout=timeout,
                clear_timeout_tasks=is_eval,
                wait_after_min_s=0.0 if is_eval else over.wait_after_min_s,
            ),
        )
        # a batch that the scheduler has forgotten looks like one that is complete and empty
        _require_wanted(batch)
        batch.collected = part
        if not part.complete and not is_eval:
            finished = sum(status.completed_runs > 0 for status in part.statuses)
            if batch.min_wait_num is None or finished < batch.min_wait_num:
                wanted = batch.min_wait_num or batch.task_count
                raise TimeoutError(
                    f"batch {batch.batch_id!r}: {finished} of {wanted} tasks finished "
                    f"within {timeout:g} s; it goes on and can be finalised again"
                )
            part = _joined(part, await self.scheduler.get_results(batch.batch_id, timeout=0.0))
            _require_wanted(batch)
        batch.collected, batch.state = part, RolloutState.FINALIZING
        self._count(part)
        return part

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
    async def _finish_train(self, batch: Batch, timeout: Optional[float]) -> dict[str, Any]:
        collected = await self._collect(batch, timeout)
        counts, error = collected.counts, collected.first_error
        if counts.scheduled and not counts.succeeded:
            quoted = "none; every run was cancelled at the batch's deadline"
            if error is not None:
                quoted = f"{error}\n{error.traceback}".rstrip()
            raise BatchFailed(
                f"no run of batch {batch.batch_id!r} succeeded ({counts.failed} failed, "
                f"{counts.cancelled} cancelled); first error: {quoted}"
            )
        process = self.pipeline.process
        dropped = Dropped(self.cfg.monitor.record_filtered)
        found = await asyncio.to_thread(process, collected.payloads, dropped)
        while await self._refilled(batch, found[0]):
            assert batch.collected is not None
            collected = batch.collected
            dropped = Dropped(self.cfg.monitor.record_filtered)
            found = await asyncio.to_thread(process, collected.payloads, dropped)
        table, metrics, filtered = found
        selector_metric = metrics.pop(SELECTOR_METRIC, None)
        if selector_metric and batch.feedback is not None:
            batch.feedback(selector_metric)
        if self.cfg.buffer.max_refill_batches:
            metrics["rollout/refill_batches"] = float(batch.refills)
        n_tasks, counts = len(collected.statuses), collected.counts
        accounts = {
            **asdict(counts),
            "produced": table.num_rows + filtered,
            "committed": table.num_rows,
            "filtered": filtered,
        }
        metrics |= {
            "rollout/finished_task_count": float(n_tasks),
            "rollout/failed_runs": float(counts.failed),
            "rollout/cancelled_runs": float(counts.cancelled),
            "rollout/retries": float(collected.retries),
            **batch_metrics([s.metrics[0] for s in collected.statuses], "rollout"),
        }
        if self._scheduler is not None and self._scheduler.watch is not None:
            metrics |= self._scheduler.watch.take_lag()
        if self._buffer is not None:
            started = time.perf_counter()
            records = await asyncio.to_thread(self._record, collected, dropped, filtered)
            metrics["time/record"] = time.perf_counter() - started
            meta = {**batch.meta(), "accounts": accounts, "metrics": metrics, **records}
            writing = self._buffer.commit(batch.batch_id, table, meta, self._guard)
            commit = asyncio.ensure_future(writing)
            try:
                await asyncio.shield(commit)
            except asyncio.CancelledError:
                # cut off half-way it may or may not exist, so it is seen through; only one that
                # still waits for room after the grace is given up
                await asyncio.wait({commit}, timeout=COMMIT_GRACE_S)
                commit.cancel()
                raise
        return {"finished_task_count": n_tasks, "metrics": metrics, "accounts": accounts}

    def _record(self, of: BatchResult, dropped: Dropped, filtered: int) -> dict[str, Any]:
        """Write what the batch does not hold; for its manifest, which makes that exist."""
        if self._recorder is None:
            return {}
        write = partial(self._recorder.of_batch, batch_id=of.batch_id)
        runs = of.failed_runs[: self.cfg.monitor.record_failed]
        return entries(
            {
                FILTERED: write(FILTERED, table=dropped.table, total=filtered),
                FAILED: write(FAILED, table=partial(failed_table, runs), total=of.counts.failed),
            }
        )

    async def _refilled(self, batch: Batch, table: pa.Table) -> bool:
        """Whether tasks were added, because operators left fewer groups than wanted.

        A refill is rolled out beside the schedule: it makes the batch whole and is no step.
        """
        wanted = batch.task_count if batch.min_wait_num is None else batch.min_wait_num
        missing = wanted - int(table.group_by(["batch", "task"]).aggregate([]).num_rows)
        if batch.refill is None or batch.refills >= self.cfg.buffer.max_refill_batches:
            return False
        if missing <= 0 or not (tasks := await batch.refill()):
            return False
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
        mine = batch.collected
        assert mine is not None
        batch.collected = replace(
            _joined(mine, result),
            batch_id=batch.batch_id,
            counts=mine.counts + result.counts,
            failures=dict(Counter(mine.failures) + Counter(result.failures)),
            first_error=mine.first_error or result.first_error,
            retries=mine.retries + result.retries,
            failed_runs=mine.failed_runs + result.failed_runs,
        )
        return True

    # eval -----------------------------------------------------------------------------
    async def _finish_eval(self, batch: Batch, timeout: Optional[float]) -> dict[str, Any]:
        """``eval/<name>/...`` of a batch called ``"<step>/<name>"``; tasks that are missing are
        only counted."""
        collected = await self._collect(batch, timeout)
        prefix = f"{self._verb}/{str(batch.batch_id).partition('/')[2] or batch.batch_id}"
        done = [s.metrics[0] for s in collected.statuses if s.completed_runs]
        metrics = eval_batch_metrics(done, prefix, self.cfg.monitor.detailed_stats)
        metrics[f"{prefix}/finished_task_count"] = float(len(done))
        metrics[f"{prefix}/failed_runs"] = float(collected.counts.failed)
        error = None if done else collected.first_error
        if self._recorder is not None and any(collected.payloads):
            await asyncio.to_thread(self._record_eval, batch.meta(), collected)
        n_tasks = len(collected.statuses)
        return {"finished_task_count": n_tasks, "metrics": metrics, "error": error}

    def _record_eval(self, meta: Mapping[str, Any], of: BatchResult) -> None:
        tables = [decode(payload)[0] for payload in of.payloads]
        table = pa.concat_tables(tables).slice(0, self.cfg.monitor.record_eval)
        assert self._recorder is not None
        if table.num_rows and "eval" in meta:
            name = meta["eval"] if self._verb == "eval" else f"{self._verb}/{meta['eval']}"
            total = max(sum(t.num_rows for t in tables), of.counts.succeeded)
            self._recorder.evaluation(meta["step"], meta["model_version"], name, table, total)

    # the end --------------------------------------------------------------------------
    async def abort_batch(
        self, batch_id: BatchId, reason: str, keep_partial_results: bool = False
    ) -> Optional[BatchResult]:
        """Cancel a batch and forget it; nothing happens when it is unknown or finalised.

        With ``keep_partial_results`` what was finished is returned instead of dropped.
        """
        batch = self._batches.pop(batch_id, None)
        if batch is None:
            return None
        batch.state, kept = RolloutState.ABORTED, None
        if keep_partial_results:
            found = await self.scheduler.get_results(batch_id, timeout=0.0)
            kept = _joined(batch.collected, found)
        counts = await self.scheduler.abort_batch(batch_id)
        log.info("batch %s aborted (%s): %s", batch_id, reason, kept.counts if kept else counts)
        return kept

    async def abort_all(self, reason: str, batch_types: Collection[str] = (TRAIN, EVAL)) -> None:
        """Abort every batch of these types that is not finalised."""
        for batch_id in [b.batch_id for b in self._batches.values() if b.batch_type in batch_types]:
            await self.abort_batch(batch_id, reason)

    # queries --------------------------------------------------------------------------
    @property
    def workers(self) -> Iterable[Worker]:
        """Those on which sub-tasks can run; none before :meth:`prepare`."""
        return () if self._scheduler is None else self._scheduler.state.workers

    def status(self) -> dict[str, Any]:
        """``failures`` (failed runs by error type) so far, and :meth:`Scheduler.status`."""
        now = {"in_flight": 0} if self._scheduler is None else self._scheduler.status()
        return {**now, "failures": dict(self._failures)}

    async def stats(self) -> dict[str, Any]:
        """:meth:`status`, plus ``pending`` sub-tasks and the run counts of finished batches."""
        pending = len(self._scheduler.state.pending) if self._scheduler is not None else 0
        return {**self.status(), "pending": pending, "runs": asdict(self._counts)}


def _require_wanted(batch: Batch) -> None:
    if batch.state is RolloutState.ABORTED:
        raise BatchAborted(f"batch {batch.batch_id!r} was aborted while it was being finalised")


def _joined(before: Optional[BatchResult], part: BatchResult) -> BatchResult:
    """What a call of the scheduler returned, beside what earlier ones of the batch did."""
    if before is None:
        return part
    statuses, payloads = [*before.statuses, *part.statuses], [*before.payloads, *part.payloads]
    return replace(part, statuses=statuses, payloads=payloads)


def with_rows_kept(tasks: Sequence[Task], n_rows: int) -> list[Task]:
    """The tasks, so many of which are to bring their rows that there are about ``n_rows``; these
    are spread over all of them."""
    runs = sum(task.repeat_times for task in tasks)
    if not runs or not n_rows:
        return list(tasks)
    wanted, found, seen = min(n_rows / runs, 1.0), 0.0, list[Task]()
    for task in tasks:
        found += wanted
        seen.append(replace(task, keep_rows=found >= 1.0 - 1e-9))
        found -= seen[-1].keep_rows
    return seen


class ExperiencePipeline:
    """Operators in the configured order, then the grouped advantage, over the experiences of one
    batch. ``max_prompt_tokens`` is only quoted.

    Raises:
        ValueError: an unknown operator or operator argument, with the nearest name, or
            operators that exclude each other.
    """

    def __init__(
        self,
        operators: Sequence[OperatorConfig],
        advantage_fn: Optional[AdvantageFn] = None,
        max_prompt_tokens: Optional[int] = None,
    ) -> None:
        if {cfg.name for cfg in operators}.issuperset(EXCLUSIVE):
            raise ValueError(
                f"operators {' and '.join(EXCLUSIVE)} exclude each other: a cut answer is either "
                "masked or punished; leave one of them out"
            )
        self._max_prompt_tokens = max_prompt_tokens
        self._steps: list[tuple[str, AdvantageFn, Optional[Why]]] = []
        for place, cfg in enumerate(operators):
            used = sum(other.name == cfg.name for other in operators[:place])
            label = f"{cfg.name}#{used + 1}" if used else cfg.name
            operator = build(f"operator {cfg.name!r}", OPERATORS.get(cfg.name), cfg.args)
            self._steps.append((label, operator.process, getattr(operator, "why", None)))
        if advantage_fn is not None:
            self._steps.append(("advantage", advantage_fn, None))

    @classmethod
    def from_config(cls, cfg: Config) -> ExperiencePipeline:
        load_plugins(cfg.plugin_dirs)  # they may register a function of the algorithm
        spec = resolve_algorithm(asdict(cfg.algorithm))
        advantage_fn = None if getattr(spec, "advantage_in_trainer", False) else spec.advantage_fn
        return cls(cfg.buffer.operators, advantage_fn, cfg.model.max_prompt_tokens)

    def process(
        self, payloads: Sequence[bytes], dropped: Optional[Dropped] = None
    ) -> tuple[pa.Table, Metrics, int]:
        """Table to commit, metrics (``experience_pipeline/...``, ``rollout/...``), and how many
        rows were filtered out, which ``dropped`` is told. CPU work: it belongs in a thread.

        The rows of a task are made to lie together. An operator's metrics carry its name,
        so two operators never overwrite each other; ``selector_metric``, which is no
        number, is passed on under its own name, several of them as one.

        Of a batch with no prompt that fitted no row is left.

        Raises:
            ValueError: a step returned more rows than it got.
        """
        started = time.perf_counter()
        # in the order of their tasks, whichever ended first: mini-batches depend on it
        tables = [table for payload in payloads if (table := decode(payload)[0]).num_rows]
        first = [(t["task"][0].as_py(), t["run"][0].as_py()) for t in tables]
        # task 2 before task 10
        order = sorted(range(len(tables)), key=lambda i: (len(first[i][0]), *first[i]))
        table = pa.concat_tables(tables[i] for i in order) if tables else SCHEMA.empty_table()
        codes = group_codes(table)
        if np.any(np.diff(codes) < 0):  # a group's rows lie apart: stable, by first appearance
            table = table.take(pa.array(np.argsort(codes, kind="stable")))
        rows = LazyRows(table)
        experiences = rows.experiences
        metrics: Metrics = {**row_statistics(table)}
        for label, step, why in self._steps:
            before = list(experiences)
            experiences, found = step(experiences)
            if len(experiences) > len(before):
                raise ValueError(
                    f"pipeline step {label!r} returned {len(experiences)} of {len(before)} "
                    "experiences; a step may change or drop rows, not add them"
                )
            if dropped is not None:
                dropped.compare(label, before, experiences, why)
            observed = found.pop(SELECTOR_METRIC, None)
            if observed is not None:
                metrics[SELECTOR_METRIC] = {**metrics.get(SELECTOR_METRIC, {}), **observed}
            for key, value in found.items():
                name = key if key.startswith("time/") else f"{PREFIX}/{label}/{key}"
                metrics[name] = float(value)
        result = rows.to_table(experiences)
        metrics[f"{PREFIX}/experience_count"] = float(result.num_rows)
        metrics[f"time/{PREFIX}"] = time.perf_counter() - started
        if metrics.get("rollout/truncated_share", 0.0) > TRUNCATED_ALARM:
            log.warning(
                "%.0f %% of the responses were cut at their maximal length; rewards of cut "
                "answers say little. Raise model.max_response_tokens",
                100 * metrics["rollout/truncated_share"],
            )
        if metrics.get("rollout/prompt_truncated_share") == 1.0:
            log.warning(
                "every prompt of the batch is longer than model.max_prompt_tokens = %s, so nothing "
                "was sampled, and it is committed without rows; raise it (and "
                "model.max_model_len), or shorten the prompts or the workflow's system prompt",
                self._max_prompt_tokens,
            )
            result = result.slice(0, 0)
            if dropped is not None:
                dropped.compare(PROMPT_TRUNCATED, experiences, [])
        if dropped is not None:
            dropped.source = rows
        return result, metrics, table.num_rows - result.num_rows


def row_statistics(table: pa.Table, prefix: str = "rollout") -> dict[str, float]:
    """Lengths in tokens, share of truncated responses, spread of the rewards.

    ``response_tokens`` is the sum over the batch. An empty table gives an empty dict.
    """
    if table.num_rows == 0:
        return {}
    prompts = table["prompt_length"].to_numpy()
    responses = pc.list_value_length(table["tokens"]).to_numpy() - prompts
    truncated = pc.equal(table["truncate_status"], RESPONSE_TRUNCATED).fill_null(False)
    too_long = pc.equal(table["truncate_status"], PROMPT_TRUNCATED).fill_null(False)
    rewards = table["reward"].drop_null().to_numpy()
    found = {
        "prompt_length/mean": prompts.mean(),
        "prompt_length/max": prompts.max(),
        "response_length/mean": responses.mean(),
        "response_length/max": responses.max(),
        "response_tokens": responses.sum(),
        "truncated_share": pc.mean(truncated).as_py(),
        "prompt_truncated_share": pc.mean(too_long).as_py(),
        "reward/std": rewards.std() if len(rewards) else 0.0,
    }
    return {f"{prefix}/{name}": float(value) for name, value in found.items()}

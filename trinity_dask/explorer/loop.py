"""The explorer's loop: reads tasks, has them rolled out, meets the trainer, evaluates.

Invariant: batches are committed in the order of their steps, so the last manifest says how
far exploration is; in every style but ``fully_async``, everything up to a boundary is committed
before new weights are asked for, and only then do the engines' weights change. An error of any
batch ends :meth:`ExploreLoop.explore` with it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Optional

from trinity_dask.aio import ended
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.buffer.store.manifest import Manifest
from trinity_dask.config.schema import Config
from trinity_dask.explorer.batches import (
    EVAL,
    TRAIN,
    BatchWindow,
    signature,
    train_batch_id,
    train_step_of,
)
from trinity_dask.explorer.coordinator import Coordinator
from trinity_dask.explorer.engine_weights import EngineWeights
from trinity_dask.explorer.evaluation import Benchmark, Evaluations
from trinity_dask.explorer.task_stream import TasksetReader, TaskStream
from trinity_dask.files import read_json, write_json
from trinity_dask.monitor.monitor import Monitor
from trinity_dask.sync.synchronizer import Synchronizer

log = logging.getLogger("trinity_dask.explorer")

FULLY_ASYNC = "fully_async"
WATCH_S = 30.0  # one long-poll for new weights


class ExploreLoop:
    """One explorer of a job; lives on the control worker's event loop.

    Args:
        synchronizer: None without a trainer; the engines' weights then never change.
        buffer: where batches are committed; None in mode ``bench``.
        weights: the engines, for :meth:`benchmark`.
        end_writes: tells the buffer that this explorer commits no more (default: closes it).
    """

    def __init__(
        self,
        cfg: Config,
        coordinator: Coordinator,
        synchronizer: Optional[Synchronizer],
        buffer: Optional[ExperienceBuffer],
        monitor: Monitor,
        weights: Optional[EngineWeights] = None,
        end_writes: Optional[Callable[[], Awaitable[None]]] = None,
    ) -> None:
        self.cfg = cfg
        self.name = cfg.explorer.name
        self.step = 0
        self.model_version = -1
        self.stopped = False
        self.weights = weights
        self._synchronizer = synchronizer
        self.monitor = monitor
        self._coordinator = coordinator
        self._buffer = buffer
        self._end_writes = end_writes or (buffer.close_writes if buffer is not None else None)
        self._signed = signature(cfg.mode, self.name)
        self._state_file = f"{cfg.job_dir}/{cfg.explorer.name}_meta.json"  # how far it is
        self._learned_file = Path(str(cfg.job_dir)) / f"{cfg.explorer.name}_learned.json"
        self._reader: Optional[TasksetReader] = None
        self._stream: Optional[TaskStream] = None
        self._evals: Optional[Evaluations] = None
        self._in_flight = BatchWindow(cfg.explorer.max_inflight_batches, self._commit)
        self._submitted: dict[int, tuple[float, int]] = {}  # step -> time, model version
        self._halt: Optional[asyncio.Event] = None
        self._seen: dict[str, Any] = {}

    # preparation ----------------------------------------------------------------------
    async def prepare(self) -> None:
        """Open the tasksets and continue after the last committed batch.

        Raises:
            DataError: a taskset's file or column is missing.
        """
        self._halt = asyncio.Event()
        self._reader = await asyncio.to_thread(TasksetReader, self.cfg)
        self._stream = TaskStream(self._reader)
        verb = "bench" if self.cfg.mode == "bench" else "eval"
        self._evals = Evaluations(self._reader, self._coordinator, self.monitor, verb)
        mine = await self._committed()
        if mine:
            self.step = max(mine)
            recent = sorted(mine)[-self.cfg.explorer.max_inflight_batches :]
            learned = await asyncio.to_thread(read_json, self._learned_file)
            stored = {step: manifest.meta for step, manifest in mine.items()}
            told = {s: m["selector_metric"] for s, m in stored.items() if "selector_metric" in m}
            state, last = stored[self.step], [(step, stored[step]) for step in recent]
            await asyncio.to_thread(self.stream.load, state, last, learned, told)
            log.info("%s continues after step %d", self.name, self.step)
        saved = await asyncio.to_thread(read_json, Path(self._state_file)) or {}
        step, version = saved.get("last_eval", (-1, -1))
        self._evals.last = (int(step), int(version))
        if self._synchronizer is not None:
            self.model_version = await self._synchronizer.register_explorer(self.name, self.step)

    async def _committed(self) -> dict[int, Manifest]:
        """This explorer's batches by step."""
        manifests = await self._buffer.manifests() if self._buffer is not None else []
        steps = ((train_step_of(m.batch_id, self._signed), m) for m in manifests)
        return {step: manifest for step, manifest in steps if step is not None}

    @property
    def stream(self) -> TaskStream:
        if self._stream is None:
            raise RuntimeError("ExploreLoop.prepare() was not called")
        return self._stream

    @property
    def committed_step(self) -> int:
        """The newest step that is committed and logged: batches are committed in order."""
        return self.step - len(self._submitted)

    @property
    def evals(self) -> Evaluations:
        if self._evals is None:
            raise RuntimeError("ExploreLoop.prepare() was not called")
        return self._evals

    # the loop -------------------------------------------------------------------------
    async def explore(self) -> str:
        """Explore until the tasks end, :meth:`finish` or :meth:`stop`; returns its name.

        Raises:
            BatchFailed: no run of a batch succeeded. Anything the buffer or the
            synchronizer raised.
        """
        assert self._halt is not None
        steps = asyncio.ensure_future(self._explore_steps())
        halt = asyncio.ensure_future(self._halt.wait())
        watch = asyncio.ensure_future(self._watch_weights())
        try:
            await asyncio.wait({steps, halt, watch}, return_when=asyncio.FIRST_COMPLETED)
            for part in (steps, watch):
                if part.done():
                    part.result()
            await ended([steps, halt, watch])
            await self._drop_in_flight()
            if not self.stopped:
                await self._end()
        finally:
            await ended([steps, halt, watch, *self._in_flight.tasks, *self.evals.in_flight])
            await self.save_checkpoint()
            if self._synchronizer is not None:
                await self._synchronizer.explorer_stopped(self.name)
        return self.name

    async def _explore_steps(self) -> None:
        # first what an uninterrupted run had done between the last commit and the next step
        cfg = self.cfg.synchronizer
        past = self.step - cfg.sync_offset
        meets = self._synchronizer is not None and cfg.sync_style != FULLY_ASYNC
        if meets and past >= cfg.sync_interval and self.step > past % cfg.sync_interval:
            await self.sync_weight(self.step - past % cfg.sync_interval)
        if self.step == 0:
            if self.cfg.explorer.eval_on_startup and self.evals.last[0] < 0:
                await self.eval()
        elif self.need_eval() and self.evals.last[0] < self.step:
            await self.eval()
        while await self.explore_step():
            if await self.need_sync():
                await self.sync_weight()
            if self.need_eval():
                await self.eval()
        await self.finish_current_steps()

    async def explore_step(self) -> bool:
        """Read and submit the next batch; False when there is none.

        Waits for the oldest batch while ``explorer.max_inflight_batches`` are not committed.
        """
        flying, synchronizer = self._in_flight, self._synchronizer
        await flying.shrink_to(flying.limit - 1)
        if synchronizer is not None and self.cfg.synchronizer.max_staleness is not None:
            while not await synchronizer.explorer_may_submit(
                self.name, self.step + 1, lambda: sum(not task.done() for task in flying.tasks)
            ):
                before = self.model_version
                if await self.sync_weight() == before:  # not again before somebody has moved
                    await synchronizer.changed()
        tasks = await self.stream.read(self.step + 1)
        if tasks is None:
            return False
        self.step += 1
        step = self.step
        ratio, n = self.cfg.explorer.over_rollout.ratio, len(tasks)
        await self._coordinator.submit_batch(
            train_batch_id(step, self._signed),
            tasks,
            TRAIN,
            min_wait_num=max(math.ceil(n * (1 - ratio)), 1) if ratio > 0 else None,
            meta=lambda: {**self.stream.state_at(step), "explorer": self.name, "step": step},
            refill=self.stream.read_more,
            feedback=lambda metric: self.stream.feedback(step, metric),
        )
        self._submitted[step] = (time.monotonic(), self.model_version)
        flying.add(step)
        return True

    async def _commit(self, step: int) -> None:
        """Finalise batch ``step``, which commits it, and log it."""
        waited = time.monotonic()
        batch_id = train_batch_id(step, self._signed)
        result = await self._coordinator.finalize_batch(batch_id, TRAIN)
        if learned := self.stream.take_learned():
            await asyncio.to_thread(write_json, self._learned_file, learned)
        submitted, version = self._submitted.pop(step)
        now = time.monotonic()
        metrics = result["metrics"]
        tokens_per_s = metrics.get("rollout/response_tokens", 0.0) / max(now - waited, 1e-9)
        self._seen["reward"] = metrics.get("rollout/reward/mean")
        self._seen["tokens_per_s"] = round(tokens_per_s, 1)
        metrics["rollout/model_version"] = float(version)
        metrics["rollout/tokens_per_s"] = tokens_per_s
        metrics["rollout/skipped_rows"] = float(self.stream.skipped_rows)
        metrics["time/explore_step"] = now - submitted
        metrics["time/wait_explore_step"] = now - waited
        self.monitor.log(step, metrics)

    async def finish_current_steps(self) -> None:
        """Commit everything that was submitted, in order, and log pending evals."""
        await self._in_flight.shrink_to(0)
        if self.evals.in_flight:
            await self.evals.wait()
            await self.save_checkpoint()

    # weights --------------------------------------------------------------------------
    async def need_sync(self) -> bool:
        """Whether to drain and ask for weights now; the style decides."""
        if self._synchronizer is None:
            return False
        return await self._synchronizer.explorer_should_sync(self.name, self.step)

    async def sync_weight(self, boundary: Optional[int] = None, final: bool = False) -> int:
        """Drain, then wait for the trainer and take its weights; the engines' version.

        ``boundary`` is the step to wait for (default: the current one); ``final`` waits for
        the last weights that the committed rows can give.
        """
        await self.finish_current_steps()
        if self._synchronizer is None:
            return self.model_version
        started = time.monotonic()
        step = boundary or self.step
        self.model_version = await self._synchronizer.explorer_sync(self.name, step, final=final)
        self._log_sync({"time/sync_wait": time.monotonic() - started})
        return self.model_version

    async def _watch_weights(self) -> None:
        """Style ``fully_async``: weights change under running rollouts. Never returns."""
        if self._synchronizer is None or self.cfg.synchronizer.sync_style != FULLY_ASYNC:
            await asyncio.Event().wait()
            return
        while True:
            version = await self._synchronizer.watch(self.name, WATCH_S)
            if version != self.model_version:
                self.model_version = version
                self._log_sync({})

    def _log_sync(self, times: dict[str, float]) -> None:
        assert self._synchronizer is not None
        version = {"explorer/model_version": float(self.model_version)}
        self.monitor.log(self.step, {**self._synchronizer.metrics, **times, **version})

    # evaluation -----------------------------------------------------------------------
    def need_eval(self) -> bool:
        """Whether the eval tasksets are due at this step."""
        interval = self.cfg.explorer.eval_interval
        return interval > 0 and self.step > 0 and self.step % interval == 0

    async def eval(self) -> None:
        """Submit every eval taskset on the current weights.

        The results are logged at this step; they are waited for before the weights change,
        while the next batch of training tasks is rolled out beside them.
        """
        await self.evals.start(self.step, self.model_version)

    async def benchmark(self) -> bool:
        """Evaluate the job's checkpoints in order; see :class:`Benchmark`. True when whole.

        Raises:
            RuntimeError: the loop was made without engines. Whatever the benchmark raised.
        """
        if self.weights is None:
            raise RuntimeError("this explorer was made without engines (weights=None)")
        assert self._halt is not None
        benchmark = Benchmark(self.cfg, self.evals, self.weights)

        async def run() -> None:
            async for step in benchmark.run():
                self.step = self.model_version = step

        work = asyncio.ensure_future(run())
        halt = asyncio.ensure_future(self._halt.wait())
        try:
            await asyncio.wait({work, halt}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return False
            work.result()
            return True
        finally:
            await ended([work, halt, *self.evals.in_flight])
            await self._coordinator.abort_all("the benchmark ends")

    # the end --------------------------------------------------------------------------
    async def _end(self) -> None:
        """No more batches: let the trainer finish, take the final weights, evaluate them."""
        if self._end_writes is not None:
            await self._end_writes()
        if self._synchronizer is not None:
            await self.sync_weight(final=True)
        due = self.evals.last != (self.step, self.model_version)
        if self.cfg.explorer.eval_at_end and due:
            await self.eval()
        await self.finish_current_steps()

    async def finish(self) -> None:
        """The trainer needs no more batches: drop those in flight, finish the evals, end.

        Returns at once.
        """
        if self._halt is not None:
            self._halt.set()

    async def stop(self) -> None:
        """End now: in-flight batches are dropped (a resumed run makes them again)."""
        self.stopped = True
        await self.finish()

    async def _drop_in_flight(self) -> None:
        """Abort train batches nobody will train on; evals too when the run is stopped."""
        pending = [*self._in_flight.tasks, *(self.evals.in_flight if self.stopped else [])]
        if all(task.done() for task in pending):
            return
        await ended(pending)
        self._in_flight.tasks.clear()
        if self.stopped:
            self.evals.in_flight.clear()
        kinds = (TRAIN, EVAL) if self.stopped else (TRAIN,)
        await self._coordinator.abort_all("the run ends", kinds)
        self.step = max(await self._committed(), default=0)

    async def save_checkpoint(self) -> None:
        """Write ``<explorer>_meta.json``. The manifests are the truth; this is for people."""
        assert self._reader is not None
        meta = {
            "latest_iteration": self.step,
            "taskset_states": [self._reader.train.state_dict()],
            "last_eval": list(self.evals.last),
        }
        await asyncio.to_thread(write_json, Path(self._state_file), meta)

    # queries --------------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """``explorer_step``, ``reward`` (mean of the last batch), ``eval``, ``tokens_per_s``."""
        scores = self._evals.scores if self._evals is not None else {}
        return {"explorer_step": self.step, "eval": scores, **self._seen}

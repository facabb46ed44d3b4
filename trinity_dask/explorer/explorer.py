"""The explorer: reads tasks, has them rolled out, meets the trainer, evaluates.

Invariant: batches are committed in the order of their steps, so the last manifest says how
far exploration is; everything up to a boundary is committed before new weights are asked
for. An error of any batch ends :meth:`Explorer.explore` with that error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from pathlib import Path
from typing import Any, Optional

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.config.schema import Config
from trinity_dask.explorer.rollout_coordinator import EVAL, TRAIN, RolloutCoordinator
from trinity_dask.explorer.taskset_reader import TasksetReader
from trinity_dask.manager.state_manager import StateManager, read_json, write_json
from trinity_dask.manager.synchronizer import Synchronizer
from trinity_dask.monitor.monitor import Monitor

log = logging.getLogger("trinity_dask.explorer")

MAX_INFLIGHT_BATCHES = 2


class Explorer:
    """Explores in style ``fixed``.

    ``synchronizer`` is None when there is no trainer; the engines' weights then never change.
    """

    def __init__(
        self,
        cfg: Config,
        coordinator: RolloutCoordinator,
        synchronizer: Optional[Synchronizer],
        buffer: ExperienceBuffer,
        monitor: Monitor,
    ) -> None:
        self.cfg = cfg
        self.step = 0
        self.model_version = -1
        self._coordinator = coordinator
        self._synchronizer = synchronizer
        self._buffer = buffer
        self._monitor = monitor
        self._state_file = StateManager(str(cfg.job_dir), cfg.explorer.name).explorer_file
        self._reader: Optional[TasksetReader] = None
        self._in_flight: deque[asyncio.Task[None]] = deque()
        self._evals: list[asyncio.Task[None]] = []
        self._last_eval = (-1, -1)  # step and model version of the last finished evaluation
        self._evaluating = (-1, -1)
        self._halt: Optional[asyncio.Event] = None
        self._stopped = False
        self._seen: dict[str, Any] = {"eval": {}}

    # preparation ----------------------------------------------------------------------
    async def prepare(self) -> None:
        """Open the tasksets and continue after the last committed batch.

        Raises:
            DataError: a taskset's file or column is missing.
        """
        self._halt = asyncio.Event()
        self._reader = await asyncio.to_thread(TasksetReader, self.cfg)
        manifest = await self._buffer.last_manifest()
        if manifest is not None:
            self.step = int(manifest.batch_id)
            self._reader.train.load_state_dict(manifest.meta["taskset_state"])
            log.info("continuing after step %d", self.step)
        saved = await asyncio.to_thread(read_json, Path(self._state_file)) or {}
        step, version = saved.get("last_eval", (-1, -1))
        self._last_eval = (int(step), int(version))
        await self._learn_version()

    async def _learn_version(self) -> None:
        if self._synchronizer is not None:
            self.model_version = await self._synchronizer.get_latest_model_version()

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
        try:
            await asyncio.wait({steps, halt}, return_when=asyncio.FIRST_COMPLETED)
            if steps.done():
                steps.result()
            await self._cancel([steps, halt])
            await self._drop_in_flight()
            if not self._stopped:
                await self._end()
        finally:
            await self._cancel([steps, halt, *self._in_flight, *self._evals])
            await self.save_checkpoint()
            if self._synchronizer is not None:
                await self._synchronizer.explorer_stopped(self.step)
        return self.cfg.explorer.name

    async def _explore_steps(self) -> None:
        await self._catch_up()
        while await self.explore_step():
            if self.need_sync():
                await self.sync_weight()
            if self.need_eval():
                await self.eval()
        await self.finish_current_steps()

    async def _catch_up(self) -> None:
        """What an uninterrupted run had done between the last commit and the next step."""
        boundary = self._last_boundary()
        if boundary > 0:
            await self.sync_weight(boundary)
        if self.step == 0:
            if self.cfg.explorer.eval_on_startup and self._last_eval[0] < 0:
                await self.eval()
        elif self.need_eval() and self._last_eval[0] < self.step:
            await self.eval()

    async def explore_step(self) -> bool:
        """Read and submit the next batch; False when there is none.

        Waits for the oldest batch while ``MAX_INFLIGHT_BATCHES`` are not committed yet.
        """
        assert self._reader is not None
        while len(self._in_flight) >= MAX_INFLIGHT_BATCHES:
            await self._finish_oldest()
        tasks = await asyncio.to_thread(self._reader.read)
        if tasks is None:
            return False
        self.step += 1
        meta = {"taskset_state": self._reader.train.state_dict()}
        await self._coordinator.submit_batch(self.step, tasks, TRAIN, meta=meta)
        previous = self._in_flight[-1] if self._in_flight else None
        finalize = self._finalize(self.step, previous, self.model_version)
        self._in_flight.append(asyncio.ensure_future(finalize))
        return True

    async def _finalize(
        self, step: int, previous: Optional[asyncio.Task[None]], version: int
    ) -> None:
        """Commit step ``step`` after the one before it, and log it."""
        started = time.monotonic()
        if previous is not None:
            await asyncio.shield(previous)
        result = await self._coordinator.finalize_train_batch(step)
        seconds = time.monotonic() - started
        metrics = result["metrics"]
        tokens_per_s = metrics.get("rollout/response_tokens", 0.0) / max(seconds, 1e-9)
        self._seen["reward"] = metrics.get("rollout/reward/mean")
        self._seen["tokens_per_s"] = round(tokens_per_s, 1)
        metrics["rollout/model_version"] = float(version)
        metrics["rollout/tokens_per_s"] = tokens_per_s
        metrics["time/explore_step"] = seconds
        self._monitor.log(step, metrics)

    async def _finish_oldest(self) -> None:
        # removed only afterwards: a cancelled wait must not lose sight of the batch
        await asyncio.shield(self._in_flight[0])
        self._in_flight.popleft()

    async def finish_current_steps(self) -> None:
        """Commit everything that was submitted, in order, and log pending evals."""
        while self._in_flight:
            await self._finish_oldest()
        if self._evals:
            await asyncio.shield(asyncio.gather(*self._evals))
            self._evals.clear()
            self._last_eval = self._evaluating
            await self.save_checkpoint()

    # synchronisation ------------------------------------------------------------------
    def need_sync(self) -> bool:
        """Whether this step is a boundary: every ``sync_interval`` steps after ``sync_offset``."""
        cfg = self.cfg.synchronizer
        past = self.step - cfg.sync_offset
        return self._synchronizer is not None and past > 0 and past % cfg.sync_interval == 0

    def _last_boundary(self) -> int:
        cfg = self.cfg.synchronizer
        past = self.step - cfg.sync_offset
        if self._synchronizer is None or past < cfg.sync_interval:
            return 0
        return self.step - past % cfg.sync_interval

    async def sync_weight(self, boundary: Optional[int] = None) -> int:
        """Drain, then wait for the trainer and take its weights; the engines' version.

        ``boundary`` is the step to wait for (default: the current one).
        """
        await self.finish_current_steps()
        if self._synchronizer is None:
            return self.model_version
        started = time.monotonic()
        self.model_version = await self._synchronizer.explorer_sync(boundary or self.step)
        seconds = time.monotonic() - started
        metrics = {**self._synchronizer.metrics, "time/sync_wait": seconds}
        self._monitor.log(self.step, {**metrics, "explorer/model_version": self.model_version})
        return self.model_version

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
        assert self._reader is not None
        self._evaluating = (self.step, self.model_version)
        for name in self._reader.evals:
            tasks = await asyncio.to_thread(self._reader.read_eval, name)
            await self._coordinator.submit_batch(f"{self.step}/{name}", tasks, EVAL)
            self._evals.append(asyncio.ensure_future(self._finish_eval(self.step, name)))

    async def _finish_eval(self, step: int, name: str) -> None:
        started = time.monotonic()
        version = float(self.model_version)
        result = await self._coordinator.finalize_eval_batch(f"{step}/{name}")
        metrics = dict(result["metrics"])
        value = _headline(metrics, name)
        if value is not None:
            self._seen["eval"] = {**self._seen["eval"], name: value}
        metrics[f"eval/{name}/model_version"] = version
        metrics["time/eval"] = time.monotonic() - started
        self._monitor.log(step, metrics)

    # the end --------------------------------------------------------------------------
    async def _end(self) -> None:
        """No more batches: let the trainer finish, take the final weights, evaluate them."""
        await self._buffer.close_writes()
        if self._synchronizer is not None:
            await self.sync_weight()
        due = self._last_eval != (self.step, self.model_version)
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
        self._stopped = True
        await self.finish()

    async def _drop_in_flight(self) -> None:
        """Abort train batches nobody will train on; evals too when the run is stopped."""
        pending = [*self._in_flight, *(self._evals if self._stopped else [])]
        if all(task.done() for task in pending):
            return
        await self._cancel(pending)
        self._in_flight.clear()
        if self._stopped:
            self._evals.clear()
        await self._coordinator.abort_all(
            "the run ends", (TRAIN, EVAL) if self._stopped else (TRAIN,)
        )
        manifest = await self._buffer.last_manifest()
        self.step = int(manifest.batch_id) if manifest is not None else 0

    @staticmethod
    async def _cancel(tasks: list[Any]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def save_checkpoint(self) -> None:
        """Write ``<explorer>_meta.json``. The manifests are the truth; this is for people."""
        assert self._reader is not None
        meta = {
            "latest_iteration": self.step,
            "taskset_states": [self._reader.train.state_dict()],
            "last_eval": list(self._last_eval),
        }
        await asyncio.to_thread(write_json, Path(self._state_file), meta)

    # queries --------------------------------------------------------------------------
    async def is_alive(self) -> bool:
        return True

    def status(self) -> dict[str, Any]:
        """``explorer_step``, ``reward`` (mean of the last batch), ``eval``, ``tokens_per_s``."""
        return {"explorer_step": self.step, **self._seen}


def _headline(metrics: dict[str, float], name: str) -> Optional[float]:
    """The one number of an evaluation: mean accuracy if there is one, else mean reward."""
    for metric in ("accuracy", "reward"):
        for key, value in metrics.items():
            if key.startswith(f"eval/{name}/{metric}/mean@"):
                return value
    return None

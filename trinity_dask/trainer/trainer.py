"""The trainer: which rows, which step, when to synchronise, when to save.

Invariant: a step is *train, acknowledge, synchronise, log, save*, in that order, so a
checkpoint names exactly the rows its weights have seen, and a run that is killed and goes on
from it has the metrics of every step before; and a step that was once announced
to the synchronizer keeps its weights: lost ranks come back by replaying the same rows from
the last checkpoint, not by forgetting them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional, Protocol

from trinity_dask.aio import Spans
from trinity_dask.buffer.errors import EndOfData
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.cluster.rpc import ActorHandle, ActorLost
from trinity_dask.config.schema import Config
from trinity_dask.trainer.checkpoints.checkpoint import HF_EXPORT, latest_complete, read_state
from trinity_dask.trainer.metrics import Alarms, merge_rank_metrics
from trinity_dask.trainer.ranks.rank import RankPool
from trinity_dask.trainer.sources import Feed, Source, open_source

log = logging.getLogger("trinity_dask.trainer")

CHECK_TIMEOUT_S = 30.0


class NoUsableRows(RuntimeError):
    """Batch after batch had no row to train on."""


class Synchronizer(Protocol):
    """Who carries the weights to the explorer; ``progress``: every batch up to it is trained."""

    async def trainer_sync(self, step: int, progress: int) -> object:
        """``step`` is done; returns when the trainer may go on."""

    async def trainer_starved(self, step: int) -> object:
        """No rows came, ``step`` is the last one that is done."""

    async def trainer_resumed(self) -> object:
        """Rows came again."""

    async def trainer_stopped(self, step: int, progress: int) -> object:
        """No step will follow."""

    def set_trainer_rank0(self, handle: ActorHandle) -> object:
        """The rank that sends and writes weights, now and after every rebuild."""


class Monitor(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> object:
        """Metrics of one train step."""


@dataclass(frozen=True)
class Saved:
    """The checkpoint that lost ranks start from; ``path`` None is the initial model."""

    path: Optional[Path] = None
    step: int = 0
    exported: bool = False


class Trainer:
    """Drives the trainer ranks of one stage; lives on the control worker's event loop.

    Args:
        cfg: the stage's validated config.
        run_id: prefix of the ranks' actor keys, unique per stage and run.
        buffer: the experience buffer; None when the stage trains from a file or a store
            that an earlier run filled.
        synchronizer: told about every step; None without an explorer.
        monitor: None for no metrics.
        pool: the ranks; made from ``cfg`` when None.
    """

    def __init__(
        self,
        cfg: Config,
        run_id: str,
        buffer: Optional[ExperienceBuffer] = None,
        synchronizer: Optional[Synchronizer] = None,
        monitor: Optional[Monitor] = None,
        pool: Optional[RankPool] = None,
    ) -> None:
        self.cfg = cfg
        self.job_dir = Path(str(cfg.job_dir))
        self.pool = pool or RankPool(cfg, run_id)
        self.step = 0
        self.trained_rows = 0
        self.skipped_rows = 0  # in damaged files, with skip_corrupt
        self.state = "starting"
        self._source: Source = open_source(cfg, buffer)
        self._synchronizer = synchronizer
        self._monitor = monitor
        self._saved = Saved()
        self._save_s = 0.0  # what the last save took
        self._steps_since_save: list[int] = []
        self._empty_batches = 0
        self._tokens_per_s = 0.0
        self._waited_s = 0.0
        self._stop = False
        self._healing = asyncio.Lock()
        self._alarms = Alarms()
        self.spans = Spans()  # waits for rows

    # queries ----------------------------------------------------------------------------
    @property
    def progress(self) -> int:
        """Every explorer batch up to this one is trained."""
        return self._source.progress

    def status(self) -> dict[str, Any]:
        """Keys of the run's status that the trainer knows."""
        return {
            "step": self.step,
            "total_steps": self.cfg.trainer.total_steps or self.cfg.buffer.total_steps,
            "tokens_per_s": self._tokens_per_s,
            "save_s": self._save_s,
        }

    # life -------------------------------------------------------------------------------
    async def prepare(self) -> dict[str, Any]:
        """Start the ranks and continue from the last complete checkpoint, if there is one."""
        state = await asyncio.to_thread(self._load_state)
        await self._source.prepare(None if state is None else state["source"])
        facts = await self.pool.start(self.cfg.model.model_path, self._checkpoint)
        self._announce_rank0()
        log.info("trainer ready at step %d: %s", self.step, facts)
        return {"step": self.step, "checkpoint": self._checkpoint, **facts}

    def _load_state(self) -> Optional[dict[str, Any]]:
        path = latest_complete(self.job_dir) if self.cfg.continue_from_checkpoint else None
        if path is None:
            return None
        state = read_state(path)
        self.step, self.trained_rows = int(state["step"]), int(state["trained_rows"])
        self.skipped_rows = int(state.get("skipped_rows", 0))
        self._empty_batches = int(state["empty_batches"])
        self._saved = Saved(path, self.step, (path / HF_EXPORT).is_dir())
        return state

    @property
    def _checkpoint(self) -> Optional[str]:
        return None if self._saved.path is None else str(self._saved.path)

    async def stop(self) -> None:
        """Leave the loop after the current step; ``train`` then saves and returns."""
        self._stop = True

    async def close(self) -> None:
        self.state = "stopped"
        await self.pool.close()

    # the loop ---------------------------------------------------------------------------
    async def train(self) -> dict[str, Any]:
        """Train until the last step, the end of the data, or :meth:`stop`.

        Returns ``step``, ``trained_rows``, ``left_rows``, ``stopped`` and ``checkpoint``.
        """
        while not self._finished:
            feed = await self._next_feed()
            if feed is None:
                break
            self.state = "training"
            self.step += 1
            metrics = {"time/wait_data": self._waited_s, **feed.metrics}
            if feed.rows == 0:  # changes no weight, but it is a step of the schedule
                self._empty_batches += 1
                log.warning("train step %d has no rows: its whole batch was filtered", self.step)
                metrics["trainer/empty_batches"] = float(self._empty_batches)
            else:
                self._empty_batches = 0
                seconds, ranks = await self._on_ranks(
                    self.pool.call_all, "train_step", feed.input, self.step
                )
                metrics |= merge_rank_metrics(ranks, seconds)
                self._steps_since_save.append(self.step)
                read = int(metrics.get("sample/rows", feed.rows))
                self.trained_rows += read
                self.skipped_rows += feed.rows - read
                self._tokens_per_s = metrics["tokens_per_s"]
                self._alarms.look(self.step, metrics)
                metrics["trainer/trained_rows"] = self.trained_rows
            metrics["trainer/empty_batch"] = float(feed.rows == 0)
            await self._source.done(feed)
            start = time.perf_counter()
            if self._synchronizer is not None:
                self.state = "syncing"
                await self._synchronizer.trainer_sync(self.step, self.progress)
            metrics["time/sync_weight"] = time.perf_counter() - start
            self._log(metrics)
            # the last step is saved after the loop, with the export
            interval = self.cfg.trainer.save_interval
            if interval > 0 and self.step % interval == 0 and not self._finished:
                start = time.perf_counter()
                await self._save()
                self._log({"time/save_checkpoint": time.perf_counter() - start})
            await self._check_usable()
        return await self._finish()

    def _log(self, metrics: dict[str, float]) -> None:
        if self._monitor is not None:
            self._monitor.log(self.step, metrics)

    @property
    def _finished(self) -> bool:
        last = self.cfg.trainer.total_steps
        return self._stop or (last is not None and self.step >= last)

    async def _next_feed(self) -> Optional[Feed]:
        """Rows for the next step; None at the end of the data or when stopped."""
        self.state = "waiting"
        start = moved = time.perf_counter()
        began = time.time()
        timeout_s = self.cfg.buffer.trainer_input.experience_buffer.max_read_timeout_s
        starving, arrived = False, self._source.arrived
        feed: Optional[Feed] = None
        try:
            while not self._stop:
                feed = await self._source.next(self.step + 1)
                if feed is not None:
                    break
                async with self._healing:  # what was lost while nothing was asked of it
                    for rank in self.pool.lost[:1]:
                        await self._rebuild(ActorLost(self.pool.handles[rank], "waiting for rows"))
                if self._synchronizer is not None and not starving:
                    await self._synchronizer.trainer_starved(self.step)
                starving = True
                before, arrived = arrived, self._source.arrived
                moved = time.perf_counter() if arrived != before else moved
                waited = time.perf_counter() - moved
                if timeout_s is not None and waited > timeout_s:
                    raise TimeoutError(
                        f"the trainer waited {waited:.0f} s for rows (buffer.trainer_input."
                        f"experience_buffer.max_read_timeout_s = {timeout_s:g}); is the explorer "
                        "stuck, or does it commit fewer rows than buffer.train_batch_size?"
                    )
        except EndOfData as end:
            log.info("end of the training data; %d rows left over", end.left_rows)
        if feed is not None and starving and self._synchronizer is not None:
            await self._synchronizer.trainer_resumed()
        self._waited_s = time.perf_counter() - start
        self.spans.tell("wait", began, who="trainer", awaited="rows to train on")
        return feed

    async def _check_usable(self) -> None:
        allowed = self.cfg.trainer.max_empty_batches
        if self._empty_batches < allowed:
            return
        await self._save()
        raise NoUsableRows(
            f"{self._empty_batches} batches in a row had no row to train on "
            f"(trainer.max_empty_batches = {allowed}): operators such as reward_std_filter "
            "dropped all of them. Look at the rewards (rollout/*/reward), use an easier "
            "task or a better start model, or raise algorithm.repeat_times. The state is "
            f"saved in {self.job_dir}"
        )

    # checkpoints ------------------------------------------------------------------------
    async def _save(self, last: bool = False) -> None:
        self.state = "saving"
        wanted = self.cfg.trainer.save_hf_checkpoint
        export = wanted == "always" or (last and wanted == "last")
        state = {
            "step": self.step,
            "trained_rows": self.trained_rows,
            "skipped_rows": self.skipped_rows,
            "empty_batches": self._empty_batches,
            "progress": self.progress,
            "source": await self._source.state_dict(),
        }
        arguments = (str(self.job_dir), self.step, state, export)
        save, start = partial(self.pool.call, 0), time.perf_counter()
        _, path = await self._on_ranks(save, "save_checkpoint", *arguments)
        self._save_s = round(time.perf_counter() - start, 3)
        self._saved = Saved(Path(path), self.step, export)
        self._source.checkpointed()
        self._steps_since_save.clear()

    async def _finish(self) -> dict[str, Any]:
        """Save what is not saved, and tell the synchronizer that no step will follow."""
        wants_export = self.cfg.trainer.save_hf_checkpoint != "never"
        unsaved = self._saved.path is None or self._saved.step != self.step
        if unsaved or (wants_export and not self._saved.exported):
            await self._save(last=True)
        if self._synchronizer is not None:
            await self._synchronizer.trainer_stopped(self.step, self.progress)
        self.state = "stopped"
        return {
            "step": self.step,
            "trained_rows": self.trained_rows,
            "left_rows": self._source.left_rows,
            "stopped": self._stop,
            "checkpoint": self._checkpoint,
        }

    # lost ranks -------------------------------------------------------------------------
    async def _on_ranks(
        self, call: Callable[..., Awaitable[Any]], method: str, *args: Any
    ) -> tuple[float, Any]:
        """``call`` a method of the ranks; when one is lost, rebuild, catch up and call again.

        Returns the seconds of the call that succeeded, and its result.
        """
        while True:
            start = time.perf_counter()
            try:
                result = await call(method, *args, timeout_s=self.cfg.trainer.step_timeout_s)
                return time.perf_counter() - start, result
            except ActorLost as error:
                async with self._healing:
                    if error.handle in self.pool.handles:  # not rebuilt meanwhile
                        await self._rebuild(error)

    async def ensure_ranks(self) -> None:
        """Rebuild ranks that are lost while the loop stands still (a transfer failed)."""
        async with self._healing:
            try:
                await self.pool.call_all("free_port", timeout_s=CHECK_TIMEOUT_S)
            except ActorLost as error:
                await self._rebuild(error)

    async def _rebuild(self, cause: Exception) -> None:
        while True:
            log.warning("%s; rebuilding the trainer ranks from %s", cause, self._checkpoint)
            await self.pool.rebuild(self.cfg.model.model_path, self._checkpoint, cause)
            try:
                await self._replay()
                break
            except ActorLost as error:
                cause = error
        self._announce_rank0()

    async def _replay(self) -> None:
        """Repeat the steps since the checkpoint: same rows, same shuffles, same weights."""
        steps = iter(self._steps_since_save)
        async for feed in self._source.replay():
            timeout_s = self.cfg.trainer.step_timeout_s
            await self.pool.call_all("train_step", feed.input, next(steps), timeout_s=timeout_s)

    def _announce_rank0(self) -> None:
        if self._synchronizer is not None:
            self._synchronizer.set_trainer_rank0(self.pool.handles[0])

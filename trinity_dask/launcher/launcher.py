"""The launcher: a Dask actor on the control worker that runs a job's stages in order.

Invariant: the launcher always reaches one of the final states ``done``, ``failed`` or
``interrupted``; a stage that fails stops the job, and ``stage_meta.json`` says where to go on.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.aio import ended, unless_set
from trinity_dask.config import job_dir, modes
from trinity_dask.config.schema import Config
from trinity_dask.files import read_json, write_json
from trinity_dask.launcher import telling
from trinity_dask.launcher.job_files import is_given_more
from trinity_dask.launcher.job_lock import JobLock, claims_of
from trinity_dask.launcher.status import FINAL_STATES, StatusBoard, describe
from trinity_dask.launcher.warm_up import WarmUp
from trinity_dask.monitor.events import RunEvents
from trinity_dask.monitor.report import write_curves
from trinity_dask.registry import load_object

if TYPE_CHECKING:
    from trinity_dask.launcher.stages import StageRunner

log = logging.getLogger("trinity_dask.launcher")

LOCK_WAIT_S = 20.0


# one launcher of this process at a time; made on its loop, not at import
_preparing: Optional[asyncio.Lock] = None


class Launcher:
    """Runs ``stages`` (each a validated config) under the lock of ``base_dir``.

    ``launches`` is how many launchers this run has had before: the scheduler has lost them, which
    need not mean that they have ended.
    """

    def __init__(
        self,
        stages: list[Config],
        base_dir: str,
        run_id: str,
        driver: Optional[dict[str, Any]] = None,
        launches: int = 0,
    ) -> None:
        self.stages = stages
        self.job_dirs = [str(stage.job_dir) for stage in stages]
        self._benches = stages[0].mode == "bench"
        self.base_dir = base_dir
        self.run_id = run_id
        self._lock = JobLock(
            base_dir,
            LOCK_WAIT_S,
            driver,
            claims_of(stages),
            f"{run_id}/{launches}",
            [f"{run_id}/{before}" for before in range(launches)],
        )
        # parts of an earlier launch are told from this one's by their names
        self._parts = f"{run_id}.{launches}" if launches else run_id
        self._events = RunEvents(run_id)
        self._stage_file = Path(base_dir) / job_dir.stage_file(stages[0])
        self._board: Optional[StatusBoard] = None
        self._task: Optional[asyncio.Task[None]] = None
        self._stage: Optional[StageRunner] = None
        self._stop_reason: Optional[str] = None
        self._stopping = asyncio.Event()
        self._asked_at = 0.0  # when somebody last wanted to know how the run is

    # called by the driver ----------------------------------------------------------
    async def start(self) -> dict[str, Any]:
        """Begin; a second call changes nothing. Returns what identifies the run."""
        self._asked_at = asyncio.get_running_loop().time()
        if self._task is None and self._board is None:
            self._board = self._make_board()
            self._task = asyncio.get_running_loop().create_task(self._run())
        return {"run_id": self.run_id, "base_dir": self.base_dir, "job_dirs": self.job_dirs}

    def _make_board(self) -> StatusBoard:
        told = self._events.status
        return StatusBoard(told, n_stages=len(self.stages), run_id=self.run_id)

    async def status(self, seen: int = 0, timeout_s: float = 0.0) -> dict[str, Any]:
        """The status once its version exceeds ``seen``, or after ``timeout_s`` seconds."""
        self._asked_at = asyncio.get_running_loop().time()
        if self._board is None:
            return {"state": "starting", "version": 0, "message": ""}
        return await self._board.wait(seen, timeout_s)

    async def stop(self, reason: str = "stop requested") -> None:
        """Finish the current train step, save, and end as ``interrupted``."""
        if self._board is None:  # its driver was killed before it could start it
            self._board = self._make_board()
            await self._board.update(state="interrupted", message=reason)
        if self._board.state in FINAL_STATES:
            return
        self._stop_reason = reason
        self._stopping.set()
        await self._board.update(state="stopping", message=reason)
        if self._stage is not None:
            await self._stage.stop()

    # the job -------------------------------------------------------------------------
    async def _run(self) -> None:
        assert self._board is not None
        orphan = asyncio.get_running_loop().create_task(self._end_orphan())
        try:
            async with self._lock:
                await self._while_ours(self._run_stages())
                if self.stages[0].monitor.curves and not self._benches:
                    try:
                        await asyncio.to_thread(write_curves, self.base_dir)
                    except Exception:  # a picture must not fail a run
                        log.exception("the curves could not be drawn")
            final = "interrupted" if self._stop_reason else "done"
            await self._board.update(state=final, message=self._stop_reason or "")
        except BaseException as error:
            log.error("the run failed:\n%s", traceback.format_exc())
            await self._board.update(state="failed", message=describe(error))
            if not isinstance(error, Exception):
                raise
        finally:
            await ended([orphan])

    async def _while_ours(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work``; it is ended when another launch has taken the job over (Superseded)."""
        guard = asyncio.ensure_future(self._lock.superseded())
        doing = asyncio.ensure_future(work)
        try:
            await asyncio.wait({guard, doing}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                await guard
            await doing
        finally:
            await ended([guard, doing])

    async def _end_orphan(self) -> None:
        """Stop a run that nobody asks for any more: a driver does all the time, while it lives."""
        limit_s = self.stages[0].cluster.orphan_after_s
        if limit_s is None:
            return
        loop = asyncio.get_running_loop()
        while (left_s := self._asked_at + limit_s - loop.time()) > 0:
            await asyncio.sleep(left_s)
        await self.stop(
            f"nobody has asked for this run for {limit_s:g} s (cluster.orphan_after_s): its driver "
            "is gone"
        )

    async def _run_stages(self) -> None:
        first = 0
        if self.stages[0].continue_from_checkpoint and not self._benches:
            meta = read_json(self._stage_file) or {}
            first = int(meta.get("latest_stage", 0)) + bool(meta.get("finished", False))
        if first >= len(self.stages) and is_given_more(self.stages):
            first = len(self.stages) - 1
        if first >= len(self.stages):
            return
        async with WarmUp(self.stages[first:]) as warm_up:
            await unless_set(self._stopping, self._check_inputs())
            await asyncio.to_thread(_stage_runners)
            for index in range(first, len(self.stages)):
                if self._stop_reason:
                    break
                await unless_set(self._stopping, warm_up.wait(self.stages[index]))
                await self._run_stage(index)
                if not self._stop_reason:
                    self._save_stage(index, finished=True)

    def _save_stage(self, index: int, finished: bool = False) -> None:
        if not self._benches:  # a benchmark leaves the job's state alone
            self._lock.require()
            write_json(self._stage_file, {"latest_stage": index, "finished": finished})

    async def _run_stage(self, index: int) -> None:
        assert self._board is not None
        stage = self.stages[index]
        self._save_stage(index)
        await telling.begin(self._events, stage)
        await self._board.update(
            state="running",
            stage=stage.stage_name or stage.name,
            stage_index=index,
            mode=stage.mode,
            step=None,
            total_steps=stage.trainer.total_steps or stage.buffer.total_steps,
            tokens_per_s=None,
            message="",
        )
        previous = self.stages[index - 1] if index else None
        stage_runner = (await asyncio.to_thread(_stage_runners))[stage.mode]
        self._stage = stage_runner(
            stage, self._board, self._parts, previous, self.stop, self._events, self._lock.require
        )
        try:
            if self._stop_reason is None:
                await self._stage.run()
        finally:
            self._stage = None

    async def _check_inputs(self) -> None:
        """Make what presets make themselves, then look at every stage's tasks: a missing
        column of the last stage must not wait until the first one is trained."""
        assert self._board is not None
        global _preparing
        _preparing = _preparing or asyncio.Lock()
        async with _preparing:  # runs of one job make the same files
            await self._prepare_inputs()
        for stage in self.stages:
            if modes.samples(stage.mode):
                await asyncio.to_thread(_read_tasks, stage)
        await self._board.update(message="")

    async def _prepare_inputs(self) -> None:
        assert self._board is not None
        for stage in self.stages:
            if stage.prepare:
                await self._board.update(
                    state="running", message=f"preparing data ({stage.prepare})"
                )
                prepare = load_object(stage.prepare)
                await asyncio.to_thread(prepare, stage, **stage.prepare_args)


def _read_tasks(stage: Config) -> None:
    """Open the tasksets of a stage. Raises DataError naming file, row and column."""
    from trinity_dask.explorer.task_stream import TasksetReader

    TasksetReader(stage)


def _stage_runners() -> dict[str, type[StageRunner]]:
    """Imported late and in a thread: torch and transformers come with it, which the driver
    (it only names the launcher) does without, and which would stop the event loop."""
    from trinity_dask.launcher.stages import STAGES

    return STAGES

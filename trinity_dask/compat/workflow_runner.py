"""Trinity-RFT's workflow runner: attempts at a task beside the engine of its choice.

Invariant: what a workflow does comes back as a status; nothing that user code raises leaves
:meth:`WorkflowRunner.run_task`.
"""

from __future__ import annotations

import asyncio
import cProfile
import html
import io
import json
import os
import pstats
import sqlite3
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Optional

from trinity_dask.cluster.context import worker_client
from trinity_dask.cluster.placement import wait_for_slot
from trinity_dask.cluster.slots import ROLLOUT, RUNNER, engine_slot, slot_resource
from trinity_dask.compat.remote import outside_client
from trinity_dask.config.schema import Config
from trinity_dask.experience import Experience
from trinity_dask.experience.schema import decode, encode, from_table
from trinity_dask.explorer.rollout.subtask import RunnerSettings, SubTaskSpec, run_subtask
from trinity_dask.explorer.rollout.workflow_runner import outcome_of
from trinity_dask.explorer.schedule.tasks import AttemptOutcome, RunError, Status
from trinity_dask.explorer.task_stream import TasksetReader
from trinity_dask.workflows import Task

__all__ = ["DebugWorkflowRunner", "Status", "WorkflowRunner"]

SLACK_S = 30.0  # in which a worker reports an attempt whose time is over
DEBUG_TABLE = """
CREATE TABLE IF NOT EXISTS debug_buffer (id INTEGER PRIMARY KEY, timestamp REAL, task_id TEXT,
  run_id INTEGER, msg_id TEXT, model_version INTEGER, reward REAL, consumed INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS debug_buffer_blob (id INTEGER PRIMARY KEY, bytes BLOB);
"""


class WorkflowRunner:
    """Runs tasks on the worker of engine ``rollout_model_id``, by the calls of a run's own
    sub-tasks; or on ``worker``, the slot of a runner worker, which reaches that engine.

    Auxiliary models are not there yet: ``auxiliary_model_ids`` are kept and used by nothing.
    Use it in a worker, or on the event loop of an asynchronous default client.
    """

    def __init__(
        self,
        config: Config,
        rollout_model_id: int,
        auxiliary_model_ids: Optional[Sequence[int]] = None,
        runner_id: Optional[int] = None,
        worker: Optional[str] = None,
    ) -> None:
        self.config = config
        self.worker = worker or engine_slot(rollout_model_id)
        self.rollout_model_id = rollout_model_id
        self.auxiliary_model_ids = list(auxiliary_model_ids or [])
        self.runner_id = runner_id
        self.name = f"{config.explorer.name}_runner_{runner_id}"
        self.concurrent_mode = config.explorer.concurrent_mode
        self.runner_state: dict[str, Any] = {
            "workflow_id": None, "model_version": None, "begin_time": 0, "terminate_time": 0,
        }  # fmt: skip
        self._settings = RunnerSettings.from_config(config)

    async def prepare(self) -> None:
        """Raises TimeoutError when no worker carries the engine's slot."""
        timeout = self.config.explorer.rollout_model.prepare_timeout_s
        await wait_for_slot(await loop_client(), self.worker, timeout)

    def is_alive(self) -> bool:
        return True

    async def get_runner_state(self) -> dict[str, Any]:
        """``workflow_id`` (batch/task/run), ``model_version``, ``begin_time``, ``terminate_time``
        (None while it runs), and what the workflow stored with ``set_workflow_state``."""
        return dict(self.runner_state)

    async def run_task(
        self,
        task: Task,
        batch_id: int | str,
        repeat_times: int = 1,
        run_id_base: int = 0,
        collect_partial_runs: bool = True,
    ) -> tuple[Status, bytes]:
        """One attempt at ``repeat_times`` runs: status, and the experiences as a payload
        (``b""`` when there is none, as of an eval task)."""
        outcome, payload = await self.attempt(
            task, batch_id, repeat_times, run_id_base, collect_partial_runs
        )
        return outcome.status, payload

    async def attempt(
        self,
        task: Task,
        batch_id: int | str,
        repeat_times: int,
        run_id_base: int,
        collect_partial_runs: bool,
        timeout_s: Optional[float] = None,
    ) -> tuple[AttemptOutcome, bytes]:
        """:meth:`run_task` within ``timeout_s`` (None: ``explorer.max_timeout_s``), with all
        that the worker says about it."""
        client = await loop_client()
        task = replace(task, batch_id=batch_id if task.batch_id == "" else task.batch_id)
        self.runner_state.update(
            workflow_id=f"{task.batch_id}/{task.task_id}/{run_id_base}",
            begin_time=time.time(),
            terminate_time=None,
        )
        limit = self.config.explorer.max_timeout_s if timeout_s is None else timeout_s
        job = SubTaskSpec(
            task,
            repeat_times,
            run_id_base,
            limit,
            collect_partial_runs,
            self._settings,
            engine_slot(self.rollout_model_id),
            self.runner_id,
        )
        future = client.submit(
            run_subtask,
            job,
            key=f"{self.name}-{uuid.uuid4().hex}",
            resources={slot_resource(self.worker): 1, group_of_slot(self.worker): 1},
            pure=False,
        )
        try:
            async with asyncio.timeout(limit + SLACK_S):
                payload = await future
            outcome = outcome_of(payload)
        except Exception as error:  # its worker died, or did not even report its time-out
            payload = b""
            lost = RunError(type(error).__name__, str(error))
            outcome = AttemptOutcome.all_failed(repeat_times, lost)
        self.runner_state.update(outcome.runner, terminate_time=time.time())
        kept = payload if outcome.status.completed_runs and not task.is_eval else b""
        return outcome, kept


def group_of_slot(slot: str) -> str:
    return RUNNER if slot.startswith(RUNNER) else ROLLOUT


async def loop_client() -> Any:
    """The asynchronous client of this event loop."""
    return outside_client() or await worker_client()


class DebugWorkflowRunner(WorkflowRunner):
    """Runs the first task of the taskset once, and keeps what came of it in ``output_dir``.

    ``experiences.db`` gets the experiences (SQLite: table ``debug_buffer``, their payloads in
    ``debug_buffer_blob``); with ``enable_profiling``, ``profiling.html`` says where this process
    spent its time. With ``disable_overwrite`` a directory that is in use gets a time stamp.
    """

    def __init__(
        self,
        config: Config,
        output_dir: str = "debug_output",
        enable_profiling: bool = False,
        disable_overwrite: bool = False,
    ) -> None:
        super().__init__(config, rollout_model_id=0, runner_id=0)
        if disable_overwrite and os.path.isdir(output_dir) and os.listdir(output_dir):
            output_dir += time.strftime("_%Y%m%d%H%M%S")
        os.makedirs(output_dir, exist_ok=True)
        self.taskset = TasksetReader(config)
        self.output_dir = output_dir
        self.enable_profiling = enable_profiling
        self.output_profiling_file = os.path.join(output_dir, "profiling.html")
        self.output_sqlite_file = os.path.join(output_dir, "experiences.db")

    async def debug(self) -> tuple[Status, list[Experience]]:
        """Run it, print how it ended, and return that.

        Raises:
            ValueError: the taskset is empty.
        """
        tasks = self.taskset.read()
        if not tasks:
            raise ValueError("the taskset has no task to debug")
        profile = cProfile.Profile()
        if self.enable_profiling:
            profile.enable()
        status, payload = await self.run_task(tasks[0], "debug")
        if self.enable_profiling:
            profile.disable()
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(50)
            with open(self.output_profiling_file, "w", encoding="utf-8") as file:
                file.write(f"<pre>{html.escape(text.getvalue())}</pre>")
        experiences = list(from_table(decode(payload)[0])) if payload else []
        self._write(experiences)
        ended = f"metrics: {json.dumps(status.metrics)}" if status.ok else status.message
        print(f"task {tasks[0].raw_task}: {status.completed_runs}/{status.total_runs}, {ended}")
        return status, experiences

    def _write(self, experiences: Sequence[Experience]) -> None:
        with closing(sqlite3.connect(self.output_sqlite_file)) as database, database:
            database.executescript(DEBUG_TABLE)
            for e in experiences:
                version = e.info.get("model_version")
                row = (time.time(), e.eid.tid, e.eid.run, e.eid.uid, version, e.reward)
                found = database.execute(
                    "INSERT INTO debug_buffer (timestamp, task_id, run_id, msg_id, model_version, "
                    "reward) VALUES (?, ?, ?, ?, ?, ?)",
                    row,
                )
                blob = (found.lastrowid, encode([e], {}))
                database.execute("INSERT INTO debug_buffer_blob VALUES (?, ?)", blob)

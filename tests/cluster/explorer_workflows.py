"""Workflows and rewards of the explorer's cluster tests; workers load this file by path."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from trinity_dask.config.schema import Config
from trinity_dask.experience import Experience
from trinity_dask.explorer.schedule.scheduler import Scheduler
from trinity_dask.explorer.schedule.tasks import Counts
from trinity_dask.workflows import Task, Workflow


def experience(reward: float = 1.0) -> Experience:
    """Two prompt tokens, three response tokens."""
    return Experience(
        tokens=[1, 2, 3, 4, 5],
        prompt_length=2,
        reward=reward,
        logprobs=[-1.0, -1.0, -1.0],
        versions=[0, 0, 0],
        metrics={"reward": reward},
    )


class Dummy(Workflow):
    """Succeeds at once, sleeps, raises or kills its worker, as the row says."""

    can_repeat = True
    is_async = True

    async def run_async(self) -> list[Experience]:
        row = self.task.raw_task
        self._once(row, "kill_once", lambda: os.kill(os.getpid(), signal.SIGKILL))
        self._once(row, "fail_once", self._fail)
        self._note(row, "started")
        if row.get("raise"):
            self._fail()
        await asyncio.sleep(row.get("sleep_s", 0.0))
        self._note(row, "ended")
        return [experience(float(i)) for i in range(self.repeat_times)]

    def _fail(self) -> None:
        raise RuntimeError("this task raises")

    def _once(self, row, key, act) -> None:
        """``act`` in the first attempt only; the file remembers it over worker deaths."""
        if key in row:
            try:
                Path(row[key]).touch(exist_ok=False)
            except FileExistsError:
                return
            act()

    def _note(self, row, what) -> None:
        if "notes" in row:
            Path(row["notes"], f"{what}-{self.task.batch_id}-{self.task.task_id}").touch()


class Blocking(Workflow):
    """Never returns, holding its thread in a pure Python loop."""

    def run(self) -> list[Experience]:
        while True:
            time.monotonic()


class Answering(Workflow):
    """One answer from the engine per run, by a synchronous call."""

    def run(self) -> list[Experience]:
        found = self.model.generate([1, 2, 3], max_tokens=4)
        found[0].reward = 1.0
        return found


class SchedulerHost:
    """A Dask actor that uses a scheduler where the launcher does: on the control worker."""

    async def run(self, cfg: Config, slots: int, tasks: list[Task]) -> tuple[Counts, Counts]:
        scheduler = Scheduler(cfg, slots)
        await scheduler.start()
        scheduler.schedule(tasks, 1)
        result = await scheduler.get_results(1, timeout=60.0)
        sleepers = [replace(tasks[0], raw_task={"sleep_s": 600.0}, repeat_times=1)] * slots
        scheduler.schedule(sleepers, 2)
        aborted = await scheduler.abort_batch(2)
        await scheduler.stop()
        return result.counts, aborted


class Uneven(Workflow):
    """Rewards differ within the group, except where the row says ``equal``."""

    can_repeat = True
    is_async = True

    async def run_async(self) -> list[Experience]:
        row = self.task.raw_task
        await asyncio.sleep(row.get("sleep_s", 0.0))
        equal = row.get("equal", False)
        return [experience(0.0 if equal else float(i)) for i in range(self.repeat_times)]

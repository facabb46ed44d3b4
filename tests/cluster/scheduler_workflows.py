"""Workflows of the scheduler's scenarios; workers load this file by path."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from explorer_workflows import experience

from trinity_dask.experience import Experience
from trinity_dask.models.actor.actor import ready_engine
from trinity_dask.models.protocol import SamplingParams
from trinity_dask.workflows import Task, Workflow


class AtEngineSpeed(Workflow):
    """As long as its worker's engine takes for one request; notes which that was, and how long."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        engine = await ready_engine(60.0)
        started = time.monotonic()
        await engine.generate([1, 2], SamplingParams(max_tokens=2), "request")
        found = experience()
        found.metrics = {
            "engine": float(engine.spec.slot.rpartition("-")[2]),
            "seconds": time.monotonic() - started,
        }
        return [found]


class Resettable(Workflow):
    """One run per call; its reward says whether the instance was used before."""

    can_reset = True
    is_async = True
    was_reset = False

    def reset(self, task: Task) -> None:
        self.task = task
        self.was_reset = True

    async def run_async(self) -> list[Experience]:
        return [experience(float(self.was_reset))]


class ThreeSteps(Workflow):
    """A run of three experiences."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        found = [experience() for _ in range(3)]
        for step, each in enumerate(found):
            each.eid.step = step
            await asyncio.sleep(0)
        return found


class FirstRunOnly(Workflow):
    """Run 0 of a group returns and leaves a note; the others hang."""

    can_repeat = True
    is_async = True

    async def run_async(self) -> list[Experience]:
        if self.run_id_base > 0:
            await asyncio.sleep(3600.0)
        Path(self.task.raw_task["note"]).touch()
        return [experience()]


class OneReturns(Workflow):
    """Of all runs of a group, the one that comes first returns; the others hang."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        try:
            Path(self.task.raw_task["note"]).touch(exist_ok=False)
        except FileExistsError:
            await asyncio.sleep(3600.0)
        return [experience()]


class Odd(Workflow):
    """Goes wrong, in a way that its row names, the first time; then it is well."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        row = self.task.raw_task
        if "how" in row:
            try:
                Path(row["note"]).touch(exist_ok=False)
            except FileExistsError:
                return [experience()]
            if row["how"] == "none":
                return None  # type: ignore[return-value]
            if row["how"] == "cancel":
                raise asyncio.CancelledError
            raise RuntimeError("odd")
        return [experience()]


class AsleepInC(Workflow):
    """Blocks in a C call for an hour: no exception can be raised in its thread.

    With ``once`` in its row it returns at once in another process than its first.
    """

    def run(self) -> list[Experience]:
        notes = Path(self.task.raw_task["notes"])
        before = list(notes.glob(f"pid-*-{self.task.batch_id}"))
        (notes / f"pid-{os.getpid()}-{self.task.batch_id}").touch()
        if not (before and self.task.raw_task.get("once")):
            time.sleep(3600.0)
        return [experience()]

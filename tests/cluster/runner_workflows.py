"""Workflows and rewards of the runner workers' tests; workers load this file by path."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from trinity_dask.cluster import current_worker
from trinity_dask.experience import Experience
from trinity_dask.workflows import Workflow
from trinity_dask.workflows.simple import SimpleWorkflow


def where() -> dict[str, Any]:
    worker = current_worker()
    assert worker is not None
    return {"worker": str(worker.name), "pid": os.getpid()}


class Tokens:
    """Stands in for a tokenizer, which takes long to import: ids as text."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def batch_decode(self, sequences: list[list[int]], **_: Any) -> list[str]:
        return [self.decode(ids) for ids in sequences]


class Numbers(Workflow):
    """Its model needs no tokenizer."""

    def __init__(self, task: Any, model: Any, auxiliary_models: Any = None) -> None:
        super().__init__(task, model, auxiliary_models)
        model.tokenizer = Tokens()


class Scored(SimpleWorkflow):
    """One prompt of token ids, scored by the task's reward."""

    def reset(self, task: Any) -> None:
        super().reset(task)
        self.model.tokenizer = Tokens()

    async def sample(self, n: int) -> list[Experience]:
        return await self.model.generate_async([1, 2, 3], n=n, max_tokens=4)


class Sampled(Numbers):
    """One answer, by the blocking calls of the model."""

    def run(self) -> list[Experience]:
        self.model.set_workflow_state({"phase": "sampling"})
        (found,) = self.model.generate([1, 2, 3], max_tokens=4)
        self.model.set_workflow_state({"phase": "done"})
        found.reward, found.info = 1.0, {**found.info, **where()}
        return [found]


class AsyncSampled(Numbers):
    """The same on the event loop; ``sleep_s`` of the row makes it slow."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        await asyncio.sleep(self.task.raw_task.get("sleep_s", 0.0))
        (found,) = await self.model.generate_async([1, 2, 3], max_tokens=4)
        found.reward, found.info = 1.0, {**found.info, **where()}
        return [found]


class Slow(Sampled):
    """Blocks for a while in the way that can be interrupted by nobody, then answers.

    ``notes`` collects a file for each start.
    """

    def run(self) -> list[Experience]:
        Path(self.task.raw_task["notes"], f"{time.time_ns()}-{os.getpid()}").touch()
        time.sleep(self.task.raw_task["sleep_s"])
        return super().run()


class Held(Sampled):
    """Blocks until the file ``release`` exists, at most a minute, then answers."""

    def run(self) -> list[Experience]:
        release, until = Path(self.task.raw_task["release"]), time.monotonic() + 60.0
        while not release.exists() and time.monotonic() < until:
            time.sleep(0.02)
        return super().run()


class Spinning(Workflow):
    """Never returns, holding its thread in a pure Python loop."""

    def run(self) -> list[Experience]:
        while True:
            time.monotonic()


class HoldsLoop(Workflow):
    """Async in name only: it never awaits. ``how``: ``spin`` or ``sleep``."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        if self.task.raw_task["how"] == "sleep":
            time.sleep(3600)
        while True:
            time.monotonic()


class NeverAwakes(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        await asyncio.Event().wait()
        return []


async def holds_loop(response: str, hold_s: float) -> float:
    """A reward that computes in pure Python on the event loop."""
    until = time.monotonic() + hold_s
    while time.monotonic() < until:
        sum(range(1000))
    return 1.0


async def alarms(response: str) -> float:
    signal.signal(signal.SIGALRM, lambda *_: None)
    return 1.0


def stray_alarm(response: str) -> float:
    """Sets an alarm without a handler, which ends an ordinary process."""
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(0.5)
    return 1.0


def loops_for_ever(response: str) -> float:
    while True:
        time.monotonic()


def exits_hard(response: str) -> float:
    os._exit(3)

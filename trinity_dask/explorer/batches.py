"""Batches by name, their record while they live, and the window of those not yet committed.

Invariant: a batch id names one batch of a store for ever. The explorer of a job that has one
numbers its batches; when several explorers share a store each signs its own
(``"12@explorer1"``), so that ids never collide. A refill of batch 12 is ``"12+1"``. Batches are
committed in the order of their steps, so the last manifest says how far exploration is; one
that failed fails everything after it, and nothing before it.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from trinity_dask.explorer.schedule.tasks import BatchId, BatchResult
from trinity_dask.workflows import Task

TRAIN, EVAL = "train", "eval"
DEFAULT_EXPLORER = "explorer"
_NAME = re.compile(r"(\d+)(?:\+(\d+))?(?:@(.+))?")

Meta = Callable[[], dict[str, Any]]
Refill = Callable[[], Awaitable[list[Task]]]
Feedback = Callable[[Mapping[str, Any]], None]


class RolloutState(Enum):
    """States of a batch, in order."""

    PENDING = "pending"  # registered, no tasks
    RUNNING = "running"
    FINALIZING = "finalizing"
    FINALIZED = "finalized"
    ABORTED = "aborted"


def signature(mode: str, explorer: str) -> Optional[str]:
    """What an explorer signs its batches with: nothing while it is its job's only one."""
    return explorer if mode == "explore" and explorer != DEFAULT_EXPLORER else None


def train_batch_id(step: int, signed: Optional[str]) -> BatchId:
    """The id of train batch ``step`` of the explorer that signs with ``signed``."""
    return step if signed is None else f"{step}@{signed}"


def refill_id(batch_id: BatchId, number: int) -> str:
    """The id under which the ``number``-th refill of a train batch is rolled out."""
    step, at, signed = str(batch_id).partition("@")
    return f"{step}+{number}{at}{signed}"


def train_step_of(batch_id: BatchId, signed: Optional[str]) -> Optional[int]:
    """The step of a train batch signed by ``signed``; None for a batch of someone else."""
    if isinstance(batch_id, int):
        return batch_id if signed is None else None
    found = _NAME.fullmatch(batch_id)
    if found is None or found[2] is not None or found[3] != signed:
        return None
    return int(found[1])


@dataclass
class Batch:
    """One batch between its submission and the end of its finalisation.

    Without ``min_wait_num`` finished tasks it is not finalised (None: without all). ``meta``
    is stored with its commit; ``refill`` reads further tasks when too few groups are left to
    commit; ``feedback`` takes the pipeline's ``selector_metric``.
    """

    batch_id: BatchId
    batch_type: str
    task_count: int
    min_wait_num: Optional[int] = None
    meta: Meta = dict
    refill: Optional[Refill] = None
    feedback: Optional[Feedback] = None
    state: RolloutState = RolloutState.PENDING
    collected: Optional[BatchResult] = None
    result: Optional[dict[str, Any]] = None
    refills: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class BatchWindow:
    """At most ``limit`` batches; ``finish(step)`` waits for a batch and commits it."""

    def __init__(self, limit: int, finish: Callable[[int], Awaitable[None]]) -> None:
        self.limit = limit
        self._finish = finish
        self.tasks: deque[asyncio.Task[None]] = deque()  # in the order of their steps

    def add(self, step: int) -> None:
        """Batch ``step`` was submitted; it is finished after the one before it."""
        previous = self.tasks[-1] if self.tasks else None

        async def commit() -> None:
            if previous is not None:
                await asyncio.shield(previous)
            await self._finish(step)

        self.tasks.append(asyncio.ensure_future(commit()))

    async def shrink_to(self, n: int) -> None:
        """Wait until at most ``n`` batches are not committed."""
        while len(self.tasks) > n:
            # removed only afterwards: a cancelled wait must not lose sight of the batch
            await asyncio.shield(self.tasks[0])
            self.tasks.popleft()

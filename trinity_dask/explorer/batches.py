"""The record of a batch between its submission and the end of its finalisation, and its name.

Invariant: a batch id names one batch of a store for ever. The explorer of a job that has one
numbers its batches; when several explorers share a store each signs its own
(``"12@explorer1"``), so that ids never collide. A refill of batch 12 is ``"12+1"``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
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


def step_of(batch_id: BatchId, signed: Optional[str]) -> Optional[int]:
    """The step of a train batch signed by ``signed``; None for a batch of someone else."""
    if isinstance(batch_id, int):
        return batch_id if signed is None else None
    found = _NAME.fullmatch(batch_id)
    if found is None or found[2] is not None or found[3] != signed:
        return None
    return int(found[1])


@dataclass
class Batch:
    """One batch. ``refill`` reads further tasks when too few groups are left to commit."""

    batch_id: BatchId
    batch_type: str
    task_count: int
    min_wait_num: Optional[int]
    meta: Meta
    refill: Optional[Refill] = None
    feedback: Optional[Feedback] = None
    state: RolloutState = RolloutState.PENDING
    collected: Optional[BatchResult] = None
    result: Optional[dict[str, Any]] = None
    refills: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def wanted_tasks(self) -> int:
        """Finished tasks without which the batch is not finalised."""
        return self.task_count if self.min_wait_num is None else self.min_wait_num

    def collect(self, part: BatchResult) -> None:
        """Keep what a call of the scheduler returned beside what earlier ones did."""
        before = self.collected
        if before is not None:
            part = replace(
                part,
                statuses=[*before.statuses, *part.statuses],
                payloads=[*before.payloads, *part.payloads],
            )
        self.collected = part

    def add(self, other: BatchResult) -> None:
        """Add what another batch (a refill) came to."""
        mine = self.collected
        assert mine is not None
        failures = dict(mine.failures)
        for kind, number in other.failures.items():
            failures[kind] = failures.get(kind, 0) + number
        self.collected = replace(
            mine,
            statuses=[*mine.statuses, *other.statuses],
            payloads=[*mine.payloads, *other.payloads],
            counts=mine.counts + other.counts,
            failures=failures,
            first_error=mine.first_error or other.first_error,
            retries=mine.retries + other.retries,
        )


def eval_prefix(batch_id: BatchId, verb: str = "eval") -> str:
    """``eval/<name>`` of an eval batch called ``"<step>/<name>"``."""
    return f"{verb}/{str(batch_id).partition('/')[2] or batch_id}"


def no_meta() -> dict[str, Any]:
    """For batches that are not committed."""
    return {}

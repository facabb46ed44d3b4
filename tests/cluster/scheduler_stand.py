"""A small cluster with fake engines, and a scheduler on it, for the scheduler's tests.

Invariant: every wait has a generous deadline; a test that would hang fails.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from distributed import Client

from trinity_dask.cluster import RunCluster, call, open_cluster, start_actor
from trinity_dask.config.schema import Config, GroupConfig
from trinity_dask.experience import Experience
from trinity_dask.experience.schema import decode, from_table
from trinity_dask.explorer.schedule.scheduler import Scheduler
from trinity_dask.models.actor.actor import EngineActor
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.workflows import Task

WAIT_S = 90.0
N_ENGINES, SLOTS_PER_ENGINE = 2, 2
SLOTS = N_ENGINES * SLOTS_PER_ENGINE
RUNNER_LANES = 2
FILE = Path(__file__).with_name("explorer_workflows.py")
DUMMY = f"{FILE}:Dummy"


def workflow(name: str) -> str:
    return f"{FILE}:{name}"


def local_config(tmp: Path, runners: int = 0) -> Config:
    cfg = Config(mode="explore", job_dir=str(tmp))
    cfg.cluster.dashboard_address = None
    cfg.cluster.rollout = GroupConfig(n_workers=N_ENGINES, nthreads=SLOTS_PER_ENGINE)
    cfg.cluster.runner = GroupConfig(n_workers=runners, nthreads=RUNNER_LANES)
    cfg.cluster.trainer.n_workers = 0
    cfg.model.max_response_tokens = 4
    cfg.explorer.max_timeout_s = 60.0
    cfg.explorer.max_retry_times = 1
    return cfg


class Stand:
    """A cluster with an engine on every rollout worker; ``engine`` changes engine ``i``."""

    def __init__(
        self,
        tmp: Path,
        engine: Callable[[int], dict[str, Any]] = lambda index: {},
        runners: int = 0,
    ) -> None:
        self.cfg = local_config(tmp, runners)
        self.cluster: RunCluster = open_cluster(self.cfg)
        self._engine_config = engine
        self.engines = [self.start_engine(i) for i in range(N_ENGINES)]
        self.lanes = SLOTS + RUNNER_LANES * runners

    def start_engine(self, index: int, opened: bool = True) -> Any:
        slot = f"engine-{index}"
        spec = EngineSpec(slot, "fake", "", self._engine_config(index))
        client = self.cluster.client
        key = f"test-{slot}-{uuid.uuid4().hex}"  # that of a lost actor cannot be used again
        ref = start_actor(client, EngineActor, spec, slot=slot, key=key, timeout=WAIT_S)
        call(client, ref.handle, "prepare", timeout=WAIT_S)
        if opened:
            call(client, ref.handle, "open", timeout=WAIT_S)
        return ref

    def pid(self, index: int) -> int:
        """Process of the worker that holds engine ``index``."""
        ref = self.engines[index]
        return call(self.cluster.client, ref.handle, "describe", timeout=WAIT_S)["pid"]

    def config(self, **explorer: Any) -> Config:
        """``over_rollout__ratio=...`` reaches into a section of the explorer's."""
        cfg = local_config(Path(str(self.cfg.job_dir)), self.cfg.cluster.runner.n_workers)
        for key, value in explorer.items():
            section, _, name = key.rpartition("__")
            setattr(getattr(cfg.explorer, section) if section else cfg.explorer, name, value)
        return cfg

    def run(
        self,
        body: Callable[[Scheduler], Awaitable[Any]],
        model_path: str = "",
        **explorer: Any,
    ) -> Any:
        """``await body(scheduler)`` with explorer settings changed by ``explorer``.

        All lanes are up by then. Without ``model_path`` the workers load no tokenizer, which
        takes long.
        """
        cfg = self.config(**explorer)
        cfg.model.model_path = model_path

        async def main() -> Any:
            address = self.cluster.scheduler_address
            async with Client(address, asynchronous=True) as client:
                scheduler = Scheduler(cfg, client=client)
                await scheduler.start()
                try:
                    await scheduler.wait_for_lanes(self.lanes, WAIT_S)
                    return await body(scheduler)
                finally:
                    await scheduler.stop()

        return asyncio.run(main())


def dummies(n: int, repeat_times: int = 1, **row: Any) -> list[Task]:
    return [Task(DUMMY, raw_task=dict(row), repeat_times=repeat_times) for _ in range(n)]


def experiences(result: Any) -> list[Experience]:
    """Of a batch result, or of a list of payloads."""
    payloads = result if isinstance(result, list) else result.payloads
    return [e for payload in payloads for e in from_table(decode(payload)[0])]


def rows(result: Any) -> int:
    return len(experiences(result))


async def tasks_done(scheduler: Scheduler, batch_id: Any, n: int) -> None:
    """Until ``n`` tasks of a batch are finished with runs that are of use."""
    batch = scheduler.state.batches[batch_id]
    assert await scheduler.changes.until(lambda: batch.completed_tasks >= n, WAIT_S), batch


async def all_done(scheduler: Scheduler) -> None:
    """Until every batch is complete."""
    batches = scheduler.state.batches
    assert await scheduler.changes.until(lambda: all(map(scheduler.state.enough, batches)), WAIT_S)


async def until(path: Path) -> None:
    """Until a workflow has left its note, at most ``WAIT_S``."""
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

"""The explorer's parts over a small cluster, for the explorer's tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed import Client

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.cluster import RunCluster, call, open_cluster, start_actor
from trinity_dask.config.schema import Config, GroupConfig, TasksetConfig
from trinity_dask.explorer.coordinator import Coordinator
from trinity_dask.explorer.loop import ExploreLoop
from trinity_dask.models.actor.actor import EngineActor
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.monitor.monitor import Monitor

WAIT_S = 120.0
SLOTS = 8
DUMMY = f"{Path(__file__).with_name('explorer_workflows.py')}:Dummy"


def start_cluster(path: Path) -> RunCluster:
    """One control and one rollout worker with a fake engine that serves."""
    cfg = Config(mode="explore", job_dir=str(path))
    cfg.cluster.dashboard_address = None
    cfg.cluster.rollout = GroupConfig(n_workers=1, nthreads=SLOTS)
    cfg.cluster.trainer.n_workers = 0
    cluster = open_cluster(cfg)
    spec = EngineSpec("engine-0", "fake", "")
    ref = start_actor(
        cluster.client, EngineActor, spec, slot="engine-0", key="engine", timeout=WAIT_S
    )
    cluster.engine = ref  # type: ignore[attr-defined]  # keeps the actor alive
    call(cluster.client, ref.handle, "prepare", timeout=WAIT_S)
    call(cluster.client, ref.handle, "open", timeout=WAIT_S)
    return cluster


def make_config(job: Path, n_rows: int = 8, rows: list[dict[str, Any]] | None = None) -> Config:
    """Batches of 2 tasks x 4 runs over ``n_rows`` rows, one epoch, in a fixed order."""
    job.mkdir(parents=True, exist_ok=True)
    write_rows(job / "train.jsonl", rows or [{"prompt": f"p{i}"} for i in range(n_rows)])
    write_rows(job / "eval.jsonl", [{"prompt": f"e{i}"} for i in range(3)])
    cfg = Config(mode="explore", job_dir=str(job))
    cfg.algorithm.repeat_times = 4
    cfg.buffer.batch_size = 2
    source = cfg.buffer.explorer_input
    source.taskset = TasksetConfig(path=str(job / "train.jsonl"), workflow=DUMMY)
    source.eval_tasksets = [
        TasksetConfig(name="held_out", path=str(job / "eval.jsonl"), workflow=DUMMY)
    ]
    cfg.buffer.trainer_input.experience_buffer.path = str(job / "store")
    cfg.explorer.max_timeout_s = 60.0
    cfg.explorer.max_retry_times = 0
    cfg.explorer.eval_interval = 2
    cfg.monitor.sinks = ["jsonl"]
    return cfg


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass
class Parts:
    explorer: ExploreLoop
    coordinator: Coordinator
    buffer: ExperienceBuffer


def run(address: str, cfg: Config, body: Callable[[Parts], Awaitable[Any]]) -> Any:
    """``await body(parts)`` with everything prepared; what is on disk stays."""

    async def main() -> Any:
        async with Client(address, asynchronous=True) as client:
            buffer = ExperienceBuffer(cfg.buffer.trainer_input.experience_buffer)
            await buffer.prepare()
            coordinator = Coordinator(cfg, buffer, client=client)
            await coordinator.prepare(SLOTS)
            monitor = Monitor(cfg.monitor, str(cfg.job_dir), "explorer")
            explorer = ExploreLoop(cfg, coordinator, None, buffer, monitor)
            try:
                await explorer.prepare()
                return await asyncio.wait_for(body(Parts(explorer, coordinator, buffer)), WAIT_S)
            finally:
                await coordinator.shutdown()
                monitor.close()

    return asyncio.run(main())


async def explore(parts: Parts) -> list[Any]:
    await parts.explorer.explore()
    return await parts.buffer.manifests()


def records(cfg: Config) -> list[dict[str, Any]]:
    path = Path(str(cfg.job_dir), "monitor", "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def task_order(parts: Parts) -> list[list[int]]:
    """Row numbers of each committed batch, in order of the batches."""
    store = parts.buffer.store
    order = []
    for manifest in store.manifests():
        infos = map(json.loads, store.read([manifest.ref()])["info"].to_pylist())
        order.append(sorted({info["task_index"]["index"] for info in infos}))
    return order

"""Rollout tasks per second through the Scheduler, beside plain ``client.submit``.

Two rollout workers, fake engines without latency. A scheduled task is the whole path: the
workflow asks the engine, its experience is encoded, fetched and accounted. The plain task is
an empty ``async def`` with the same resource. Both keep the same number of tasks in flight.

``python benchmarks/dispatch.py`` prints a table and writes ``benchmarks/results/dispatch.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from distributed import Client, as_completed

from trinity_dask.cluster import RunCluster, call, open_cluster, start_actor
from trinity_dask.config.schema import Config, GroupConfig
from trinity_dask.demo.tokenizer import ascii_tokenizer
from trinity_dask.experience import Experience
from trinity_dask.explorer.scheduler import Scheduler
from trinity_dask.models.engine_actor import EngineActor
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.workflows import Task, Workflow

RESULTS = Path(__file__).parent / "results" / "dispatch.json"
N_WORKERS, SLOTS_PER_WORKER = 2, 64
SLOTS = N_WORKERS * SLOTS_PER_WORKER
TARGET = 300.0
WAIT_S = 300.0


class OneAnswer(Workflow):
    """One short answer and a constant reward."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        found = await self.model.generate_async("sort 407193=", max_tokens=7)
        found[0].reward = 1.0
        found[0].metrics = {"reward": 1.0}
        return found


async def empty() -> None:
    """The least a task can do."""


def make_config(directory: str) -> Config:
    cfg = Config(mode="explore", job_dir=directory)
    cfg.cluster.dashboard_address = None
    cfg.cluster.rollout = GroupConfig(n_workers=N_WORKERS, nthreads=SLOTS_PER_WORKER)
    cfg.cluster.trainer.n_workers = 0
    cfg.model.model_path = f"{directory}/model"
    cfg.model.max_response_tokens = 7
    ascii_tokenizer().save_pretrained(cfg.model.model_path)
    return cfg


def start_engines(cluster: RunCluster) -> list[Any]:
    refs = []
    for index in range(N_WORKERS):
        slot = f"engine-{index}"
        spec = EngineSpec(slot, "fake", "")
        ref = start_actor(cluster.client, EngineActor, spec, slot=slot, key=slot, timeout=WAIT_S)
        call(cluster.client, ref.handle, "prepare", timeout=WAIT_S)
        call(cluster.client, ref.handle, "open", timeout=WAIT_S)
        refs.append(ref)
    return refs


async def scheduled(scheduler: Scheduler, n_tasks: int, batch_id: int) -> float:
    """Tasks per second of one batch through the scheduler."""
    tasks = [Task(f"{__file__}:OneAnswer", raw_task={"prompt": "x"}) for _ in range(n_tasks)]
    started = time.perf_counter()
    scheduler.schedule(tasks, batch_id)
    result = await scheduler.get_results(batch_id, timeout=WAIT_S)
    seconds = time.perf_counter() - started
    if result.counts.succeeded != n_tasks:
        raise RuntimeError(f"only {result.counts} of {n_tasks}: {result.first_error}")
    return n_tasks / seconds


async def plain(client: Client, n_tasks: int, batch_id: int) -> float:
    """Tasks per second of ``client.submit``, at most ``SLOTS`` in flight."""

    def submit(index: int) -> Any:
        key = f"plain-{batch_id}-{index}"
        return client.submit(empty, pure=False, key=key, resources={"rollout": 1})

    started = time.perf_counter()
    first = min(SLOTS, n_tasks)
    running = as_completed([submit(i) for i in range(first)])
    submitted = first
    async for _ in running:
        if submitted < n_tasks:
            running.add(submit(submitted))
            submitted += 1
    return n_tasks / (time.perf_counter() - started)


async def measure(cfg: Config, address: str, n_tasks: int, rounds: int) -> dict[str, Any]:
    async with Client(address, asynchronous=True) as client:
        scheduler = Scheduler(cfg, SLOTS, client)
        await scheduler.start()
        await scheduled(scheduler, 2 * SLOTS, -2)  # imports, tokenizer, connections
        await plain(client, SLOTS, -1)
        pairs = [
            (await scheduled(scheduler, n_tasks, i), await plain(client, n_tasks, i))
            for i in range(rounds)
        ]
        await scheduler.stop()
    best_scheduled, best_plain = (max(column) for column in zip(*pairs, strict=True))
    return {
        "n_tasks": n_tasks,
        "slots": SLOTS,
        "scheduler_tasks_per_s": round(best_scheduled, 1),
        "plain_submit_tasks_per_s": round(best_plain, 1),
        "ratio": round(best_scheduled / best_plain, 3),
        "rounds": [[round(a, 1), round(b, 1)] for a, b in pairs],
        "target_tasks_per_s": TARGET,
        "reached": best_scheduled >= TARGET,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        cfg = make_config(directory)
        with open_cluster(cfg) as cluster:
            engines = start_engines(cluster)
            address = cluster.scheduler_address
            result = asyncio.run(measure(cfg, address, arguments.tasks, arguments.rounds))
            del engines
    print(f"{'path':<28}{'tasks/s':>10}")
    print(f"{'Scheduler (fake engine)':<28}{result['scheduler_tasks_per_s']:>10}")
    print(f"{'client.submit (empty task)':<28}{result['plain_submit_tasks_per_s']:>10}")
    print(f"ratio {result['ratio']}, target {TARGET:g} tasks/s: reached {result['reached']}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

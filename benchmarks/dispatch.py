"""Rollout tasks per second through the Scheduler, beside plain ``client.submit``.

Two rollout workers with fake engines, and a bound on the sub-tasks in flight: 1, 4, 16 or 128
runners. A scheduled task is the whole path: its workflow returns one experience at once, which
is encoded, fetched and accounted. The plain task is an empty ``async def`` with the same
resource. Both keep the same number in flight. Latency is from submission to result with every
runner busy.

Then 100 000 tasks in batches of 100, two in flight: what the process holds meanwhile. Last, a
worker is killed in the middle of a batch of one-second tasks.

``python benchmarks/dispatch.py`` prints tables, writes ``benchmarks/results/dispatch.json`` and
exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from distributed import Client

from trinity_dask.cluster import RunCluster, call, open_cluster, start_actor
from trinity_dask.config.schema import Config, GroupConfig
from trinity_dask.experience import Experience
from trinity_dask.explorer.schedule.scheduler import Scheduler
from trinity_dask.models.actor.actor import EngineActor
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.workflows import Task, Workflow

RESULTS = Path(__file__).parent / "results" / "dispatch.json"
N_WORKERS, LANES = 2, 64
RUNNERS = (1, 4, 16, 128)
MEMORY_BATCH, MEMORY_WINDOW, MEMORY_POINTS = 100, 2, 5
WAIT_S = 600.0
RATIO_TARGET = 0.7
GROWTH_TARGET_MB = 32.0
KILL_TARGET_S = 3.0


class Empty(Workflow):
    """One experience of two tokens, at once; or after ``sleep_s``."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        if self.task.raw_task:
            await asyncio.sleep(self.task.raw_task["sleep_s"])
        tokens, versions = [1, 2], [0]
        return [Experience(tokens, 1, reward=1.0, logprobs=[0.0], versions=versions)]


async def empty() -> None:
    """The least a task can do."""


def tasks(n: int, **row: Any) -> list[Task]:
    return [Task(f"{__file__}:Empty", raw_task=row) for _ in range(n)]


def make_config(directory: str) -> Config:
    cfg = Config(mode="explore", job_dir=directory)
    cfg.cluster.dashboard_address = None
    cfg.cluster.rollout = GroupConfig(n_workers=N_WORKERS, nthreads=LANES)
    cfg.cluster.trainer.n_workers = 0
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


# one way and the other --------------------------------------------------------------------
class Scheduled:
    """Tasks through the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.batch = 0

    async def many(self, n: int, in_flight: int) -> None:
        self.batch += 1
        self.scheduler.schedule(tasks(n), self.batch)
        result = await self.scheduler.get_results(self.batch, timeout=WAIT_S)
        if result.counts.succeeded != n:
            raise RuntimeError(f"only {result.counts} of {n}: {result.first_error}")

    async def one(self) -> None:
        await self.many(1, 1)


class Plain:
    """Tasks through ``client.submit``."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.count = 0

    async def many(self, n: int, in_flight: int) -> None:
        await shared(n, in_flight, self.one)

    async def one(self) -> None:
        self.count += 1
        key = f"plain-{id(self)}-{self.count}"
        await self.client.submit(empty, pure=False, key=key, resources={"rollout": 1})


async def shared(n: int, in_flight: int, work: Callable[[], Awaitable[None]]) -> list[float]:
    """``work`` ``n`` times, ``in_flight`` at a time; seconds of each."""
    seconds: list[float] = []

    async def some(count: int) -> None:
        for _ in range(count):
            started = time.perf_counter()
            await work()
            seconds.append(time.perf_counter() - started)

    share, rest = divmod(n, in_flight)
    await asyncio.gather(*(some(share + (i < rest)) for i in range(in_flight)))
    return seconds


async def measure(way: Scheduled | Plain, n: int, in_flight: int) -> tuple[float, float, float]:
    """Tasks per second of one large batch; p50 and p99 of the latency, milliseconds."""
    started = time.perf_counter()
    await way.many(n, in_flight)
    rate = n / (time.perf_counter() - started)
    latencies = 1e3 * np.array(await shared(n, in_flight, way.one))
    return rate, float(np.percentile(latencies, 50)), float(np.percentile(latencies, 99))


async def compare(cfg: Config, client: Client, scale: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for runners in RUNNERS:
        scheduler = Scheduler(cfg, runners, client)
        await scheduler.start()
        await scheduler.wait_for_lanes(N_WORKERS * LANES, WAIT_S)
        scheduled, plain = Scheduled(scheduler), Plain(client)
        await scheduled.many(2 * runners, runners)  # imports and connections
        await plain.many(2 * runners, runners)
        n = scale * min(runners, 16)
        pairs = [
            (await measure(scheduled, n, runners), await measure(plain, n, runners))
            for _ in range(rounds)
        ]
        await scheduler.stop()
        rows.append(row(runners, n, pairs))
        print(line(rows[-1]), flush=True)
    return rows


def row(runners: int, n: int, pairs: list[Any]) -> dict[str, Any]:
    """The medians over the rounds; the ratio of each round is that of neighbours in time."""
    ours, theirs = np.median(np.array(pairs), axis=0)
    ratio = float(np.median([one[0] / other[0] for one, other in pairs]))
    return {
        "runners": runners,
        "n_tasks": n,
        "scheduler_tasks_per_s": round(ours[0], 1),
        "scheduler_p50_ms": round(ours[1], 1),
        "scheduler_p99_ms": round(ours[2], 1),
        "plain_tasks_per_s": round(theirs[0], 1),
        "plain_p50_ms": round(theirs[1], 1),
        "plain_p99_ms": round(theirs[2], 1),
        "ratio": round(ratio, 3),
        "reached": ratio >= RATIO_TARGET,
    }


HEAD = (
    f"{'runners':>8}{'Scheduler/s':>13}{'p50 ms':>8}{'p99 ms':>8}"
    f"{'submit/s':>11}{'p50 ms':>8}{'p99 ms':>8}{'ratio':>8}"
)


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['runners']:>8}{row['scheduler_tasks_per_s']:>13}{row['scheduler_p50_ms']:>8}"
        f"{row['scheduler_p99_ms']:>8}{row['plain_tasks_per_s']:>11}{row['plain_p50_ms']:>8}"
        f"{row['plain_p99_ms']:>8}{row['ratio']:>8}"
    )


# memory -----------------------------------------------------------------------------------
async def memory(cfg: Config, client: Client, n_tasks: int) -> dict[str, Any]:
    """Resident memory of this process (scheduler and Dask's scheduler) as tasks go through."""
    scheduler = Scheduler(cfg, None, client)
    await scheduler.start()
    await scheduler.wait_for_lanes(N_WORKERS * LANES, WAIT_S)
    process = psutil.Process()
    n_batches = n_tasks // MEMORY_BATCH
    points, most = [], 0
    for batch in range(n_batches + MEMORY_WINDOW):
        if batch < n_batches:
            scheduler.schedule(tasks(MEMORY_BATCH), batch)
        most = max(most, len(scheduler.state.running) + len(scheduler.state.pending))
        if batch >= MEMORY_WINDOW:
            await scheduler.get_results(batch - MEMORY_WINDOW, timeout=WAIT_S)
        if batch and batch % (n_batches // MEMORY_POINTS) == 0:
            points.append(round(process.memory_info().rss / 2**20, 1))
    left = len(scheduler.state.batches) + len(scheduler.state.running)
    await scheduler.stop()
    growth = points[-1] - points[0]
    return {
        "n_tasks": n_tasks,
        "most_in_flight_or_waiting": most,
        "left_behind": left,
        "rss_mb_at_each_fifth": points,
        "growth_mb": round(growth, 1),
        "target_mb": GROWTH_TARGET_MB,
        "reached": left == 0 and growth <= GROWTH_TARGET_MB,
    }


# a death ----------------------------------------------------------------------------------
async def killed(cfg: Config, client: Client, pid: int) -> dict[str, Any]:
    """How much later a batch of one-second tasks ends when a worker is killed in its middle."""
    scheduler = Scheduler(cfg, None, client)
    await scheduler.start()
    await scheduler.wait_for_lanes(N_WORKERS * LANES, WAIT_S)
    seconds = []
    for batch, kill in enumerate((False, True)):
        started = time.perf_counter()
        scheduler.schedule(tasks(32, sleep_s=1.0), batch)
        if kill:
            asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGKILL)
        result = await scheduler.get_results(batch, timeout=WAIT_S)
        seconds.append(time.perf_counter() - started)
    await scheduler.stop()
    delay = seconds[1] - seconds[0]
    return {
        "batch_s": round(seconds[0], 2),
        "batch_with_kill_s": round(seconds[1], 2),
        "delay_s": round(delay, 2),
        "task_s": 1.0,
        "retries": result.retries,
        "runs": result.counts.succeeded,
        "target_s": KILL_TARGET_S + 1.0,
        "reached": delay < KILL_TARGET_S + 1.0 and result.counts.succeeded == 32,
    }


async def run(cfg: Config, address: str, pid: int, arguments: Any) -> dict[str, Any]:
    async with Client(address, asynchronous=True) as client:
        print(HEAD)
        result: dict[str, Any] = {
            "ratio_target": RATIO_TARGET,
            "dispatch": await compare(cfg, client, arguments.scale, arguments.rounds),
        }
        if arguments.memory_tasks:
            result["memory"] = await memory(cfg, client, arguments.memory_tasks)
            print("memory:", result["memory"])
        result["killed_worker"] = await killed(cfg, client, pid)
        print("killed worker:", result["killed_worker"])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=100, help="tasks per runner (of 16 at most)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory-tasks", type=int, default=100_000, help="0: leave it out")
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.scale, arguments.rounds, arguments.memory_tasks = 2, 1, 500
    with tempfile.TemporaryDirectory() as directory:
        cfg = make_config(directory)
        with open_cluster(cfg) as cluster:
            engines = start_engines(cluster)
            facts = call(cluster.client, engines[1].handle, "describe", timeout=WAIT_S)
            result = asyncio.run(run(cfg, cluster.scheduler_address, facts["pid"], arguments))
            del engines
    if arguments.smoke:
        return 0
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    parts = [*result["dispatch"], result["killed_worker"], result.get("memory", {"reached": True})]
    return 0 if all(part["reached"] for part in parts) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How busy 64 engine slots are kept by a scheduler with two batches in flight.

Two rollout workers with 32 lanes each; their fake engines draw latencies from a log-normal
distribution with median 1 s and 99th percentile 10 s, scaled in time. Over-rollout is off. A
batch is submitted when the batch two before it is complete, as the explorer does.

What is ideal? With two batches in flight slots may have to idle whatever the scheduler does:
when a batch waits for its last straggler and the next one has nothing left to start. The
ideal is therefore the busy share of a dispatcher that needs no time at all, with the same
slots, window and batch size, and with the latencies that the engines have drawn, in the order
in which they drew them. Both shares are taken from the first start until nothing waits any
more, since the end of a run has no next batch.

``python benchmarks/utilisation.py`` prints a table and writes
``benchmarks/results/utilisation.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

from trinity_dask.cluster import RunCluster, call, open_cluster, start_actor
from trinity_dask.config.schema import Config, GroupConfig
from trinity_dask.experience import Experience
from trinity_dask.explorer.scheduler import Scheduler
from trinity_dask.models.engine_actor import EngineActor, local_engine
from trinity_dask.models.protocol import EngineSpec, SamplingParams
from trinity_dask.workflows import Task, Workflow

RESULTS = Path(__file__).parent / "results" / "utilisation.json"
N_WORKERS, LANES = 2, 32
SLOTS = N_WORKERS * LANES
WINDOW = 2
MEDIAN_S, P99_S = 1.0, 10.0
SIGMA = math.log(P99_S / MEDIAN_S) / 2.3263  # 2.3263: the 99th percentile of a standard normal
MEAN_S = MEDIAN_S * math.exp(SIGMA**2 / 2)
TARGET = 0.95
WAIT_S = 600.0

Interval = tuple[float, float]


class OneRequest(Workflow):
    """One request to the engine; its metrics say when it was there."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        begin = time.time()
        await local_engine().generate([1], SamplingParams(max_tokens=1), "request")
        tokens, versions = [1, 2], [0]
        found = Experience(tokens, 1, reward=1.0, logprobs=[0.0], versions=versions)
        found.metrics = {"begin": begin, "end": time.time()}
        return [found]


def busy_share(requests: list[Interval], end: float) -> float:
    """Share of slot time in use from the first start to ``end``."""
    begins, ends = np.array(requests).T
    first = begins.min()
    used = np.clip(np.minimum(ends, end) - begins, 0.0, None).sum()
    return float(used / (SLOTS * (end - first)))


# the ideal --------------------------------------------------------------------------------
def ideal_share(drawn_s: list[float], batch_size: int) -> float:
    """Of a dispatcher without any delay, for requests that take ``drawn_s``."""
    n_batches = len(drawn_s) // batch_size
    latencies = iter(drawn_s)
    waiting: deque[int] = deque()
    left = [batch_size] * n_batches
    submitted, oldest, now, last_start = 0, 0, 0.0, 0.0
    running: list[tuple[float, int]] = []
    requests: list[Interval] = []
    while oldest < n_batches:
        while submitted < min(oldest + WINDOW, n_batches):
            waiting.extend([submitted] * batch_size)
            submitted += 1
        while waiting and len(running) < SLOTS:
            batch = waiting.popleft()
            end = now + next(latencies)
            heapq.heappush(running, (end, batch))
            requests.append((now, end))
            last_start = now
        now, batch = heapq.heappop(running)
        left[batch] -= 1
        while oldest < n_batches and left[oldest] == 0:
            oldest += 1
    return busy_share(requests, last_start)


# the scheduler ----------------------------------------------------------------------------
def make_config(directory: str) -> Config:
    cfg = Config(mode="explore", job_dir=directory)
    cfg.cluster.dashboard_address = None
    cfg.cluster.rollout = GroupConfig(n_workers=N_WORKERS, nthreads=LANES)
    cfg.cluster.trainer.n_workers = 0
    return cfg


def start_engines(cluster: RunCluster, scale: float) -> list[Any]:
    refs = []
    for index in range(N_WORKERS):
        slot = f"engine-{index}"
        latency = {
            "fake_latency_s": MEAN_S * scale,
            "fake_latency_sigma": SIGMA,
            "seed": index,
        }
        spec = EngineSpec(slot, "fake", "", latency)
        ref = start_actor(cluster.client, EngineActor, spec, slot=slot, key=slot, timeout=WAIT_S)
        call(cluster.client, ref.handle, "prepare", timeout=WAIT_S)
        call(cluster.client, ref.handle, "open", timeout=WAIT_S)
        refs.append(ref)
    return refs


async def explore(scheduler: Scheduler, batch_size: int, n_batches: int) -> list[Interval]:
    """Run all batches with ``WINDOW`` in flight; when each request was at its engine."""
    requests: list[Interval] = []
    for batch in range(n_batches + WINDOW):
        if batch >= WINDOW:
            result = await scheduler.get_results(batch - WINDOW, timeout=WAIT_S)
            if result.counts.succeeded != batch_size:
                raise RuntimeError(f"batch {batch - WINDOW}: {result.counts} {result.first_error}")
            requests += [(s.metrics[0]["begin"], s.metrics[0]["end"]) for s in result.statuses]
        if batch < n_batches:
            scheduler.schedule([Task(f"{__file__}:OneRequest")] * batch_size, batch)
    return requests


async def measure(cfg: Config, address: str, arguments: Any) -> list[Interval]:
    async with Client(address, asynchronous=True) as client:
        scheduler = Scheduler(cfg, SLOTS, client)
        await scheduler.start()
        scheduler.schedule([Task(f"{__file__}:OneRequest")] * SLOTS, "warm-up")
        await scheduler.get_results("warm-up", timeout=WAIT_S)
        requests = await explore(scheduler, arguments.batch_size, arguments.batches)
        await scheduler.stop()
    return sorted(requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16 * SLOTS)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--scale", type=float, default=0.5, help="median latency, seconds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        cfg = make_config(directory)
        with open_cluster(cfg) as cluster:
            engines = start_engines(cluster, arguments.scale)
            requests = asyncio.run(measure(cfg, cluster.scheduler_address, arguments))
            del engines
    busy = busy_share(requests, requests[-1][0])
    ideal = ideal_share([end - begin for begin, end in requests], arguments.batch_size)
    result = {
        "slots": SLOTS,
        "window_batches": WINDOW,
        "batch_size": arguments.batch_size,
        "n_batches": arguments.batches,
        "median_s": arguments.scale * MEDIAN_S,
        "p99_s": arguments.scale * P99_S,
        "busy_share": round(busy, 4),
        "ideal_share": round(ideal, 4),
        "ratio": round(busy / ideal, 4),
        "target": TARGET,
        "reached": busy / ideal >= TARGET,
    }
    print(f"{'slots':>6}{'batch':>7}{'window':>8}{'busy':>8}{'ideal':>8}{'ratio':>8}")
    shares = f"{busy:>8.3f}{ideal:>8.3f}{busy / ideal:>8.3f}"
    print(f"{SLOTS:>6}{arguments.batch_size:>7}{WINDOW:>8}{shares}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

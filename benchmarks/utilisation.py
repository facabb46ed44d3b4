"""How busy 64 engine slots are kept with two batches in flight, and engines of unequal speed.

Two rollout workers with 32 lanes each; their fake engines draw latencies from a log-normal
distribution with median 1 s and 99th percentile 10 s, scaled in time. Over-rollout is off. A
batch is submitted when the batch two before it is complete, as the explorer does.

What is ideal? With two batches in flight slots may have to idle whatever the scheduler does:
when a batch waits for its last straggler and the next one has nothing left to start. The
ideal is therefore the busy share of a dispatcher that needs no time at all, with the same
slots, window and batch size, and with the latencies that the engines have drawn, in the order
in which they drew them. Both shares are taken from the first start until nothing waits any
more, since the end of a run has no next batch.

Then two engines of eight lanes each, one of which needs three times as long for a request: how
long batches take beside the shortest possible time, once the speeds are known.

``python benchmarks/utilisation.py`` prints tables, writes ``benchmarks/results/utilisation.json``
and exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

from trinity_dask.cluster import RunCluster, call, open_cluster, start_actor
from trinity_dask.config.schema import Config, GroupConfig
from trinity_dask.experience import Experience
from trinity_dask.explorer.schedule.scheduler import Scheduler
from trinity_dask.models.actor.actor import EngineActor, ready_engine
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
UNEQUAL_LANES, UNEQUAL_S, UNEQUAL_BATCH = 8, (1.0, 3.0), 64
TOGETHER_TARGET = 1.15
WAIT_S = 600.0

Interval = tuple[float, float]


class OneRequest(Workflow):
    """One request to the engine; its metrics say when it was there."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        begin = time.time()
        engine = await ready_engine(60.0)
        await engine.generate([1], SamplingParams(max_tokens=1), "request")
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
def make_config(directory: str, lanes: int) -> Config:
    cfg = Config(mode="explore", job_dir=directory)
    cfg.cluster.dashboard_address = None
    cfg.cluster.rollout = GroupConfig(n_workers=N_WORKERS, nthreads=lanes)
    cfg.cluster.trainer.n_workers = 0
    return cfg


def start_engines(cluster: RunCluster, latencies: list[dict[str, float]]) -> list[Any]:
    refs = []
    for index, latency in enumerate(latencies):
        slot = f"engine-{index}"
        spec = EngineSpec(slot, "fake", "", {**latency, "seed": index})
        ref = start_actor(cluster.client, EngineActor, spec, slot=slot, key=slot, timeout=WAIT_S)
        call(cluster.client, ref.handle, "prepare", timeout=WAIT_S)
        call(cluster.client, ref.handle, "open", timeout=WAIT_S)
        refs.append(ref)
    return refs


def scheduled(
    lanes: int, latencies: list[dict[str, float]], body: Callable[[Scheduler], Awaitable[Any]]
) -> Any:
    """``await body(scheduler)`` on a cluster whose engines have these latencies."""

    async def main(cfg: Config, address: str) -> Any:
        async with Client(address, asynchronous=True) as client:
            scheduler = Scheduler(cfg, None, client)
            await scheduler.start()
            await scheduler.wait_for_lanes(N_WORKERS * lanes, WAIT_S)
            found = await body(scheduler)
            await scheduler.stop()
        return found

    with tempfile.TemporaryDirectory() as directory:
        cfg = make_config(directory, lanes)
        with open_cluster(cfg) as cluster:
            engines = start_engines(cluster, latencies)
            found = asyncio.run(main(cfg, cluster.scheduler_address))
            del engines
    return found


async def one_batch(scheduler: Scheduler, batch: Any, n: int) -> float:
    """Seconds that a batch of ``n`` requests takes."""
    started = time.perf_counter()
    scheduler.schedule([Task(f"{__file__}:OneRequest")] * n, batch)
    result = await scheduler.get_results(batch, timeout=WAIT_S)
    if result.counts.succeeded != n:
        raise RuntimeError(f"batch {batch}: {result.counts} {result.first_error}")
    return time.perf_counter() - started


# utilisation ------------------------------------------------------------------------------
async def explore(scheduler: Scheduler, batch_size: int, n_batches: int) -> list[Interval]:
    """Run all batches with ``WINDOW`` in flight; when each request was at its engine."""
    await one_batch(scheduler, "warm-up", SLOTS)
    requests: list[Interval] = []
    for batch in range(n_batches + WINDOW):
        if batch >= WINDOW:
            result = await scheduler.get_results(batch - WINDOW, timeout=WAIT_S)
            if result.counts.succeeded != batch_size:
                raise RuntimeError(f"batch {batch - WINDOW}: {result.counts} {result.first_error}")
            requests += [(s.metrics[0]["begin"], s.metrics[0]["end"]) for s in result.statuses]
        if batch < n_batches:
            scheduler.schedule([Task(f"{__file__}:OneRequest")] * batch_size, batch)
    return sorted(requests)


def utilisation(arguments: Any) -> dict[str, Any]:
    latency = {"fake_latency_s": MEAN_S * arguments.scale, "fake_latency_sigma": SIGMA}
    size, batches = arguments.batch_size, arguments.batches
    requests = scheduled(LANES, [latency] * N_WORKERS, lambda s: explore(s, size, batches))
    busy = busy_share(requests, requests[-1][0])
    ideal = ideal_share([end - begin for begin, end in requests], size)
    print(f"{'slots':>6}{'batch':>7}{'window':>8}{'busy':>8}{'ideal':>8}{'ratio':>8}")
    print(f"{SLOTS:>6}{size:>7}{WINDOW:>8}{busy:>8.3f}{ideal:>8.3f}{busy / ideal:>8.3f}")
    return {
        "slots": SLOTS,
        "window_batches": WINDOW,
        "batch_size": size,
        "n_batches": batches,
        "median_s": arguments.scale * MEDIAN_S,
        "p99_s": arguments.scale * P99_S,
        "busy_share": round(busy, 4),
        "ideal_share": round(ideal, 4),
        "ratio": round(busy / ideal, 4),
        "target": TARGET,
        "reached": busy / ideal >= TARGET,
    }


# engines of unequal speed -----------------------------------------------------------------
def shortest_s(n: int, lanes: int, seconds: Sequence[float]) -> float:
    """In which engines that need ``seconds`` for a request, with ``lanes`` each, can end ``n``."""
    times = sorted(k * each for each in seconds for k in range(1, n + 1))
    return next(t for t in times if lanes * sum(int(t / s + 1e-9) for s in seconds) >= n)


async def unequal_batches(scheduler: Scheduler, rounds: int) -> list[float]:
    """Seconds of each batch; the speeds are learned in one before them."""
    await one_batch(scheduler, "warm-up", UNEQUAL_BATCH)
    return [await one_batch(scheduler, batch, UNEQUAL_BATCH) for batch in range(rounds)]


def unequal(rounds: int, scale: float) -> dict[str, Any]:
    request_s = [scale * seconds for seconds in UNEQUAL_S]
    latencies = [{"fake_latency_s": seconds} for seconds in request_s]
    took = scheduled(UNEQUAL_LANES, latencies, lambda s: unequal_batches(s, rounds))
    shortest = shortest_s(UNEQUAL_BATCH, UNEQUAL_LANES, request_s)
    ratio = float(np.median(took)) / shortest
    print(f"{'1x and 3x':>12}{'batch':>7}{'took s':>8}{'ideal s':>9}{'ratio':>8}")
    print(f"{'':>12}{UNEQUAL_BATCH:>7}{np.median(took):>8.2f}{shortest:>9.2f}{ratio:>8.3f}")
    return {
        "lanes_of_each": UNEQUAL_LANES,
        "seconds_of_a_request": request_s,
        "batch_size": UNEQUAL_BATCH,
        "took_s": [round(seconds, 3) for seconds in took],
        "ideal_s": round(shortest, 3),
        "ratio": round(ratio, 4),
        "target": TOGETHER_TARGET,
        "reached": ratio <= TOGETHER_TARGET,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16 * SLOTS)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--scale", type=float, default=1.0, help="median latency, seconds")
    parser.add_argument("--rounds", type=int, default=3, help="batches on unequal engines")
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.batch_size, arguments.batches = SLOTS, 3
        arguments.scale, arguments.rounds = 0.02, 1
    result = utilisation(arguments) | {
        "unequal_engines": unequal(arguments.rounds, 0.02 if arguments.smoke else 1.0)
    }
    if arguments.smoke:
        return 0
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["reached"] and result["unequal_engines"]["reached"] else 1


if __name__ == "__main__":
    sys.exit(main())

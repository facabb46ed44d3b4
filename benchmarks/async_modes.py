"""Seconds until the same samples are trained, by synchronisation style, on long-tail rollouts.

Real are the synchronizer, its files in shared memory, the engine's versions and the order of
everything; simulated are the seconds: an answer of the fake engine takes a log-normal time
(99th percentile ten times the median), a train step takes a fixed one. In style ``fixed`` every
batch waits for its slowest answer while engine and trainer idle in turn; in ``fully_async``
neither waits, and ``max_staleness`` bounds how old a token may be when it is trained on.

    OMP_NUM_THREADS=1 python benchmarks/async_modes.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "async_modes.json"
TAIL = math.log(10) / 2.3263  # sigma with which the 99th percentile is ten medians
LIMIT = 1.5  # fully_async must be this many times faster than fixed


@dataclass
class Workload:
    batches: int = 30
    batch_size: int = 32  # answers of a batch, one sample each
    slots: int = 32  # answers sampled at a time
    median_s: float = 0.05
    train_s: float = 0.06
    max_staleness: int = 4
    seed: int = 1


class Run:
    """One trainer and one explorer in one style."""

    def __init__(self, style: str, work: Workload, directory: str) -> None:
        from trinity_dask.config.schema import SynchronizerConfig
        from trinity_dask.models.fake_engine import FakeEngine
        from trinity_dask.models.protocol import EngineSpec
        from trinity_dask.sync.synchronizer import Synchronizer

        mean_s = work.median_s * math.exp(TAIL**2 / 2)
        latency = {"fake_latency_s": mean_s, "fake_latency_sigma": TAIL, "seed": work.seed}
        self.style, self.work = style, work
        cfg = SynchronizerConfig(sync_method="memory", sync_style=style, probe_interval=0)
        cfg.max_staleness = None if style == "fixed" else work.max_staleness
        self.sync = Synchronizer(cfg, directory, f"bench-{os.getpid()}-{style}")
        self.engine = FakeEngine(EngineSpec("engine-0", "fake", "", latency))
        self.slots = asyncio.Semaphore(work.slots)
        self.committed: asyncio.Queue[list[int]] = asyncio.Queue()
        self.in_flight: deque[asyncio.Task[None]] = deque()
        self.ages: list[int] = []
        self.busy_s = 0.0
        self.waiting_rows = False

    # the explorer ---------------------------------------------------------------------
    async def explore(self) -> None:
        sync, work = self.sync, self.work
        watcher = asyncio.ensure_future(self.watch())
        window = 2 if self.style == "fixed" else work.max_staleness + 2
        for step in range(1, work.batches + 1):
            while len(self.in_flight) >= window:
                await self.in_flight[0]
                self.in_flight.popleft()
            while not await sync.explorer_may_submit("e", step, self.uncommitted):
                await self.take(step - 1)
            previous = self.in_flight[-1] if self.in_flight else None
            self.in_flight.append(asyncio.ensure_future(self.batch(previous)))
            if await sync.explorer_should_sync("e", step):
                await self.take(step)
        await asyncio.gather(*self.in_flight)
        await sync.explorer_stopped("e")
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)

    def uncommitted(self) -> int:
        return sum(not task.done() for task in self.in_flight)

    async def batch(self, previous: asyncio.Task[None] | None) -> None:
        versions = await asyncio.gather(*(self.answer() for _ in range(self.work.batch_size)))
        if previous is not None:
            await previous
        self.committed.put_nowait(list(versions))

    async def answer(self) -> int:
        from trinity_dask.models.protocol import SamplingParams

        async with self.slots:
            start = time.perf_counter()
            (completion,) = await self.engine.generate([1], SamplingParams(), "")
            self.busy_s += time.perf_counter() - start
        return int(completion.versions.min())

    async def take(self, step: int) -> None:
        """At a boundary: drain, then load what the trainer has."""
        await asyncio.gather(*self.in_flight)
        self.in_flight.clear()
        await self.sync.explorer_sync("e", step)

    async def watch(self) -> None:
        while self.style == "fully_async":
            await self.sync.watch("e")

    async def load(self, name: str, version: int) -> None:
        from trinity_dask.models.protocol import WeightUpdate

        published = self.sync.published
        assert published is not None
        assert published.version == version
        update = WeightUpdate(version, "memory", path=published.path)
        receipt = await self.engine.update_weights(update)
        assert receipt.checksum == published.receipt.checksum

    # the trainer ----------------------------------------------------------------------
    async def train(self) -> None:
        for step in range(1, self.work.batches + 1):
            versions = await self.rows(step - 1)
            self.ages += [step - 1 - version for version in versions]
            await asyncio.sleep(self.work.train_s)
            await self.sync.put(step, weights(step))
            await self.sync.trainer_sync(step, step)
        await self.sync.trainer_stopped(self.work.batches, self.work.batches)

    async def rows(self, trained: int) -> list[int]:
        if self.committed.empty():
            await self.sync.trainer_starved(trained)
        versions = await self.committed.get()
        await self.sync.trainer_resumed()
        return versions

    # both -----------------------------------------------------------------------------
    async def __call__(self) -> dict[str, float]:
        self.sync.attach_trainer(lambda: not self.committed.empty())
        self.sync.transfers.load = self.load  # type: ignore[method-assign]
        self.sync.state.trainer_joined(0)
        await self.sync.register_explorer("e")
        start = time.perf_counter()
        await asyncio.gather(self.explore(), self.train())
        seconds = time.perf_counter() - start
        await self.sync.close()
        return {
            "seconds": seconds,
            "samples": float(len(self.ages)),
            "engine_busy": self.busy_s / (seconds * self.work.slots),
            "trainer_busy": self.work.train_s * self.work.batches / seconds,
            "mean_age": statistics.fmean(self.ages),
            "max_age": float(max(self.ages)),
        }


def weights(step: int) -> dict[str, Any]:
    import torch

    return {"w": torch.full((1024,), float(step))}


async def measure(work: Workload, styles: list[str]) -> dict[str, dict[str, float]]:
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for style in styles:
            run: Callable[[], Awaitable[dict[str, float]]] = Run(style, work, directory)
            found[style] = await run()
            print(style, {k: round(v, 3) for k, v in found[style].items()}, flush=True)
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    lines = [
        "| style | seconds | times fixed | engine busy | trainer busy | token age: mean, max |",
        "|---|---|---|---|---|---|",
    ]
    for style, row in found.items():
        faster = found["fixed"]["seconds"] / row["seconds"]
        lines.append(
            f"| {style} | {row['seconds']:.2f} | {faster:.2f} | {row['engine_busy']:.2f} | "
            f"{row['trainer_busy']:.2f} | {row['mean_age']:.2f}, {row['max_age']:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=Workload.batches)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    args = parser.parse_args()
    work = Workload(batches=3 if args.smoke else args.batches)
    weights(0)  # imports torch before the clock runs
    styles = ["fixed", "trainer_driven", "explorer_driven", "fully_async"]
    found = asyncio.run(measure(work, styles))
    speed_up = found["fixed"]["seconds"] / found["fully_async"]["seconds"]
    kept = all(found[s]["max_age"] <= work.max_staleness for s in styles)
    result = {
        "workload": asdict(work),
        "styles": found,
        "speed_up": speed_up,
        "limit": LIMIT,
        "staleness_bound_kept": kept,
        "within_limit": speed_up >= LIMIT and kept,
        "load_average": os.getloadavg()[0],
        "cpus": os.cpu_count(),
    }
    print(table(found))
    if args.smoke:
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["within_limit"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

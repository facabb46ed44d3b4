"""What a step costs the control worker, at the start of a long run and at its end.

Everything of the control worker is real (explorer loop, coordinator, synchronizer, buffer, trainer
loop, metrics, the accounts asked for twice a second); sleeps stand for engines, ranks and Dask,
as in the tests' ``mini_run``. CPU time is that of the whole process, thread pools included, and
memory its resident set; neither may grow with the number of steps.

    OMP_NUM_THREADS=1 python benchmarks/long_run.py
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
RESULT = Path(__file__).parent / "results" / "long_run.json"
PERIOD_S = 0.5  # of the status
LIMIT = 1.1  # cost at the end, in costs at the start
PARTS = 10


async def measure(steps: int, directory: Path) -> list[dict[str, float]]:
    """CPU milliseconds per step and MiB, for each tenth of the run."""
    from mini_run import Mini, MiniRun

    mini = Mini(directory / "job", steps=steps, eval_interval=steps + 1)
    mini.task_s = mini.step_s = mini.weights_s = 0.0
    found: list[dict[str, float]] = []
    async with MiniRun(mini) as run:
        # the first steps import and warm up
        warm = max(steps // 100, 1)
        work = asyncio.ensure_future(run.work())
        bounds = [warm + (steps - warm) * part // PARTS for part in range(PARTS + 1)]
        before: tuple[float, int] | None = None
        asked = time.monotonic()
        for bound in bounds:
            while run.trainer.step < bound and not work.done():
                await asyncio.sleep(0.01)
                if time.monotonic() - asked > PERIOD_S:
                    asked = time.monotonic()
                    await run.accounts()
            gc.collect()
            now = time.process_time(), run.trainer.step
            if before is not None and now[1] > before[1]:
                cpu = (now[0] - before[0]) / (now[1] - before[1]) * 1000
                rss = psutil.Process().memory_info().rss / 2**20
                found.append({"step": float(now[1]), "cpu_ms": cpu, "mib": rss})
                print(json.dumps({k: round(v, 2) for k, v in found[-1].items()}), flush=True)
            before = time.process_time(), now[1]
        await work
        assert not (await run.accounts()).errors()
    return found


def table(found: list[dict[str, float]]) -> str:
    lines = ["| up to step | CPU ms per step | MiB |", "|---|---|---|"]
    lines += [f"| {row['step']:.0f} | {row['cpu_ms']:.2f} | {row['mib']:.0f} |" for row in found]
    ratio = found[-1]["cpu_ms"] / found[0]["cpu_ms"]
    return "\n".join([*lines, f"cost at the end / at the start: {ratio:.3f}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(60 if args.smoke else args.steps, Path(directory)))
    print(table(found))
    if args.smoke:
        return 0
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1))
    return 0 if found[-1]["cpu_ms"] <= LIMIT * found[0]["cpu_ms"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

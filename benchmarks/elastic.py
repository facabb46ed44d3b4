"""Seconds until an engine that joins a live run, or replaces a killed one, serves its weights.

A run in style ``fully_async`` starts with one engine. Then another worker is added, its engine
joins, and its worker is killed. Both times are from the order (or the kill) until the engine
takes requests with the weights that the other one serves. They are held against what the engine
itself takes then: from the start of its worker's process until it is ready to load weights. That
is more than the first engine took, which had the machine for itself.

    OMP_NUM_THREADS=1 python benchmarks/elastic.py [--engine torch|vllm]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "elastic.json"
LIMIT_S = 5.0  # more than an engine takes by itself
WAIT_S = 240.0
STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .*?: (.*)$")


def logged(log: Path, text: str) -> list[float]:
    """The moments (epoch seconds) at which lines with ``text`` were logged."""
    if not log.is_file():
        return []
    lines = (STAMP.match(line) for line in log.read_text(encoding="utf-8").splitlines())
    stamps = [m[1] for m in lines if m is not None and text in m[2]]
    return [datetime.strptime(s, "%Y-%m-%d %H:%M:%S,%f").timestamp() for s in stamps]


def until(run: Any, true: Callable[[], Any]) -> Any:
    """The first true answer; fails with the run."""
    deadline = time.monotonic() + WAIT_S
    while not (found := true()):
        status = run.status
        if status["state"] not in ("pending", "starting", "running"):
            raise RuntimeError(f"the run ended: {status['state']}: {status.get('message')}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {WAIT_S:g} s; the run: {status}")
        time.sleep(0.05)  # a log file has no wake-up
    return found


def kill_worker(log: Path) -> float:
    """SIGKILL to the worker that writes ``log``; the moment."""
    pids = re.findall(r"worker process (\d+) starts", log.read_text(encoding="utf-8"))
    now = time.time()
    os.kill(int(pids[-1]), signal.SIGKILL)
    return now


def own_start(logs: Path, slot: str, incarnation: int) -> float:
    """Seconds from the start of the process of a slot's worker until its engine could take
    weights."""
    begun = logged(logs / f"{slot.replace('engine', 'rollout')}.log", "worker process")
    ready = logged(logs / "control-0.log", f"engine {slot} ready to load weights")
    return ready[incarnation] - begun[incarnation]


def config(root: Path, engine: str) -> Any:
    from trinity_dask import load_config

    return load_config(
        "+experiment=sort_task",
        f"engine={engine}",
        "synchronizer=nccl",
        "synchronizer.sync_style=fully_async",
        "synchronizer.in_flight=keep",
        f"checkpoint_root_dir={root}",
        "name=elastic",
        f"prepare_args.dir={root}/data",
        "prepare_args.n_train=512",
        "prepare_args.n_eval=8",
        "buffer.batch_size=8",
        "buffer.total_steps=100000",
        "algorithm.repeat_times=8",
        "explorer.eval_interval=0",
        "explorer.eval_on_startup=false",
        "monitor.sinks=[jsonl]",
        "monitor.progress=off",
    )


def measure(root: Path, engine: str) -> dict[str, float]:
    from trinity_dask import Run

    with Run(config(root, engine)) as run:
        run.start()
        job = Path(run.job_dirs[0])
        logs = [path / "log" for path in (job, job.parent)]
        log = next((path for path in logs if path.is_dir()), job / "log")
        control = log / "control-0.log"
        until(run, lambda: run.status.get("model_version", 0) >= 2)
        alone_s = own_start(log, "engine-0", 0)

        ordered = time.time()
        run.scale("rollout", 2)
        joined = until(run, lambda: logged(control, "engine engine-1 has joined and serves"))
        version = run.status["model_version"]
        until(run, lambda: run.status["model_version"] > version + 1)

        killed = kill_worker(log / "rollout-1.log")
        again = until(run, lambda: logged(control, "engine engine-1 serves again"))
        version = run.status["model_version"]
        until(run, lambda: run.status["model_version"] > version + 1)
        found = {
            "start_alone_s": alone_s,
            "start_of_joining_s": own_start(log, "engine-1", 0),
            "join_s": joined[0] - ordered,
            "start_of_reborn_s": own_start(log, "engine-1", 1),
            "rebirth_s": again[0] - killed,
            "versions": float(run.status["model_version"]),
        }
        run.stop()
        run.wait(timeout=WAIT_S)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), args.engine)
    over = {
        "joining": found["join_s"] - found["start_of_joining_s"],
        "reborn": found["rebirth_s"] - found["start_of_reborn_s"],
    }
    within = max(over.values()) <= LIMIT_S
    result = {
        args.engine: found,
        "over_own_start_s": over,
        "limit_s": LIMIT_S,
        "within_limit": within,
        "load_average": os.getloadavg()[0],
        "cpus": os.cpu_count(),
    }
    print(table(args.engine, found, over))
    if args.smoke:  # a run with one join and one rebirth is the smallest already
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if within else 1


def table(engine: str, found: dict[str, float], over: dict[str, float]) -> str:
    return "\n".join(
        [
            f"| {engine} engine | its own start | serves after | over its own start |",
            "|---|---|---|---|",
            f"| first, alone | {found['start_alone_s']:.1f} s | | |",
            f"| joins | {found['start_of_joining_s']:.1f} s | {found['join_s']:.1f} s | "
            f"{over['joining']:.1f} s |",
            f"| replaces a killed one | {found['start_of_reborn_s']:.1f} s | "
            f"{found['rebirth_s']:.1f} s | {over['reborn']:.1f} s |",
            f"allowed over its own start: {LIMIT_S:g} s",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())

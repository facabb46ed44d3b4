"""What the page /trinity costs the scheduler, and how soon a step is on it.

A scheduler in a process of its own, into which a run tells as a real one does: a step with some
fifty metrics each second, its status and engines twice a second, a wait and a transfer at each
step. The page is opened by a websocket, as a browser opens it. The scheduler's CPU time is measured
with a page and without, while the run tells and while it does not, in turns, so that other load
hits all of them; the page's cost is the median difference. A step is on the page when its message
has arrived there.

    OMP_NUM_THREADS=1 python benchmarks/dashboard.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
from bokeh.util.token import generate_jwt_token, generate_session_id
from distributed import Client, LocalCluster
from tornado.websocket import websocket_connect

from trinity_dask.dashboard import plugin
from trinity_dask.dashboard.feed import MAX_FEEDS, MAX_POINTS, Feeds
from trinity_dask.monitor.curves import AGES
from trinity_dask.monitor.events import TOPIC, EventSink, RunEvents

RESULT = Path(__file__).parent / "results" / "dashboard.json"
FORGET_S = 34.0  # Bokeh keeps a page so long for a browser that comes back
LIMIT_SHARE, IDLE_SHARE, LIMIT_S = 0.02, 0.005, 2.0
METRICS = (
    *("actor/pg_loss", "actor/final_loss", "actor/kl_loss", "actor/entropy", "actor/ppo_kl"),
    *("actor/grad_norm", "rollout/reward/mean", "sample/reward/mean", "tokens_per_s"),
    *("rollout/tokens_per_s", "correction/gap", "update/gap", "rollout/response_length/mean"),
    *(f"{side}/ratio_{p}" for side in ("update", "correction") for p in ("p01", "p50", "p99")),
    *(f"time/{name}" for name in ("explore_step", "train_step", "wait_data", "sync_wait")),
    *(f"{AGES}{age}" for age in range(4)),
)


class Teller(RunEvents):
    """Tells by a client what a control worker tells, and keeps no file."""

    def __init__(self, client: Client) -> None:
        super().__init__("benchmark")
        self._client = client
        self._send({**self._event("stage"), "began": time.time(), "anew": True, "name": "b"})

    def _send(self, event: dict[str, Any]) -> None:
        self._client.log_event(TOPIC, event)

    def half_a_second(self, number: int) -> None:
        """What a run tells in half a second; a step is every other time."""
        now = time.time()
        if number % 2 == 0:
            step = number // 2
            values = {name: 1.0 + (step * 7919 % 101) / 100 for name in METRICS}
            EventSink(self, "trainer", 1).log(now, step, values)
            wait = {"what": "wait", "who": "trainer at step 1", "awaited": "the explorer"}
            moved = {"what": "transfer", "who": "explorer 'explorer'", "version": step}
            for span in (wait, {**moved, "bytes": 1e6, "floor_share": 0.8}):
                self.span({"start": now, "seconds": 0.1, **span})
        accounts = {name: number for name in ("scheduled", "succeeded", "committed", "trained")}
        queue = {"in_flight": number % 40, "queue_rows": number % 300, "queue_batches": number % 4}
        self.status({"state": "running", "step": number // 2, "accounts": accounts, **queue})
        state = {"state": "serving", "version": number, "busy": number % 10 / 10}
        self.engines({f"engine-{i}": {**state, "tokens_per_s": float(number)} for i in range(8)})


class Looker:
    """An open page: when each step has arrived at it."""

    STEP = re.compile(r'\["x",\[(\d+)\.0\]\]')

    def __init__(self) -> None:
        self.arrived: dict[int, float] = {}
        self.n_bytes = 0

    def take(self, message: str | bytes | None) -> None:
        if not isinstance(message, str):
            return
        self.n_bytes += len(message)
        found = self.STEP.search(message) if "ColumnsStreamed" in message else None
        if found is not None:
            self.arrived.setdefault(int(found[1]), time.time())


@asynccontextmanager
async def page(port: int) -> AsyncIterator[Looker]:
    token = generate_jwt_token(generate_session_id())
    looker = Looker()
    connection = await websocket_connect(
        f"ws://127.0.0.1:{port}/trinity/ws",
        subprotocols=["bokeh", token],
        on_message_callback=looker.take,
        max_message_size=1 << 28,
    )
    try:
        yield looker
    finally:
        connection.close()


def serve() -> None:
    """The scheduler's process: prints its address and its dashboard's port, ends with stdin."""
    options = {"n_workers": 0, "processes": False, "protocol": "tcp://"}
    with (
        LocalCluster(dashboard_address="127.0.0.1:0", **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        plugin.join(client)
        services = client.scheduler_info()["services"]
        print(cluster.scheduler_address, services["dashboard"], flush=True)
        sys.stdin.read()


@contextmanager
def scheduler() -> Iterator[tuple[Client, int, psutil.Process]]:
    """A client of it, the port of its dashboard, its process."""
    command = [sys.executable, __file__, "--serve"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        address, port = process.stdout.readline().split()
        with Client(address, set_as_default=False) as client:
            yield client, int(port), psutil.Process(process.pid)
    finally:
        process.stdin.close()
        process.wait(60)


class Bench:
    """Measures one scheduler."""

    def __init__(self, client: Client, port: int, process: psutil.Process) -> None:
        self._teller = Teller(client)
        self._port, self._process = port, process
        self._number = 0
        self._told: dict[int, float] = {}
        self.shares: dict[str, list[float]] = {}
        self.waits: list[float] = []
        self.page_bytes = 0

    async def tell(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._number % 2 == 0:
                self._told[self._number // 2] = time.time()
            await asyncio.to_thread(self._teller.half_a_second, self._number)
            self._number += 1
            await asyncio.sleep(0.5)

    async def share(self, name: str, seconds: float, news: bool) -> None:
        """CPU time of the scheduler by wall time."""
        before, begun = sum(self._process.cpu_times()[:2]), time.monotonic()
        await (self.tell(seconds) if news else asyncio.sleep(seconds))
        used = sum(self._process.cpu_times()[:2]) - before
        self.shares.setdefault(name, []).append(used / (time.monotonic() - begun))

    async def round(self, seconds: float, last: bool) -> None:
        await self.share("news, no page", seconds, news=True)
        await self.share("no news, no page", seconds, news=False)
        async with page(self._port) as looker:
            await asyncio.sleep(1.5)  # opening it is not meant
            self._told.clear()
            await self.share("news, a page", seconds, news=True)
            await asyncio.sleep(1.5)
            await self.share("no news, a page", seconds, news=False)
        if not last:
            await asyncio.sleep(FORGET_S)  # until then the closed page is drawn for
        arrived = looker.arrived
        self.waits += [arrived[s] - told for s, told in self._told.items() if s in arrived]
        self.page_bytes += looker.n_bytes


async def measure(rounds: int, seconds: float) -> dict[str, Any]:
    with scheduler() as (client, port, process):
        bench = await asyncio.to_thread(Bench, client, port, process)
        await bench.tell(2.0)
        for number in range(rounds):
            await bench.round(seconds, last=number == rounds - 1)
    shares = bench.shares
    costs = {
        news: statistics.median(
            a - b
            for a, b in zip(shares[f"{news}, a page"], shares[f"{news}, no page"], strict=True)
        )
        for news in ("news", "no news")
    }
    return {
        "cpu_share": {name: statistics.median(found) for name, found in shares.items()},
        "page_cpu_share": costs,
        "seconds_to_page": {
            "median": statistics.median(bench.waits),
            "max": max(bench.waits),
            "steps": len(bench.waits),
        },
        "page_bytes_per_s": bench.page_bytes / (rounds * seconds),
    }


def memory(runs: int) -> dict[str, float]:
    """MB that the feeds hold of so many runs, each as long as it can be."""
    tracemalloc.start()
    feeds, full = Feeds(), []
    for run in range(runs):
        event = {"run": str(run), "stage": "", "time": 1.0}
        for step in range(MAX_POINTS):
            values = {name: step + 0.5 for name in METRICS}
            points = {"role": "trainer", "incarnation": 1, "points": [[step, values]]}
            feeds.apply({**event, "kind": "metrics", **points})
            load = {"in_flight": step, "queue_rows": step, "queue_batches": step}
            feeds.apply({**event, "kind": "status", "values": load})
        full.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return {"one run": full[0] / 1e6, f"{runs} runs": full[-1] / 1e6}


def table(found: dict[str, Any]) -> str:
    lines = ["| scheduler's CPU, share of a core | |", "|---|---|"]
    lines += [f"| {name} | {share:.2%} |" for name, share in found["cpu_share"].items()]
    lines += [
        f"| the page, {news} | {cost:.2%} |" for news, cost in found["page_cpu_share"].items()
    ]
    waits = found["seconds_to_page"]
    lines.append(
        f"a step is on the page after {waits['median']:.2f} s (most {waits['max']:.2f} s, "
        f"{waits['steps']} steps); {found['page_bytes_per_s'] / 1e3:.1f} kB/s"
    )
    held = ", ".join(f"{name} {size:.1f} MB" for name, size in found["memory_mb"].items())
    return "\n".join([*lines, f"feeds hold at most: {held}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase of a round")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    args = parser.parse_args()
    if args.serve:
        serve()
        return 0
    rounds, seconds = (1, 2.0) if args.smoke else (args.rounds, args.seconds)
    found = asyncio.run(measure(rounds, seconds))
    found |= {"memory_mb": memory(2 if args.smoke else MAX_FEEDS)}
    found |= {"load_average": os.getloadavg()[0], "cpus": os.cpu_count()}
    costs, waits = found["page_cpu_share"], found["seconds_to_page"]
    within = costs["news"] <= LIMIT_SHARE and costs["no news"] <= IDLE_SHARE
    found["within_limit"] = within = within and waits["max"] <= LIMIT_S
    print(table(found))
    if args.smoke:
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())

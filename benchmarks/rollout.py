"""What the explorer path costs: tokens/s through explorer, scheduler and store ÷ bare AsyncLLM.

    python benchmarks/rollout.py [--rounds 8]

Both sides sample the same prompts (64 x 32 answers of the ``sort_digits`` task) with the
same vLLM settings, in turns, in one run; each side's engine is a process of its own and
idles while the other one works. Prints a table, writes ``benchmarks/results/rollout.json``
and exits 1 below the target of 0.90.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TARGET = 0.90
WARM_UP = 3
PROMPTS, SAMPLES = 64, 32


def config(root: Path) -> Any:
    """The second stage of the demo with its start model, vLLM and a fresh store."""
    from trinity_dask.config import load_config, split_stages
    from trinity_dask.demo.sort_digits import prepare

    cfg = load_config(
        "+experiment=sort_digits", "engine=vllm", f"checkpoint_root_dir={root}", "monitor.sinks=[]"
    )
    stage = split_stages(cfg)[1]
    prepare(stage, **stage.prepare_args)
    return stage


class WholePath:
    """A Dask actor on the control worker: everything of a stage but the trainer."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    async def prepare(self) -> None:
        from trinity_dask.buffer.experience_buffer import ExperienceBuffer
        from trinity_dask.engines.pool import EnginePool
        from trinity_dask.explorer.coordinator import Coordinator
        from trinity_dask.explorer.task_stream import TasksetReader
        from trinity_dask.launcher.specs import engine_specs

        self.buffer = ExperienceBuffer(self.cfg.buffer.trainer_input.experience_buffer)
        await self.buffer.prepare(None)
        self.pool = EnginePool(engine_specs(self.cfg), f"bench-{uuid.uuid4().hex[:6]}", 600.0)
        await self.pool.start()
        await self.pool.mark_ready(self.pool.slots())
        self.coordinator = Coordinator(self.cfg, self.buffer)
        await self.coordinator.prepare(int(self.cfg.cluster.rollout.nthreads))
        self.reader = TasksetReader(self.cfg)

    async def round(self, number: int) -> dict[str, float]:
        """One batch from the reading of its tasks to its commit."""
        start = time.perf_counter()
        tasks = self.reader.read()
        await self.coordinator.submit_batch(
            number, tasks, "train", meta=lambda: {"taskset_state": {}}
        )
        result = await self.coordinator.finalize_batch(number, "train")
        seconds = time.perf_counter() - start
        # nobody trains here: take the rows out, or the buffer fills up
        lease = await self.buffer.lease(None, 10.0)
        await self.buffer.ack(lease.lease_id)
        return {"seconds": seconds, "tokens": result["metrics"]["rollout/response_tokens"]}

    async def close(self) -> None:
        await self.coordinator.shutdown()
        await self.pool.close()


async def bare(root: Path) -> None:
    """AsyncLLM alone: a round for every line on standard input."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from trinity_dask.launcher.specs import engine_specs
    from trinity_dask.models.tokenizer import load_tokenizer
    from trinity_dask.models.vllm.engine import VLLMEngine

    stage = config(root)
    args = VLLMEngine(engine_specs(stage)[0])._engine_args()
    for ours in ("worker_extension_cls", "weight_transfer_config"):
        del args[ours]
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
    tokenizer = load_tokenizer(stage.model.model_path)
    rows = Path(stage.prepare_args["dir"], "train.jsonl").read_text().splitlines()
    prompts = [tokenizer.encode(json.loads(row)["prompt"]) for row in rows[:2048]]
    sampling = SamplingParams(
        n=SAMPLES,
        temperature=stage.model.temperature,
        max_tokens=stage.model.max_response_tokens,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=False,
    )

    async def request(ids: list[int], name: str) -> int:
        async for output in llm.generate(
            {"type": "token", "prompt_token_ids": ids}, sampling, name
        ):
            final = output
        return sum(len(answer.token_ids) for answer in final.outputs)

    async def one_round(number: int) -> dict[str, float]:
        first = (number - 1) * PROMPTS % len(prompts)
        chosen = prompts[first : first + PROMPTS]
        start = time.perf_counter()
        counts = await asyncio.gather(
            *(request(ids, f"{number}-{i}") for i, ids in enumerate(chosen))
        )
        return {"seconds": time.perf_counter() - start, "tokens": float(sum(counts))}

    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await one_round(int(line))), flush=True)
    llm.shutdown()


def measure(root: Path, rounds: int, warm_up: int = WARM_UP) -> list[dict[str, Any]]:
    from trinity_dask.cluster.actors import start_actor, stop_actor
    from trinity_dask.cluster.build import open_cluster
    from trinity_dask.cluster.rpc import call
    from trinity_dask.cluster.slots import CONTROL

    stage = config(root)
    command = [sys.executable, __file__, "--bare", str(root)]
    with (
        open_cluster(stage) as cluster,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        ref = start_actor(
            cluster.client, WholePath, stage, slot=CONTROL, key="bench", timeout=120.0
        )
        call(cluster.client, ref.handle, "prepare", timeout=600.0)
        while other.stdout.readline().strip() != "ready":
            pass  # vLLM's own lines
        rows = []
        for number in range(1, warm_up + rounds + 1):
            ours = call(cluster.client, ref.handle, "round", number, timeout=300.0)
            other.stdin.write(f"{number}\n")
            other.stdin.flush()
            theirs = json.loads(other.stdout.readline())
            if number > warm_up:
                rows.append({"round": number - warm_up, "ours": ours, "bare": theirs})
        call(cluster.client, ref.handle, "close", timeout=60.0)
        stop_actor(ref)
        other.stdin.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    parser.add_argument("--bare", metavar="ROOT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        asyncio.run(bare(Path(options.bare)))
        return 0
    with tempfile.TemporaryDirectory(prefix="trinity-rollout-") as root:
        rows = measure(Path(root), 1, 0) if options.smoke else measure(Path(root), options.rounds)
    ratio = show(rows)
    return 0 if options.smoke else save(rows, ratio)


def show(rows: list[dict[str, Any]]) -> float:
    """Print the table; the ratio of the median speeds."""

    def speed(row: dict[str, Any], side: str) -> float:
        return row[side]["tokens"] / row[side]["seconds"]

    table = Table(title=f"rollout, {PROMPTS} prompts x {SAMPLES} answers, tokens/s")
    for column in ("round", "explorer + scheduler + store", "bare AsyncLLM", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        ours, theirs = speed(row, "ours"), speed(row, "bare")
        table.add_row(str(row["round"]), f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.3f}")
    ratio = statistics.median(speed(r, "ours") for r in rows) / statistics.median(
        speed(r, "bare") for r in rows
    )
    Console().print(table)
    print(f"ratio of the medians: {ratio:.3f} (target {TARGET})")
    return ratio


def save(rows: list[dict[str, Any]], ratio: float) -> int:
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "rollout.json").write_text(json.dumps({"ratio": ratio, "rounds": rows}, indent=1))
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())

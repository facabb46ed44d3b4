"""Seconds per weight sync into vLLM, against a bare gloo broadcast of the same bytes.

A sync is all that the synchronizer waits for: checksum, broadcast, checksum again, put in
use in a running vLLM engine, drop its caches, and the receipt. The floor is a process that
only receives the same buckets into memory it already has. Both are measured in turn in every
round, so that other load on the machine hits both; the ratio is that of medians.

On a CPU vLLM computes with a packed copy of each layer's weight, which the engine makes when
the layer is first used. That is after the sync, while the trainer goes on, but it is not
free: ``packing`` is by how much the first pass after a sync is slower than the second, and
``nccl + packing`` the whole cost of a new version to the sampler.

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "weight_sync.json"
BUCKET_BYTES = 64 << 20
LIMIT = 2.0  # times the floor
TIMEOUT_S = 600.0


def save_model(directory: Path) -> None:
    """A random Llama of 135M float32 parameters with head size 64, and a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trinity_dask.demo.tokenizer import ascii_tokenizer
    from trinity_dask.models.weight_transfer import named_weights, write_safetensors

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
        bos_token_id=None,
        eos_token_id=98,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    config.save_pretrained(directory)
    write_safetensors(str(directory / "model.safetensors"), named_weights(model))
    ascii_tokenizer().save_pretrained(directory)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def group_spec(port: int) -> Any:
    from trinity_dask.models.protocol import WeightGroupSpec

    return WeightGroupSpec("127.0.0.1", port, 2, 1, 1, "gloo", TIMEOUT_S)


def receive_bare(port: int, sizes: list[int], rounds: int) -> None:
    """The floor's other end: receives into the same buffers every round."""
    import torch

    from trinity_dask.models.weight_transfer import make_group

    torch.set_num_threads(1)
    group = make_group(group_spec(port), 1, False)
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    for _ in range(rounds):
        for buffer in buffers:
            group.broadcast(buffer).wait()


class Floor:
    """A bare broadcast of the buckets to a process that does nothing else."""

    def __init__(self, sizes: list[int], rounds: int) -> None:
        import torch

        from trinity_dask.models.weight_transfer import make_group

        port = free_port()
        context = multiprocessing.get_context("spawn")
        self.peer = context.Process(target=receive_bare, args=(port, sizes, rounds))
        self.peer.start()
        self.group = make_group(group_spec(port), 0, True)
        self.buffers = [torch.ones(size, dtype=torch.uint8) for size in sizes]

    def __call__(self) -> float:
        start = time.perf_counter()
        for buffer in self.buffers:
            self.group.broadcast(buffer).wait()
        return time.perf_counter() - start


class Sync:
    """Our transfer of a model's weights into a running engine, by each method."""

    def __init__(self, engine: Any, model: Any, directory: Path) -> None:
        from trinity_dask.models.weight_transfer import named_weights, tensor_meta

        self.engine = engine
        self.named = named_weights(model)
        self.meta = tensor_meta(self.named)
        self.directory = directory
        self.version = 0
        self.group: Any = None

    async def form(self) -> None:
        from trinity_dask.models.weight_transfer import make_group

        spec = group_spec(free_port())
        join = asyncio.to_thread(make_group, spec, 0, True)
        self.group, _ = await asyncio.gather(join, self.engine.init_weight_group(spec))

    async def nccl(self) -> float:
        from trinity_dask.models.protocol import WeightUpdate
        from trinity_dask.models.weight_transfer import send

        self.version += 1
        update = WeightUpdate(self.version, "nccl", self.meta, 1, None, BUCKET_BYTES)
        start = time.perf_counter()
        sending = asyncio.to_thread(send, self.group, self.named, self.meta, BUCKET_BYTES)
        digest, receipt = await asyncio.gather(sending, self.engine.update_weights(update))
        seconds = time.perf_counter() - start
        assert digest.value == receipt.checksum
        return seconds

    async def file(self, method: str) -> float:
        from trinity_dask.models.protocol import WeightUpdate
        from trinity_dask.models.weight_transfer import write_safetensors

        self.version += 1
        where = Path("/dev/shm") if method == "memory" else self.directory
        path = where / f"weight-sync-{os.getpid()}.safetensors"
        start = time.perf_counter()
        try:
            digest = await asyncio.to_thread(write_safetensors, str(path), self.named)
            update = WeightUpdate(self.version, method, path=str(path))
            receipt = await self.engine.update_weights(update)
            seconds = time.perf_counter() - start
        finally:
            path.unlink(missing_ok=True)
        assert digest.value == receipt.checksum
        return seconds


async def first_use(engine: Any) -> float:
    """Seconds by which the first pass is slower than the one after it."""

    async def one_pass() -> float:
        start = time.perf_counter()
        await engine.logprobs([1, 2, 3])
        return time.perf_counter() - start

    first, second = await one_pass(), await one_pass()
    return max(first - second, 0.0)


async def check(engine: Any, model: Any) -> None:
    """The engine computes with what was sent, not with what it was started with."""
    import numpy as np

    from trinity_dask.models.torch_engine import sequence_logprobs

    tokens = list(range(1, 60))
    gap = np.abs(await engine.logprobs(tokens) - sequence_logprobs(model, tokens, 1.0)).max()
    assert gap < 1e-3, f"log-probs differ by {gap} after the last sync"


async def measure(directory: Path, rounds: int) -> dict[str, Any]:
    from trinity_dask.models.engine_actor import build_engine
    from trinity_dask.models.protocol import EngineSpec
    from trinity_dask.models.torch_engine import load_model
    from trinity_dask.models.weight_transfer import plan_buckets

    path = str(directory / "model")
    spec = EngineSpec("engine-0", "vllm", path, {}, {"max_model_len": 512})
    engine = build_engine(spec)
    await engine.prepare()
    model = load_model(path, "float32", "cpu")
    for parameter in model.parameters():
        parameter.mul_(1.5)  # so that the engine's start weights would not pass the check
    sync = Sync(engine, model, directory)
    await sync.form()
    sizes = [bucket.n_bytes for bucket in plan_buckets(sync.meta, BUCKET_BYTES)]
    floor = Floor(sizes, rounds + 1)
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        taken = {"floor": await asyncio.to_thread(floor), "nccl": await sync.nccl()}
        taken["packing"] = await first_use(engine)
        taken["nccl + packing"] = taken["nccl"] + taken["packing"]
        for method in ("memory", "checkpoint"):
            taken[method] = await sync.file(method)
            await first_use(engine)
        print(number, {name: round(value, 3) for name, value in taken.items()}, flush=True)
        if number:  # the first round touches memory for the first time
            for name, value in taken.items():
                seconds[name].append(value)
    floor.peer.join(60)
    await check(engine, model)
    await engine.close()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds,
        "bytes": sum(sizes),
    }


def report(measured: dict[str, Any]) -> dict[str, Any]:
    import torch
    import vllm

    median: Callable[[list[float]], float] = statistics.median
    medians = {name: median(values) for name, values in measured["seconds"].items()}
    floor = medians["floor"]
    return {
        **measured,
        "rounds": len(measured["seconds"]["floor"]),
        "bucket_bytes": BUCKET_BYTES,
        "median_s": medians,
        "times_floor": {name: value / floor for name, value in medians.items()},
        "gigabytes_per_s": {n: measured["bytes"] / v / 1e9 for n, v in medians.items() if v},
        "limit": LIMIT,
        "within_limit": medians["nccl"] <= LIMIT * floor,
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or "unknown"},
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| method | seconds (median) | GB/s | times the floor |", "|---|---|---|---|"]
    for name, seconds in result["median_s"].items():
        speed, times = result["gigabytes_per_s"].get(name, 0.0), result["times_floor"][name]
        lines.append(f"| {name} | {seconds:.2f} | {speed:.2f} | {times:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory) / "model")
        measured = asyncio.run(measure(Path(directory), args.rounds))
    result = report(measured)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))
    return 0 if result["within_limit"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

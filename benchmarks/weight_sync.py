"""Seconds per weight sync into one and two vLLM engines, against the bare way.

A sync is all that the synchronizer waits for: transfer, checksums on both sides, put in use
in running vLLM engines, drop their caches, and the receipts. The bare way of ``nccl`` is a
broadcast of the same buckets to as many processes that only receive them, into memory they
have already; that of ``memory`` is one copy of the same bytes in memory. Both are measured in
turn in every round of their method, so that other load on the machine hits both; a share is the
median of the bare way by that of the sync, and the run fails where one is below its limit.

On a CPU vLLM computes with a packed copy of each layer's weight, which the engine makes when
the layer is first used. That is after the sync, while the trainer goes on, but it is not
free: ``packing`` is by how much the first pass after a sync is slower than the second.

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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trinity_dask.models.protocol import WeightReceipt
from trinity_dask.sync.shelf import Published, WeightShelf

RESULT = Path(__file__).parent / "results" / "weight_sync.json"
LIMITS = {"nccl, 1 engine": 0.8, "nccl, 2 engines": 0.8, "memory, 1 engine": 0.5}
BARE = {"nccl": "broadcast", "memory": "copy"}
TIMEOUT_S = 120.0


def bucket_bytes() -> int:
    from trinity_dask.config.schema import SynchronizerConfig

    return SynchronizerConfig().bucket_mb << 20


def save_model(directory: Path, layers: int) -> None:
    """A random Llama with head size 64, with 30 ``layers`` of 135M float32 parameters, and a
    tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trinity_dask.demo.tokenizer import ascii_tokenizer
    from trinity_dask.weights.broadcast import named_weights
    from trinity_dask.weights.files import write_safetensors

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
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


def group_spec(port: int, n_receivers: int, offset: int = 1) -> Any:
    from trinity_dask.models.protocol import WeightGroupSpec

    return WeightGroupSpec("127.0.0.1", port, 1 + n_receivers, offset, 1, "gloo", TIMEOUT_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# the bare way -----------------------------------------------------------------------------
def broadcast(group: Any, buffers: Sequence[Any]) -> None:
    """As many buffers on the wire at a time as a sync has."""
    from trinity_dask.weights.broadcast import WINDOW

    on_wire: list[Any] = []
    for buffer in buffers:
        on_wire.append(group.broadcast(buffer))
        if len(on_wire) == WINDOW:
            on_wire.pop(0).wait()
    for work in on_wire:
        work.wait()


def receive_bare(port: int, n_receivers: int, rank: int, sizes: list[int], rounds: int) -> None:
    import torch

    from trinity_dask.weights.broadcast import make_group

    torch.set_num_threads(1)
    group = make_group(group_spec(port, n_receivers), rank, False)
    buffers = torch.zeros(sum(sizes), dtype=torch.uint8).split(sizes)
    for _ in range(rounds):
        broadcast(group, buffers)
        group.backend.barrier().wait()


class Bare:
    """A broadcast of the buckets to processes that do nothing else."""

    def __init__(self, n_receivers: int, sizes: list[int], rounds: int) -> None:
        import torch

        from trinity_dask.weights.broadcast import make_group

        port = free_port()
        context = multiprocessing.get_context("spawn")
        self.peers = [
            context.Process(target=receive_bare, args=(port, n_receivers, rank, sizes, rounds))
            for rank in range(1, n_receivers + 1)
        ]
        for peer in self.peers:
            peer.start()
        self.group = make_group(group_spec(port, n_receivers), 0, True)
        self.buffers = torch.ones(sum(sizes), dtype=torch.uint8).split(sizes)

    def __call__(self) -> float:
        start = time.perf_counter()
        broadcast(self.group, self.buffers)
        self.group.backend.barrier().wait()  # everybody has everything
        return time.perf_counter() - start

    def close(self) -> None:
        for peer in self.peers:
            peer.join(60)


class Copy:
    """One copy in memory that is there already."""

    def __init__(self, n_bytes: int) -> None:
        import torch

        self.source = torch.ones(n_bytes, dtype=torch.uint8)
        self.target = torch.zeros(n_bytes, dtype=torch.uint8)

    def __call__(self) -> float:
        start = time.perf_counter()
        self.target.copy_(self.source)
        return time.perf_counter() - start


# the sync ---------------------------------------------------------------------------------
class Sync:
    """Our transfer of a model's weights into running engines, by each method."""

    def __init__(self, engines: list[Any], model: Any, directory: Path) -> None:
        from trinity_dask.weights.broadcast import lay_out, named_weights, tensor_meta
        from trinity_dask.weights.memory import SharedFiles

        self.engines = engines
        run_id = f"weight-sync-{os.getpid()}"
        self.shelves = {
            method: WeightShelf.for_run(method, str(directory), run_id)
            for method in ("memory", "checkpoint")
        }
        self.meta = tensor_meta(named_weights(model))
        lay_out(dict(model.named_parameters()), self.meta, bucket_bytes())  # as the trainer does
        self.named = named_weights(model)
        self.shared = SharedFiles()
        self.version = 0
        self.group: Any = None

    async def form(self, n_engines: int) -> None:
        from trinity_dask.weights.broadcast import make_group

        port = free_port()
        join = asyncio.to_thread(make_group, group_spec(port, n_engines), 0, True)
        specs = [group_spec(port, n_engines, offset) for offset in range(1, n_engines + 1)]
        theirs = zip(self.engines, specs, strict=False)
        self.group, *_ = await asyncio.gather(join, *(e.init_weight_group(s) for e, s in theirs))

    async def _update(self, n_engines: int, update: Any, sending: Any) -> float:
        """``sending`` goes on while the engines take ``update``, or has ended."""
        calls = [engine.update_weights(update) for engine in self.engines[:n_engines]]
        digest, *receipts = await asyncio.gather(sending, *calls)
        assert {receipt.checksum for receipt in receipts} == {digest.value}
        return time.perf_counter()

    async def nccl(self, n_engines: int) -> float:
        from trinity_dask.models.protocol import WeightUpdate
        from trinity_dask.weights.broadcast import send

        self.version += 1
        start, size = time.perf_counter(), bucket_bytes()
        update = WeightUpdate(self.version, "nccl", self.meta, 1, None, size)
        sending = asyncio.to_thread(send, self.group, self.named, self.meta, size)
        return await self._update(n_engines, update, sending) - start

    async def file(self, method: str, n_engines: int) -> float:
        from trinity_dask.models.protocol import WeightUpdate
        from trinity_dask.weights.files import write_safetensors

        self.version += 1
        shelf = self.shelves[method]
        path = shelf.path(self.version)
        write = self.shared.write if method == "memory" else write_safetensors
        start = time.perf_counter()
        digest = await asyncio.to_thread(write, path, self.named)
        update = WeightUpdate(self.version, method, path=path)
        end = await self._update(n_engines, update, asyncio.sleep(0, digest))
        shelf.put(Published(self.version, path, WeightReceipt(self.version, 0, 0, 0.0)))
        shelf.sweep({self.version})
        return end - start

    def close(self) -> None:
        for shelf in self.shelves.values():
            shelf.remove_all()


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

    from trinity_dask.models.torch.engine import sequence_logprobs

    tokens = list(range(1, 60))
    gap = np.abs(await engine.logprobs(tokens) - sequence_logprobs(model, tokens, 1.0)).max()
    assert gap < 1e-3, f"log-probs differ by {gap} after the last sync"


async def measure_case(sync: Sync, n_engines: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round but the first two, which touch memory for the first time.

    One method after the other, as a run has one: an engine keeps memory for the next version.
    """
    from trinity_dask.weights.broadcast import plan_buckets

    await sync.form(n_engines)
    engines = sync.engines[:n_engines]
    sizes = [bucket.n_bytes for bucket in plan_buckets(sync.meta, bucket_bytes())]
    bare, copy = Bare(n_engines, sizes, rounds + 2), Copy(sum(sizes))

    async def by_group() -> dict[str, float]:
        taken = {"broadcast": await asyncio.to_thread(bare), "nccl": await sync.nccl(n_engines)}
        return taken | {"packing": max([await first_use(engine) for engine in engines])}

    async def by_file(method: str) -> dict[str, float]:
        taken = {"copy": copy()} if method == "memory" else {}
        taken[method] = await sync.file(method, n_engines)
        for engine in engines:
            await first_use(engine)
        return taken

    seconds: dict[str, list[float]] = defaultdict(list)
    for work in (by_group, partial(by_file, "memory"), partial(by_file, "checkpoint")):
        for number in range(rounds + 2):
            taken = await work()
            print(n_engines, number, {k: round(v, 3) for k, v in taken.items()}, flush=True)
            for name, value in taken.items():
                seconds[name] += [value] if number > 1 else []
    bare.close()
    return dict(seconds)


async def measure(directory: Path, rounds: int, cases: list[int]) -> dict[str, Any]:
    from trinity_dask.models.actor.actor import build_engine
    from trinity_dask.models.protocol import EngineSpec
    from trinity_dask.models.torch.engine import load_model

    path = str(directory / "model")
    engines = []
    for number in range(max(cases)):
        spec = EngineSpec(f"engine-{number}", "vllm", path, {}, {"max_model_len": 512})
        engines.append(build_engine(spec))
        await engines[-1].prepare()
    model = load_model(path, "float32", "cpu")
    for parameter in model.parameters():
        parameter.mul_(1.5)  # so that the engines' start weights would not pass the check
    sync = Sync(engines, model, directory)
    seconds = {str(n): await measure_case(sync, n, rounds) for n in cases}
    for engine in engines:
        await check(engine, model)
        await engine.close()
    sync.close()
    n_bytes = sum(meta.n_bytes for meta in sync.meta)
    return {"parameters": n_bytes // 4, "bytes": n_bytes, "seconds": seconds}


# the report -------------------------------------------------------------------------------
def report(measured: dict[str, Any]) -> dict[str, Any]:
    import torch
    import vllm

    medians = {
        case: {name: statistics.median(values) for name, values in found.items()}
        for case, found in measured["seconds"].items()
    }
    shares = {
        f"{method}, {case} engine{'s' if case != '1' else ''}": found[bare] / found[method]
        for case, found in medians.items()
        for method, bare in BARE.items()
    }
    missed = [name for name, least in LIMITS.items() if shares.get(name, least) < least]
    return {
        **measured,
        "bucket_bytes": bucket_bytes(),
        "median_s": medians,
        "shares": shares,
        "limits": LIMITS,
        "missed": missed,
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor() or "unknown"},
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| engines | way | seconds (median) | GB/s |", "|---|---|---|---|"]
    for case, found in result["median_s"].items():
        for name, seconds in found.items():
            speed = result["bytes"] / max(seconds, 1e-9) / 1e9
            lines.append(f"| {case} | {name} | {seconds:.3f} | {speed:.2f} |")
    for name, share in result["shares"].items():
        least = result["limits"].get(name)
        wanted = "" if least is None else f" (at least {least:g})"
        lines.append(f"{name}: {share:.2f} of the bare way{wanted}")
    return "\n".join([*lines, *(f"MISSED: {name}" for name in result["missed"])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    args = parser.parse_args()
    if args.smoke:
        args.rounds, args.engines = 1, [1]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory) / "model", layers=1 if args.smoke else 30)
        measured = asyncio.run(measure(Path(directory), args.rounds, args.engines))
    result = report(measured)
    print(table(result))
    if args.smoke:
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Memory of a rank whose model is sharded: while it loads, saves, resumes and gives weights away.

Fresh gloo ranks load a random Llama of a few hundred MB (float32) as ``fsdp2`` ranks do. The
parent reads each rank's ``RssAnon`` all the time: anonymous memory, so that pages of mapped files,
which the kernel takes back when it likes, do not count. A peak is what exceeds the rank's memory
after it went through all phases once with a tiny model (what Python imports is no weight); its
limit is 1.2 times the tensors that the rank holds in that phase plus one layer (or the embedding,
if that is larger: the root of the model gathers it). So that freed tensors do not count, the C
library is told to give large ones back at once
(``MALLOC_MMAP_THRESHOLD_``); a trainer leaves it at its default, which keeps some for reuse.

    OMP_NUM_THREADS=1 python benchmarks/sharded_load.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "sharded_load.json"
PHASES = ("load", "frozen", "save", "resume", "gather")
LIMIT = 1.2
SAMPLE_S = 0.001
MMAP_BYTES = 1 << 18


def save_model(directory: Path, hidden: int, layers: int, vocab: int) -> int:
    """Bytes of the random model that is then in ``directory``, in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return 4 * sum(p.numel() for p in model.parameters())


class Rank:
    """What one rank does; ``begin(phase)`` marks where its next phase starts."""

    def __init__(self, mesh: Any, path: str, job: Path) -> None:
        self.mesh, self.path, self.job = mesh, path, job
        self.trained: Any = None

    def load(self) -> int:
        """A policy that is trained; the bytes that this rank holds afterwards."""
        from trinity_dask.config.schema import OptimizerConfig
        from trinity_dask.trainer.model.policy_model import load_policy
        from trinity_dask.trainer.model.trainable import TrainableModel
        from trinity_dask.trainer.ranks.parallel import Sharding

        module = load_policy(self.path, sharding=Sharding(self.mesh))
        self.trained = TrainableModel(module, OptimizerConfig())
        return self.held()

    def held(self) -> int:
        from trinity_dask.trainer.ranks.parallel import local_bytes

        parts = [*self.trained.named.values()]
        parts += [value for _, value in self.trained.state_tensors(gather=False)]
        return sum(local_bytes(part) for part in parts)

    def frozen(self) -> int:
        """A reference beside it, in bfloat16."""
        import torch

        from trinity_dask.trainer.model.policy_model import load_policy
        from trinity_dask.trainer.ranks.parallel import Sharding, local_bytes

        sharding = Sharding(self.mesh, torch.bfloat16)
        module = load_policy(self.path, sharding=sharding, trained=False)
        return self.held() + sum(local_bytes(p) for p in module.parameters())

    def save(self) -> int:
        """Weights and moments, after an update."""
        import torch

        from trinity_dask.trainer.checkpoints.export import write_engine

        for parameter in self.trained.named.values():
            self.trained.optimizer.state[parameter] = {
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.ones_like(parameter),
                "step": torch.tensor(1.0),
            }
        lead = self.mesh.get_local_rank() == 0
        write_engine({"actor": self.trained}, self.job, self.path, lead)
        return self.held()

    def resume(self) -> int:
        from trinity_dask.trainer.checkpoints.export import read_engine

        self.trained.optimizer.state.clear()
        read_engine({"actor": self.trained}, self.job)
        return self.held()

    def gather(self) -> int:
        """The whole model into a file, as weights travel."""
        from trinity_dask.weights.broadcast import tensor_meta
        from trinity_dask.weights.files import write_safetensors

        named = self.trained.full_weights()
        if self.mesh.get_local_rank() > 0:
            for _ in named:
                pass
        else:
            meta = tensor_meta(self.trained.named.items())
            write_safetensors(str(self.job / "sent.safetensors"), named, meta=meta)
        return self.held()


def rank_main(
    rank: int, world: int, path: str, tiny: str, job: Path, phase: Any, results: Any
) -> None:
    import ctypes
    import gc

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaForCausalLM  # noqa: F401  before the memory is looked at

    import trinity_dask.trainer.checkpoints.export
    import trinity_dask.trainer.model.policy_model  # noqa: F401

    torch.set_num_threads(1)
    store = f"file://{job}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    first = Rank(mesh, tiny, job / "tiny")
    for name in PHASES:
        getattr(first, name)()
    mine = Rank(mesh, path, job / "model")
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    begin = anonymous(os.getpid())
    held, seconds = {}, {}
    for number, name in enumerate(PHASES, 1):
        dist.barrier()
        phase.value, start = number, time.perf_counter()
        work: Callable[[], int] = getattr(mine, name)
        held[name] = work()
        seconds[name] = time.perf_counter() - start
        phase.value = 0
        gc.collect()  # modules are cycles
    results.put((rank, begin, held, seconds))
    dist.barrier()


def anonymous(pid: int) -> int:
    """Bytes of anonymous memory of a process that is there."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10


def measure(world: int, path: str, tiny: str, job: Path) -> dict[str, dict[str, float]]:
    """By phase, of the rank that comes nearest to its limit: bytes and seconds."""
    for each in (job, job / "tiny", job / "model"):
        each.mkdir()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    phases = [context.Value("i", 0, lock=False) for _ in range(world)]
    ranks = [
        context.Process(target=rank_main, args=(rank, world, path, tiny, job, phase, results))
        for rank, phase in enumerate(phases)
    ]
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_BYTES)  # the ranks begin with it
    for rank in ranks:
        rank.start()
    peaks: dict[tuple[int, int], int] = {}
    found: list[Any] = []
    while len(found) < world:
        for number, rank in enumerate(ranks):
            if rank.exitcode:
                raise RuntimeError(f"rank {number} of {world} ended with {rank.exitcode}")
            if phase := phases[number].value:
                key = number, phase
                peaks[key] = max(peaks.get(key, 0), anonymous(rank.pid or 0))
        while not results.empty():
            found.append(results.get())
        time.sleep(SAMPLE_S)
    for rank in ranks:
        rank.join()
    report: dict[str, dict[str, float]] = {}
    for number, begin, held, seconds in found:
        for phase, name in enumerate(PHASES, 1):
            peak = peaks.get((number, phase), begin) - begin
            entry = {"held": held[name], "peak": peak, "seconds": seconds[name]}
            so_far = report.setdefault(name, entry)
            if so_far["peak"] - so_far["held"] < peak - held[name]:
                report[name] = entry
    return report


def layer_bytes(hidden: int, vocab: int) -> int:
    middle = hidden * 8 // 3 // 64 * 64
    return 4 * max(4 * hidden * hidden + 3 * hidden * middle + 2 * hidden, vocab * hidden)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=12_000)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    args = parser.parse_args()
    if args.smoke:
        args.ranks, args.hidden, args.layers = [2], 256, 2
    missed, found = [], {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        tiny = Path(directory) / "tiny"
        save_model(tiny, 64, 1, 64)
        n_bytes = save_model(path, args.hidden, args.layers, args.vocab)
        layer = layer_bytes(args.hidden, args.vocab)
        print(f"{n_bytes / 1e6:.0f} MB in float32, of which a layer {layer / 1e6:.0f} MB")
        print("| ranks | phase | held (MB) | peak (MB) | limit (MB) | seconds |")
        print("|---|---|---|---|---|---|")
        for world in args.ranks:
            job = Path(directory) / f"job-{world}"
            found[str(world)] = measure(world, str(path), str(tiny), job)
            for name, entry in found[str(world)].items():
                entry["limit"] = LIMIT * entry["held"] + layer
                sizes = (f"{entry[key] / 1e6:.0f}" for key in ("held", "peak", "limit"))
                print(f"| {world} | {name} | {' | '.join(sizes)} | {entry['seconds']:.1f} |")
                missed += [f"{name}, {world} ranks"] if entry["peak"] > entry["limit"] else []
    print(*(f"MISSED: {each}" for each in missed), sep="\n")
    if args.smoke:
        return 0
    result = {"bytes": n_bytes, "layer_bytes": layer, "ranks": found, "missed": missed}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())

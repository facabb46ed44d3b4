"""A train step of a model of 135M parameters beside the same step in a bare torch loop.

Each side is a process of its own, so that its peak memory is its own; one step at a time is
made, by the two in turns, so that a busy machine slows both. The model has the shape of
SmolLM-135M (30 layers, hidden 576, vocabulary 49152) with random weights; a step is one AdamW
update on 8 rows of 256 tokens, 255 of them scored.

Memory is the largest resident size of the whole process (``VmHWM``), model loading and first
step included. What the process holds before a model exists (libraries) is given beside it.

Called by ``train_step.py``. A side by itself, one step for every line that it reads:

    yes | head -3 | python benchmarks/_train_step_large.py --side bare|trainer --dir DIR
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

ROWS, TOKENS, VOCAB = 8, 256, 49_152
FLOOR, MEMORY_CEILING = 0.95, 1.1
SIDES = ("bare", "trainer")


def compare_large(steps: int, layers: int = 30, tokens: int = TOKENS) -> dict[str, Any]:
    """Seconds and memory of both sides; one more step, the first, warms each up."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        write_model(Path(name), layers)
        running = {side: stack.enter_context(_start(side, Path(name), tokens)) for side in SIDES}
        done: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for turn in range(steps + 1):
            for side in SIDES if turn % 2 else reversed(SIDES):
                done[side].append(_one_step(side, running[side]))
    return _verdict(done)


def _start(side: str, directory: Path, tokens: int) -> subprocess.Popen[str]:
    """A side's process; it waits for lines to step on and ends with its input."""
    command = [sys.executable, __file__, "--side", side, "--dir", str(directory)]
    command += ["--tokens", str(tokens)]
    env = os.environ | {
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _one_step(side: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("step\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the {side} side ended with exit code {process.wait(60)}")
    return json.loads(line)


def _verdict(done: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def middle(key: str, side: str) -> float:
        return statistics.median(step[key] for step in done[side][1:])

    seconds, cpu = ({side: middle(key, side) for side in SIDES} for key in ("seconds", "cpu"))
    peak = {side: done[side][-1]["peak_bytes"] for side in SIDES}
    losses = {side: [step["loss"] for step in done[side]] for side in SIDES}
    same = bool(np.allclose(losses["bare"], losses["trainer"], rtol=1e-4))
    pairs = zip(done["bare"][1:], done["trainer"][1:], strict=True)
    ratio = statistics.median(bare["seconds"] / ours["seconds"] for bare, ours in pairs)
    memory = peak["trainer"] / peak["bare"]
    return {
        "shape": "135M, 8x256 tokens",
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_bytes": peak,
        "ratio": ratio,
        "ratio_of_cpu_seconds": cpu["bare"] / cpu["trainer"],
        "memory_ratio": memory,
        "losses": losses,
        "same_losses": same,
        "floor": FLOOR,
        "memory_ceiling": MEMORY_CEILING,
        "ok": same and ratio >= FLOOR and memory <= MEMORY_CEILING,
        "steps": done,
    }


def show_large(r: dict[str, Any]) -> None:
    for side in SIDES:
        print(
            f"{r['shape']:20} {side:8} {r['seconds'][side]:7.2f} s/step "
            f"{r['cpu_seconds'][side]:7.2f} cpu-s {r['peak_bytes'][side] / 1e9:6.2f} GB"
        )
    print(
        f"speed {r['ratio']:.3f} (by cpu {r['ratio_of_cpu_seconds']:.3f}, floor {FLOOR}), "
        f"memory {r['memory_ratio']:.3f} (ceiling {MEMORY_CEILING}), same losses "
        f"{r['same_losses']}: {'ok' if r['ok'] else 'MISSED'}"
    )


def write_model(directory: Path, layers: int) -> None:
    """A model of 135M parameters with 30 ``layers``, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def resident(key: str = "VmHWM") -> int:
    """Bytes of this process: ``VmHWM`` at most so far, ``VmRSS`` now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}")


def token_ids(tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (ROWS, tokens))


def bare(model_path: str, tokens: int) -> Callable[[int], float]:
    """The loop that a careful user of torch writes."""
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    ids = torch.from_numpy(token_ids(tokens))

    def step(number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def trainer(model_path: str, tokens: int, threads: int) -> Callable[[int], float]:
    """A trainer rank, from rows to metrics."""
    from trinity_dask.config.schema import Config, OptimizerConfig
    from trinity_dask.experience import EID, Experience
    from trinity_dask.experience.schema import encode
    from trinity_dask.trainer.ranks.rank import TrainerRank
    from trinity_dask.trainer.sources import TrainInput

    cfg = Config(mode="train")
    cfg.model.model_path = model_path
    cfg.algorithm.algorithm_type = "sft"
    cfg.algorithm.optimizer = OptimizerConfig(lr=1e-4, betas=[0.9, 0.95], weight_decay=0.0)
    cfg.cluster.trainer.omp_threads = threads
    rank = TrainerRank(cfg, 0, 1)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(rank.prepare("", 1, model_path, None))
    rows = [
        Experience(tokens=ids, prompt_length=1, eid=EID(1, k, 0))
        for k, ids in enumerate(token_ids(tokens))
    ]
    train_input = TrainInput(payload=encode(rows, {}))

    def step(number: int) -> float:
        metrics = loop.run_until_complete(rank.train_step(train_input, number))
        return metrics["actor/final_loss"]

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a row")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    before = resident("VmRSS")
    make = bare if options.side == "bare" else partial(trainer, threads=options.threads)
    step = make(options.dir, options.tokens)
    for number, _ in enumerate(sys.stdin, start=1):
        wall, used = time.perf_counter(), time.process_time()
        loss = step(number)
        facts = {
            "seconds": time.perf_counter() - wall,
            "cpu": time.process_time() - used,
            "loss": loss,
            "peak_bytes": resident(),
            "before_bytes": before,
        }
        print(json.dumps(facts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

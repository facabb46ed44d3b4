"""One side of the 135M-parameter comparison, in a process of its own.

    python benchmarks/train_step_large.py --side bare|trainer --dir DIR --steps 3

Prints one line of JSON: seconds of every step, and memory in bytes. The model has the shape
of SmolLM-135M (30 layers, hidden 576, vocabulary 49152) with random weights; a step is one
AdamW update on 8 rows of 256 tokens, 255 of them scored.

Memory is the largest resident size of the whole process (``VmHWM``), model loading and first
step included. What the process holds before a model exists (libraries) is given beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

ROWS, TOKENS, VOCAB = 8, 256, 49_152


def write_model(directory: Path) -> None:
    """A model of 135M parameters, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
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


def token_ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (ROWS, TOKENS))


def bare(model_path: str) -> Callable[[int], float]:
    """The loop that a careful user of torch writes."""
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    ids = torch.from_numpy(token_ids())

    def step(number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def trainer(model_path: str, threads: int) -> Callable[[int], float]:
    """A trainer rank, from rows to metrics."""
    from trinity_dask.config.schema import Config, OptimizerConfig
    from trinity_dask.experience import EID, Experience
    from trinity_dask.experience.payload import encode
    from trinity_dask.trainer.rank import TrainerRank
    from trinity_dask.trainer.rows import TrainInput

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
        for k, ids in enumerate(token_ids())
    ]
    train_input = TrainInput(payload=encode(rows, {}))

    def step(number: int) -> float:
        metrics = loop.run_until_complete(rank.train_step(train_input, number))
        return metrics["actor/final_loss"]

    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=("bare", "trainer"), required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    before = resident("VmRSS")
    make = bare if options.side == "bare" else lambda path: trainer(path, options.threads)
    step = make(options.dir)
    seconds, cpu, losses = [], [], []
    for number in range(1, options.steps + 1):
        wall, used = time.perf_counter(), time.process_time()
        losses.append(step(number))
        seconds.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - used)
    facts = {"seconds": seconds, "cpu_seconds": cpu, "losses": losses}
    print(json.dumps(facts | {"peak_bytes": resident(), "before_bytes": before}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How fast a trainer rank is beside a bare torch loop over the same model and rows.

The rank counts everything of a train step: reading the committed rows from the store,
collating them, log-probs at the start of the step, updates, metrics. The bare loop gets
ready tensors and does only the mathematics that no implementation can avoid:

* ``sft``: forward, loss, backward, clip, AdamW over one mini-batch;
* ``grpo``: log-probs of the three later mini-batches, then four such updates with the
  clipped loss and token TIS (the first mini-batch's old log-probs are its own).

Both use one torch thread and take turns, so that a busy machine slows both.

A third part is a model of 135M parameters (``_train_step_large.py``): 8 rows of 256 tokens,
one process per side, all cores. Floors: 0.95 of the bare loop's speed and at most 1.1 times
its peak memory. About four minutes on two cores.

    python benchmarks/train_step.py [--rows 2048] [--repeats 7] [--steps 4] [--only large|small]

Prints tables and writes ``benchmarks/results/train_step.json``. Floor of the small shapes:
0.90 of the bare loop's tokens/s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from _train_step_large import compare_large, show_large

from trinity_dask.buffer.store.experience_store import ExperienceStore
from trinity_dask.config.schema import Config, OptimizerConfig
from trinity_dask.demo import sort_digits
from trinity_dask.experience import EID, Experience
from trinity_dask.experience.schema import to_table
from trinity_dask.trainer.model.policy_model import load_policy
from trinity_dask.trainer.ranks.rank import TrainerRank
from trinity_dask.trainer.sources import TrainInput
from trinity_dask.trainer.step.batching import collate

FLOOR = 0.90
RESULTS = Path(__file__).parent / "results" / "train_step.json"
PROMPT, RESPONSE, GROUP = 12, 7, 32


def make_rows(n: int, vocab: int, seed: int = 0) -> list[Experience]:
    """Rows as the demo makes them: equal prompts in a group, nearly all answers complete."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, vocab, (n // GROUP + 1, PROMPT))
    made = []
    for k in range(n):
        length = RESPONSE if rng.random() < 0.9 else int(rng.integers(2, RESPONSE))
        made.append(
            Experience(
                tokens=np.concatenate([prompts[k // GROUP], rng.integers(0, vocab, length)]),
                prompt_length=PROMPT,
                eid=EID(1, k // GROUP, k % GROUP),
                reward=float(rng.random() < 0.5),
                logprobs=-rng.exponential(size=length),
                versions=np.zeros(length, np.int32),
                advantages=np.full(length, rng.normal()),
            )
        )
    return made


def config(directory: Path, algorithm: str) -> Config:
    """The demo's recipe for one stage."""
    cfg = Config(mode="train", job_dir=str(directory / algorithm))
    cfg.model.model_path = str(directory / "demo" / "model")
    cfg.algorithm.algorithm_type = algorithm
    cfg.algorithm.optimizer = OptimizerConfig(lr=1e-3, betas=[0.9, 0.95], weight_decay=0.0)
    if algorithm == "grpo":
        cfg.algorithm.kl_loss_fn = "none"
        cfg.algorithm.entropy_loss_fn = "none"
        cfg.algorithm.policy_loss_fn_args = {"clip_range_low": 0.2, "clip_range_high": 0.28}
        cfg.algorithm.rollout_correction.mode = "token_tis"
        cfg.trainer.mini_batches = 4
        cfg.trainer.min_mini_batch_rows = 256
    return cfg


class BareLoop:
    """Plain torch on ready tensors."""

    def __init__(self, model_path: str, batch: dict[str, Any], parts: int) -> None:
        self.model = load_policy(model_path)
        self.batch = batch
        self.parts = parts
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def logprobs(self, rows: torch.Tensor) -> torch.Tensor:
        ids = self.batch["input_ids"][rows]
        width = self.batch["action_mask"].shape[1]
        logits = self.model(ids[:, :-1], use_cache=False, logits_to_keep=width).logits
        chosen = logits.gather(-1, ids[:, -width:, None]).squeeze(-1)
        return chosen - torch.logsumexp(logits, dim=-1)

    def step(self) -> None:
        parts = torch.randperm(len(self.batch["input_ids"])).chunk(self.parts)
        with torch.no_grad():
            old = [None] + [self.logprobs(rows) for rows in parts[1:]]
        for rows, start in zip(parts, old, strict=True):
            self.optimizer.zero_grad(set_to_none=True)
            self.loss(rows, start).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    def loss(self, rows: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
        mask = self.batch["action_mask"][rows]
        logprob = self.logprobs(rows)
        if self.parts == 1:
            return -(logprob * mask).sum() / mask.sum()
        start = logprob.detach() if start is None else start
        advantages = self.batch["advantages"][rows]
        ratio = (logprob - start).exp()
        weight = (start - self.batch["rollout_logprobs"][rows]).exp().clamp(max=2.0)
        clipped = ratio.clamp(0.8, 1.28) * advantages
        objective = weight * torch.minimum(ratio * advantages, clipped)
        return -(objective * mask).sum() / mask.sum()


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds; the latter say the same on a busy machine as on a quiet one."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(directory: Path, algorithm: str, rows: int, repeats: int) -> dict[str, Any]:
    """Seconds per step of both, measured in turns."""
    cfg = config(directory, algorithm)
    vocab = json.loads((Path(cfg.model.model_path) / "config.json").read_text())["vocab_size"]
    table = to_table(make_rows(rows, vocab))
    store = ExperienceStore(str(directory / f"store-{algorithm}"))
    manifest = store.commit(1, table, {})
    train_input = TrainInput(store_url=store.url, refs=(manifest.ref(),))
    rank = TrainerRank(cfg, 0, 1)
    asyncio.run(rank.prepare("", 1, cfg.model.model_path, None))
    bare = BareLoop(cfg.model.model_path, collate(table, 0), cfg.trainer.mini_batches)
    torch.set_num_threads(1)

    async def train(step: int) -> None:
        await rank.train_step(train_input, step)

    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for repeat in range(-2, repeats):  # two rounds to warm up
        seconds = timed(bare.step), timed(lambda k=repeat: asyncio.run(train(k + 3)))
        if repeat >= 0:
            theirs.append(seconds[0])
            ours.append(seconds[1])
    save_ms = [1e3 * timed(lambda k=k: save(rank, cfg, k))[0] for k in range(1, 8)]
    asyncio.run(rank.close())
    return report(algorithm, int(np.sum(collate(table, 0)["lengths"].numpy())), ours, theirs) | {
        "rows": rows,
        "checkpoint_ms": {"median": statistics.median(save_ms), "best": min(save_ms)},
    }


def save(rank: TrainerRank, cfg: Config, step: int) -> None:
    asyncio.run(rank.save_checkpoint(str(cfg.job_dir), step, {"step": step}, False))


def report(
    name: str, tokens: int, ours: list[tuple[float, float]], theirs: list[tuple[float, float]]
) -> dict[str, Any]:
    wall, cpu = (
        sorted(b[clock] / a[clock] for a, b in zip(ours, theirs, strict=True)) for clock in (0, 1)
    )
    return {
        "shape": name,
        "tokens": tokens,
        "trainer_tokens_per_s": tokens / statistics.median(wall for wall, _ in ours),
        "bare_tokens_per_s": tokens / statistics.median(wall for wall, _ in theirs),
        "ratio": statistics.median(wall),
        "ratio_range": [wall[0], wall[-1]],
        "ratio_of_cpu_seconds": statistics.median(cpu),
        "floor": FLOOR,
        "ok": statistics.median(wall) >= FLOOR,
    }


def show(results: list[dict[str, Any]]) -> None:
    print(
        f"{'shape':6} {'rows':>5} {'trainer tok/s':>14} {'bare tok/s':>11} {'ratio':>6} "
        f"{'by cpu':>8} {'save ms':>8}  floor {FLOOR}"
    )
    for r in results:
        print(
            f"{r['shape']:6} {r['rows']:5d} {r['trainer_tokens_per_s']:14.0f} "
            f"{r['bare_tokens_per_s']:11.0f} {r['ratio']:6.3f} {r['ratio_of_cpu_seconds']:8.3f} "
            f"{r['checkpoint_ms']['median']:8.1f}  {'ok' if r['ok'] else 'BELOW'}"
        )


def small(rows: int, repeats: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sort_digits.prepare(Config(), dir=str(directory / "demo"), n_train=8, n_eval=2)
        results = [
            compare(directory, "sft", min(rows, 512), repeats),
            compare(directory, "grpo", rows, repeats),
        ]
    show(results)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048, help="rows of the grpo step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, large model")
    parser.add_argument("--only", choices=("small", "large"), help="one part; keeps the other's")
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.smoke:
        small(64, 1)
        show_large(compare_large(1, layers=1, tokens=16))
        return 0
    kept = json.loads(RESULTS.read_text()) if options.only and RESULTS.is_file() else {}
    found = {key: kept[key] for key in ("results", "large") if key in kept}
    if options.only != "large":
        found["results"] = small(options.rows, options.repeats)
    if options.only != "small":
        found["large"] = compare_large(options.steps)
        show_large(found["large"])
    RESULTS.parent.mkdir(exist_ok=True)
    facts = {
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "torch_threads": 1,
        "load": os.getloadavg()[0],
    }
    RESULTS.write_text(json.dumps({"facts": facts, **found}, indent=1) + "\n")
    done = [*found.get("results", []), *([found["large"]] if "large" in found else [])]
    return 0 if all(r["ok"] for r in done) else 1


if __name__ == "__main__":
    sys.exit(main())

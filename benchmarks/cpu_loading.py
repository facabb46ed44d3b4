"""What loading weights directly buys a run with vLLM on CPUs, beside vLLM's own reload.

The same run twice in each round, in turn: a random Llama of 135M float32 parameters with the
demo's tasks, one engine, ``nccl``, a sync at every step. The environment variable
``TRINITY_DASK_VLLM_RELOAD`` of the rollout worker takes the direct loader away; nothing else
differs. A run's seconds per step go from its second trained step to its last; those of a sync are
the trainer's. ``python benchmarks/cpu_loading.py [--rounds N] [--steps N] [--smoke]``
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import trinity_dask
from trinity_dask.monitor.history import load_metrics
from trinity_dask.run import Run

sys.path.insert(0, str(Path(__file__).parent))
from weight_sync import save_model

LAYERS, SMOKE_LAYERS = 30, 2
LIMIT_S = 1800.0
WAYS = {"direct": "0", "vLLM's reload": "1"}


def run(root: Path, name: str, model: Path, reload: str, steps: int) -> tuple[float, float]:
    """Median seconds of a step and of its sync."""
    cfg = trinity_dask.load_config(
        "+experiment=sort_digits",
        "engine=vllm",
        "monitor=quiet",
        f"checkpoint_root_dir={root}",
        f"name={name}",
        f"+cluster.rollout.env.TRINITY_DASK_VLLM_RELOAD='{reload}'",
        "cluster.rollout.n_workers=1",
        f"model.model_path={model}",
    )
    cfg.stages = [cfg.stages[1]]
    stage = cfg.stages[0]
    stage["algorithm"]["repeat_times"] = 4
    stage["algorithm"]["optimizer"]["lr"] = 1e-6
    stage["buffer"].update(batch_size=4, total_steps=steps, operators=[])
    stage["explorer"].update(eval_interval=0, eval_on_startup=False, eval_at_end=False)
    stage["trainer"].update(
        total_steps=steps, save_interval=0, mini_batches=1, min_mini_batch_rows=1
    )
    with Run(cfg) as job:
        job.wait(LIMIT_S)
        frame = load_metrics(job.job_dirs[0])
    rows = frame[frame["role"] == "trainer"].sort_values("step")
    times, syncs = rows["time"].tolist(), rows["time/sync_weight"].dropna().tolist()
    gaps = [b - a for a, b in itertools.pairwise(times[1:])]
    return statistics.median(gaps), statistics.median(syncs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="two layers, three steps, one round")
    flags = parser.parse_args()
    steps, rounds = (3, 1) if flags.smoke else (flags.steps, flags.rounds)
    found = defaultdict[str, list[tuple[float, float]]](list)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = root / "model"
        save_model(model, SMOKE_LAYERS if flags.smoke else LAYERS)
        for number in range(rounds):
            for index, (way, reload) in enumerate(WAYS.items()):
                found[way].append(run(root, f"{number}-{index}", model, reload, steps))
    print("| loading | s/step | s/sync |\n|---|---|---|")
    medians = {
        way: tuple(statistics.median(column) for column in zip(*pairs, strict=True))
        for way, pairs in found.items()
    }
    for way, (step_s, sync_s) in medians.items():
        print(f"| {way} | {step_s:.2f} | {sync_s:.2f} |")
    direct, own = (medians[way][0] for way in WAYS)
    print(f"a step with direct loading takes {direct / own:.2f} of one with vLLM's reload")
    return 0


if __name__ == "__main__":
    sys.exit(main())

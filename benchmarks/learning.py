"""Does the main job learn? Runs ``sort_digits`` for several seeds and engines, end to end.

    python benchmarks/learning.py [--engines vllm torch] [--seeds 1 2 3]

For every run: greedy eval accuracy after stage 1 and at the end of stage 2, sampled reward
at the start and the end of stage 2, wall time. Prints a table, writes
``benchmarks/results/learning.json`` and exits 1 when a run misses what the README claims.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trinity_dask.monitor.history import load_metrics

EVAL = "eval/heldout/reward/mean@1"
REWARD = "rollout/reward/mean"
MINUTES = {"vllm": 6.0, "torch": 3.0}


def run_once(engine: str, seed: int, root: Path, experiment: str) -> dict[str, Any]:
    """One whole job in its own process and directory."""
    command = [
        sys.executable, "-m", "trinity_dask", "run", f"+experiment={experiment}",
        f"engine={engine}", f"seed={seed}", f"checkpoint_root_dir={root}",
        f"name=learning-{engine}-{seed}", "monitor.progress=off",
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    wall_s = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr[-3000:]}")
    return {
        "engine": engine,
        "seed": seed,
        "wall_s": round(wall_s, 1),
        **figures(engine, seed, root),
    }


def figures(engine: str, seed: int, root: Path) -> dict[str, float]:
    """Start and end of stage 2, from the job's own metrics file."""
    stage = next(root.glob(f"**/learning-{engine}-{seed}/grpo"))
    frame = load_metrics(str(stage)).sort_values("step")
    evals = frame.dropna(subset=[EVAL])[["step", EVAL]]
    rewards = frame.dropna(subset=[REWARD])[REWARD]
    return {
        "eval_start": float(evals[EVAL].iloc[0]),
        "eval_end": float(evals[EVAL].iloc[-1]),
        "eval_last_step": int(evals["step"].iloc[-1]),
        "reward_start": float(rewards.iloc[:3].mean()),
        "reward_end": float(rewards.iloc[-3:].mean()),
    }


def misses(row: dict[str, Any]) -> list[str]:
    """What this run failed to reach."""
    checks = {
        "eval after stage 1 <= 0.80": row["eval_start"] <= 0.80,
        "final eval >= 0.95": row["eval_end"] >= 0.95,
        "sampled reward starts <= 0.15": row["reward_start"] <= 0.15,
        "sampled reward ends >= 0.6": row["reward_end"] >= 0.6,
        f"wall <= {MINUTES[row['engine']]} min": row["wall_s"] <= 60 * MINUTES[row["engine"]],
    }
    return [name for name, reached in checks.items() if not reached]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="sort_digits: greedy eval accuracy and sampled reward in stage 2")
    columns = list(rows[0])
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=["vllm", "torch"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    options = parser.parse_args()
    experiment = "sort_digits"
    if options.smoke:
        options.engines, options.seeds, experiment = ["torch"], [1], "sort_digits_tiny"
    rows = []
    with tempfile.TemporaryDirectory(prefix="trinity-learning-") as root:
        for engine in options.engines:
            for seed in options.seeds:
                rows.append(run_once(engine, seed, Path(root), experiment))
                print(json.dumps(rows[-1]), flush=True)
    show(rows)
    if options.smoke:
        return 0
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "learning.json").write_text(json.dumps(rows, indent=1))
    failed = {f"{r['engine']} seed {r['seed']}": misses(r) for r in rows if misses(r)}
    for name, what in failed.items():
        print(f"MISSED {name}: {', '.join(what)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

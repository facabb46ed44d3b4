"""Against TRL's GRPOTrainer: the demo's model, batch and steps, both in one run.

Makes the demo and its warm-up stage once, then trains ``sort_digits`` from that checkpoint
with TRL (in a virtual environment of its own, made on first use in the user's cache
directory) and with trinity-dask. Both do the same work: 64 prompts x 32 samples, four
updates, every group kept, no evaluation in between, and both may use the same number of
cores. TRL takes them as threads of its one process (or one thread, if that is faster in a
short trial); here they are engines and trainer ranks of one thread each, of which only the
engines or the ranks are busy at a time (the synchronizer's style is fixed, interval 1:
strictly on-policy, as TRL is).

    python benchmarks/vs_trl.py [--steps 60] [--seed 1] [--cores 2]

Writes ``benchmarks/results/vs_trl.json``; exits 1 unless ours needs 1.5 times fewer seconds
per step and ends with the same reward within noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import torch

import trinity_dask
from trinity_dask.monitor.history import load_metrics
from trinity_dask.run import Run
from trinity_dask.trainer.checkpoints.checkpoint import latest_hf_export

TRL = "trl>=1.16,<1.17"
FLOOR = 1.5
REWARD_NOISE = 0.05  # mean of the last steps; seeds differ by about this much
LAST = 5
UNTIMED_STEPS = 2
TRIAL_STEPS = 5
TIMEOUT_S = 1800
DEMO = "sort_digits"


def environment() -> Path:
    """The Python of TRL's environment, made when it is not there or of other versions."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "trinity-dask" / "vs_trl"
    python = home / "bin" / "python"
    wanted = f"torch=={torch.__version__.partition('+')[0]} {TRL}"
    marker = home / "INSTALLED"
    if not marker.exists() or marker.read_text() != wanted:
        print(f"installing {wanted} into {home}", flush=True)
        venv.create(home, with_pip=True, clear=True)
        run([str(python), "-m", "pip", "install", "-q", *wanted.split(" ")])
        marker.write_text(wanted)
    return python


def run(command: list[str], threads: int = 1) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
    if done.returncode != 0:
        output = f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        raise SystemExit(f"{' '.join(command)[:300]} exited {done.returncode}:\n{output}")


def job(
    name: str, root: Path, seed: int, stage: int, changes: dict[str, Any], demo: str = DEMO
) -> Path:
    """One stage of the demo as a job of its own; its directory."""
    cfg = trinity_dask.load_config(
        f"+experiment={demo}",
        "engine=torch",
        "monitor=quiet",
        f"seed={seed}",
        f"checkpoint_root_dir={root}",
        f"name={name}",
    )
    cfg.stages = [cfg.stages[stage]]
    for key, value in changes.items():
        _set(cfg, key, value)
    with Run(cfg) as job:
        job.wait(TIMEOUT_S)
        return Path(job.job_dirs[0])


def _set(cfg: Any, key: str, value: Any) -> None:
    """Set ``a.b.0.c`` in dataclasses, lists and dicts."""
    *path, last = key.split(".")
    for name in path:
        cfg = cfg[int(name)] if isinstance(cfg, list) else _child(cfg, name)
    cfg.__setitem__(last, value) if isinstance(cfg, dict) else setattr(cfg, last, value)


def _child(section: Any, name: str) -> Any:
    return section.setdefault(name, {}) if isinstance(section, dict) else getattr(section, name)


def warm_up(root: Path, seed: int, demo: str = DEMO) -> Path:
    """The start of both: the demo's model after its supervised stage."""
    export = latest_hf_export(job("warm-up", root, seed, 0, {}, demo))
    assert export is not None
    return export


def ours(
    root: Path, model: Path, steps: int, seed: int, cores: int, demo: str = DEMO
) -> dict[str, Any]:
    changes = {
        "model.model_path": str(model),
        "cluster.trainer.n_workers": cores,
        "cluster.rollout.n_workers": cores,
        "explorer.eval_on_startup": False,
        "explorer.eval_at_end": False,
        "stages.0.explorer.eval_interval": 0,
        "stages.0.buffer.operators": [],
        "stages.0.buffer.total_steps": steps,
        "stages.0.trainer.total_steps": steps,
        "stages.0.trainer.save_interval": 0,
    }
    frame = load_metrics(job("ours", root, seed, 1, changes, demo))
    rewards = frame[frame["role"] == "explorer"].sort_values("step")["rollout/reward/mean"]
    ends = frame[frame["role"] == "trainer"].sort_values("step")["time"].iloc[UNTIMED_STEPS - 1 :]
    step_s = (ends.iloc[-1] - ends.iloc[0]) / (len(ends) - 1)
    return {"step_s": step_s, "rewards": rewards.dropna().tolist(), "steps": steps}


def theirs(root: Path, model: Path, steps: int, seed: int, cores: int) -> dict[str, Any]:
    """TRL with one thread or with all cores, whichever is faster in a short trial.

    More threads can be slower: they wait for each other by spinning.
    """
    if cores > 1:
        trials = {n: trl(root, model, TRIAL_STEPS, seed, n)["step_s"] for n in (1, cores)}
        print(f"TRL, seconds per step by threads: {trials}", flush=True)
        cores = min(trials, key=lambda n: trials[n])
    return {**trl(root, model, steps, seed, cores), "threads": cores}


def trl(root: Path, model: Path, steps: int, seed: int, threads: int) -> dict[str, Any]:
    python, out = environment(), root / "trl.json"
    rows = root / "demo" / f"sort_digits-seed{seed}" / "train.jsonl"
    arguments = {
        "model": str(model),
        "rows": str(rows),
        "steps": steps,
        "seed": seed,
        "threads": threads,
        "out": str(out),
    }
    side = Path(__file__).parent / "_trl_side.py"
    run([str(python), str(side), json.dumps(arguments)], threads)
    return json.loads(out.read_text())


def summary(side: dict[str, Any]) -> dict[str, float]:
    last = side["rewards"][-LAST:]
    return {
        "seconds_per_step": round(side["step_s"], 3),
        "reward_start": round(side["rewards"][0], 3),
        "reward_end": round(sum(last) / len(last), 3),
    }


def smoke() -> int:
    """Our side of the comparison, on the miniature of the demo."""
    with tempfile.TemporaryDirectory(prefix="trinity-vs-trl-") as directory:
        root, demo = Path(directory), f"{DEMO}_tiny"
        found = ours(root, warm_up(root, 1, demo), 4, 1, 1, demo)
    print(json.dumps({"trinity-dask": summary(found)}, indent=1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--smoke", action="store_true", help="smallest form; judges nothing")
    options = parser.parse_args()
    if options.smoke:  # without TRL, which has an environment of its own
        return smoke()
    environment()
    with tempfile.TemporaryDirectory(prefix="trinity-vs-trl-") as directory:
        root = Path(directory)
        model = warm_up(root, options.seed)
        shape = (options.steps, options.seed, options.cores)
        sides = {"trl": theirs(root, model, *shape), "trinity-dask": ours(root, model, *shape)}
    result: dict[str, Any] = {name: summary(side) for name, side in sides.items()}
    us, trl = result["trinity-dask"], result["trl"]
    ratio = trl["seconds_per_step"] / us["seconds_per_step"]
    result |= {"ratio": round(ratio, 2), "floor": FLOOR, **vars(options)}
    print(json.dumps(result, indent=1))
    path = Path(__file__).parent / "results" / "vs_trl.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    same = us["reward_end"] >= trl["reward_end"] - REWARD_NOISE
    if ratio < FLOOR:
        print(f"MISSED: {ratio:.2f} times fewer seconds per step, {FLOOR} wanted")
    if not same:
        print(f"MISSED: reward {us['reward_end']} at the end, TRL {trl['reward_end']}")
    return 0 if same and ratio >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())

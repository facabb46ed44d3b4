"""Every benchmark runs in its smallest form and prints the table of its full one.

Invariant: speeds are nobody's business here; a script that the package has left behind fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUMBER = r"[\d,]+\.?\d*"
VLLM = {"cpu_loading", "rollout", "weight_sync"}
# what the table must show, line by line
ROWS = {
    "async_modes": [
        rf"\| {style} \| {NUMBER} \| {NUMBER} \|"
        for style in ("fixed", "trainer_driven", "explorer_driven", "fully_async")
    ],
    "cpu_loading": [rf"\| {way} \| {NUMBER} \| {NUMBER} \|" for way in ("direct", "vLLM's reload")],
    "dashboard": [
        *(
            rf"^\| {news}, {page} page \| {NUMBER}%"
            for news in ("news", "no news")
            for page in ["a", "no"]
        ),
        rf"^a step is on the page after {NUMBER} s",
    ],
    "dispatch": [
        *(rf"^ +{runners}( +{NUMBER}){{7}}$" for runners in (1, 4, 16, 128)),
        r"^memory: .*'left_behind': 0",
        r"^killed worker: .*'runs': 32",
    ],
    "elastic": [
        rf"\| first, alone \| {NUMBER} s",
        rf"\| joins \| {NUMBER} s \| {NUMBER} s",
        rf"\| replaces a killed one \| {NUMBER} s \| {NUMBER} s",
    ],
    "learning": [r'^{"engine": "torch", "seed": 1, .*"eval_end": \d', "sort_digits: greedy eval"],
    "long_run": [rf"^\| \d+ \| {NUMBER} \| {NUMBER} \|", rf"at the start: {NUMBER}"],
    "rewards": [
        *(rf"^{name} +{NUMBER}%( +{NUMBER}){{3}}$" for name in ("accuracy_reward", "math-verify"))
    ],
    "rollout": [r"│ +1 │" + rf" +{NUMBER} │" * 3, rf"ratio of the medians: {NUMBER}"],
    "sharded_load": [
        rf"\| 2 \| {phase}( \| {NUMBER}){{4}} \|"
        for phase in ("load", "frozen", "save", "resume", "gather")
    ],
    "slurm": [
        *(rf"^\| {cluster} \| {NUMBER} s \| {NUMBER} s" for cluster in ("local", "slurm")),
        *(rf"^\| {w}-0( \| {NUMBER} s){{3}} \|" for w in ("rollout", "trainer", "control")),
        rf"^a step in Slurm takes {NUMBER} of a local one",
        rf"^started again: the next train step after {NUMBER} s",
    ],
    "startup": [rf"^ +{NUMBER} s ", rf"^median {NUMBER} s"],
    "store": [rf"^{name} +{NUMBER} +{NUMBER}" for name in ("none", "lz4", "zstd")],
    "taskset": [
        rf"^{suffix} +{order}( +{NUMBER}){{4}}$"
        for suffix in ("jsonl", r"jsonl\.gz", "csv", "parquet", "arrow")
        for order in ("sequential", "shuffle")
    ],
    "train_step": [
        *(rf"^{shape} +\d+ +{NUMBER} +{NUMBER}" for shape in ("sft", "grpo")),
        *(rf"{side} +{NUMBER} s/step" for side in ("bare", "trainer")),
        "same losses True",
    ],
    "utilisation": [rf"^ +64 +64 +2( +{NUMBER}){{3}}$", rf"^ +64( +{NUMBER}){{3}}$"],
    "viewer": [
        *(rf"\| {what}, ms( \| {NUMBER}){{3}} \|" for what in ("jump", "row opened", "loop")),
        rf"\| memory_mb \| {NUMBER}",
        rf"\| search_s \| {NUMBER}",
    ],
    "vs_trl": [rf'"seconds_per_step": {NUMBER}', rf'"reward_end": {NUMBER}'],
    "weight_sync": [
        *(rf"\| 1 \| {way} \| {NUMBER} \|" for way in ("broadcast", "nccl", "packing")),
        *(rf"\| 1 \| {way} \| {NUMBER} \|" for way in ("copy", "memory", "checkpoint")),
        "nccl, 1 engine: ",
    ],
}


def test_no_benchmark_is_left_out() -> None:
    """What starts with an underscore is a part of another script."""
    assert {path.stem for path in BENCHMARKS.glob("[a-z]*.py")} == ROWS.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.vllm] if name in VLLM else []) for name in ROWS],
)
def test_its_smallest_form_prints_its_table(name: str) -> None:
    if name in VLLM:
        pytest.importorskip("vllm")
    results = BENCHMARKS / "results" / f"{name}.json"
    before = results.stat().st_mtime_ns if results.exists() else None
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--smoke"],
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    for row in ROWS[name]:
        assert re.search(row, done.stdout, re.MULTILINE), f"no {row!r} in:\n{done.stdout}"
    assert (results.stat().st_mtime_ns if results.exists() else None) == before

"""The main job learns: the whole recipe with the torch engine, one seed, from start to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity_dask.monitor.history import load_metrics

EVAL = "eval/heldout/reward/mean@1"
REWARD = "rollout/reward/mean"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sort_digits_reaches_95_percent(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "trinity_dask", "run", "+experiment=sort_digits", "engine=torch",
        f"checkpoint_root_dir={tmp_path}", "name=job", "monitor.progress=off",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    frame = load_metrics(tmp_path / "trinity-dask" / "job" / "grpo")
    evals = frame.dropna(subset=[EVAL]).set_index("step")[EVAL]
    assert evals[0] <= 0.80
    # single evaluations dip; thirty steps later it must be better, and at the end good
    assert evals[30] > evals[0]
    assert evals.iloc[-1] >= 0.95
    sampled = frame.dropna(subset=[REWARD])[REWARD]
    assert sampled.iloc[0] <= 0.15
    assert sampled.iloc[-3:].mean() >= 0.6
    trained = frame[frame["role"] == "trainer"]
    # sampler and trainer agree on what was sampled while the weights are the same
    assert (trained["correction/gap"].dropna() < 1e-4).all()

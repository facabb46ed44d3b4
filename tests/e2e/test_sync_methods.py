"""Weights reach the engines by every method, to two engines, and a mismatch stops the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_refusals import run

from trinity_dask.monitor.history import load_metrics


@pytest.mark.parametrize("method", ["nccl", "memory", "checkpoint"])
def test_two_engines_follow_the_trainer(tmp_path: Path, method: str) -> None:
    done = run(tmp_path, f"synchronizer={method}", "cluster.rollout.n_workers=2", "name=job")
    assert done.returncode == 0, done.stderr[-2000:]
    frame = load_metrics(tmp_path / "trinity-dask" / "job" / "grpo")
    synced = frame.dropna(subset=["sync/bytes"])
    assert list(synced["explorer/model_version"]) == [1.0, 2.0, 3.0, 4.0]
    assert (synced["sync/probe_max_abs_diff"] < 1e-5).all()
    left = [*tmp_path.rglob("weights-*.safetensors"), *Path("/dev/shm").glob("trinity-dask-*job*")]
    assert left == []


def test_engines_that_differ_from_the_trainer_stop_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "synchronizer.probe_tolerance=1e-12", "name=job")
    assert done.returncode == 1
    assert "engine-0 and the trainer differ" in done.stderr

"""Weights reach the engines by every method, to two engines, and a mismatch stops the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_jobs import STEPS, WAIT_S, SmallJobs

from trinity_dask.monitor.history import load_metrics
from trinity_dask.run import RunFailed


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("nccl", []),
        ("memory", []),
        ("checkpoint", ["synchronizer.path={root}/elsewhere"]),
        ("memory", ["model.lora.rank=4"]),  # the adapter alone, and the same proofs
    ],
)
def test_two_engines_follow_the_trainer(jobs: SmallJobs, method: str, more: list[str]) -> None:
    keys = [key.format(root=jobs.root) for key in more]
    run = jobs.finish(f"synchronizer={method}", "cluster.rollout.n_workers=2", *keys)
    run.close()
    frame = load_metrics(jobs.dir())
    synced = frame.dropna(subset=["sync/bytes"])
    versions = [float(step) for step in range(1, STEPS + 1)]
    assert list(synced["explorer/model_version"]) == versions
    assert (synced["sync/probe_max_abs_diff"] < 1e-5).all()
    assert (synced["sync/floor_share"] > 0).all()
    shared = Path("/dev/shm").glob(f"trinity-dask-*{run.run_id}*")
    assert [*jobs.root.rglob("weights-*.safetensors"), *shared] == []


def test_engines_that_differ_from_the_trainer_stop_the_run(jobs: SmallJobs) -> None:
    run = jobs.start("synchronizer.probe_tolerance=1e-12")
    with pytest.raises(RunFailed, match="engine-0 and the trainer differ"):
        run.wait(timeout=WAIT_S)

"""Modes ``colocate`` and ``bench`` over one small job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from distributed import Client
from small_jobs import in_process, miniature, run_words

from trinity_dask import Run, load_config
from trinity_dask.monitor.history import load_metrics

NAME = "name=job"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job of 60 supervised steps and 4 GRPO steps, trained colocated."""
    root = tmp_path_factory.mktemp("modes")
    words = ("stages.1.mode=colocate", "trainer.max_checkpoints_to_keep=0")
    done = run_words(*miniature(root, NAME, *words))
    assert done.returncode == 0, done.stderr[-2000:]
    return root / "trinity-dask" / "job"


def run_on(client: Client, root: Path, *words: str) -> None:
    with Run(load_config(*miniature(root, NAME, *words)), client) as run:
        assert run.wait(timeout=280)["state"] == "done"


def contents(job: Path) -> dict[str, bytes]:
    """What belongs to the job itself, not to logs, metrics or a benchmark."""
    skip = ("log/", "monitor/", "benchmark_", ".benchmark.bench", "bench.lock")
    names = {str(p.relative_to(job)): p for p in job.rglob("*") if p.is_file()}
    return {n: p.read_bytes() for n, p in names.items() if not any(s in n for s in skip)}


def results(job: Path, stage: str) -> dict[str, dict[str, float]]:
    return json.loads((job / stage / "benchmark_meta.json").read_text())["results"]


def test_colocate_trains_over_shared_memory(job: Path) -> None:
    config = (job / "grpo" / "config.yaml").read_text()
    assert "sync_method: memory" in config
    assert "gpu_memory_utilization: 0.25" in config
    frame = load_metrics(job / "grpo")
    assert frame["explorer/model_version"].max() == 4.0


@pytest.mark.timeout(600)
def test_bench_evaluates_every_checkpoint_and_changes_nothing(
    job: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(job)
    address = client.scheduler.address
    there = ("cluster=address", f"cluster.address={address}")
    code, out, err = in_process(capsys, *miniature(job.parents[1], NAME, "mode=bench", *there))
    assert code == 0, err[-2000:]
    assert contents(job) == before
    assert list(results(job, "sft")) == ["0", "60"]
    assert list(results(job, "grpo")) == ["0", "2", "4"]
    frame = load_metrics(job / "grpo")
    logged = frame[frame["role"] == "benchmark"].set_index("step")["bench/heldout/reward/mean@1"]
    evals = frame.dropna(subset=["eval/heldout/reward/mean@1"]).set_index("step")
    # the same weights on the same greedy tasks: what the run itself had found
    assert list(logged) == list(evals["eval/heldout/reward/mean@1"])
    assert "heldout/reward/mean@1" in out
    _a_killed_benchmark_goes_on(job, client)


def _a_killed_benchmark_goes_on(job: Path, client: Client) -> None:
    whole = results(job, "grpo")
    path = job / "grpo" / "benchmark_meta.json"
    meta = json.loads(path.read_text())
    del meta["results"]["4"]
    path.write_text(json.dumps(meta))
    run_on(client, job.parents[1], "mode=bench")
    found = results(job, "grpo")
    assert scores(found) == scores(whole)
    assert found["2"] == whole["2"]  # times included: it was not measured again
    assert found["4"] != whole["4"]


def scores(found: dict[str, dict[str, float]]) -> dict[str, float]:
    return {step: metrics["bench/heldout/reward/mean@1"] for step, metrics in found.items()}


def test_a_benchmark_of_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = in_process(capsys, *miniature(tmp_path, "name=never", "mode=bench"))
    assert code == 2
    assert "mode=bench evaluates the checkpoints of a job" in err
    assert not (tmp_path / "trinity-dask" / "never").exists()

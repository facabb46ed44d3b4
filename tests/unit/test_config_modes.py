"""Modes: what each one derives, needs and refuses, and which checkpoints a benchmark takes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from trinity_dask import load_config
from trinity_dask.config import Config, ConfigError, split_stages
from trinity_dask.explorer.evaluation import Benchmark
from trinity_dask.trainer.checkpoints.checkpoint import (
    complete_checkpoints,
    is_complete,
    write_checkpoint,
)

JOB = ("+experiment=sort_digits_tiny", "engine=torch")
ONE = ("+experiment=sort_task", "engine=torch", "algorithm.repeat_times=4")
AWAY = ("cluster=address", "cluster.address=tcp://127.0.0.1:8786")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([*JOB, "stages.1.mode=serve"], "mode=serve is not there yet"),
        ([*JOB, "stages.1.mode=colocate", "cluster.rollout.n_workers=2"], "shares one device"),
        ([*ONE, *AWAY, "mode=train", "rerun_finished=true"], "finds the other side by the run's"),
        ([*ONE, "mode=bench", "buffer.explorer_input.eval_tasksets=[]"], "evaluates checkpoints"),
    ],
)
def test_what_a_mode_cannot_do_is_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(*overrides, f"checkpoint_root_dir={tmp_path}")


def load(tmp_path: Path, *overrides: str) -> Config:
    return load_config(*overrides, f"checkpoint_root_dir={tmp_path}")


def test_colocate_syncs_over_memory_and_leaves_room_on_the_device(tmp_path: Path) -> None:
    stage = split_stages(load(tmp_path, *JOB, "stages.1.mode=colocate"))[1]
    assert stage.synchronizer.sync_method == "memory"
    assert stage.explorer.rollout_model.gpu_memory_utilization == 0.25
    assert split_stages(load(tmp_path, *JOB))[1].synchronizer.sync_method == "nccl"


def test_bench_is_for_all_stages(tmp_path: Path) -> None:
    stages = split_stages(load(tmp_path, *JOB, "mode=bench"))
    assert [stage.mode for stage in stages] == ["bench", "bench"]


def test_only_runs_on_a_shared_scheduler_wait_for_the_other_side(tmp_path: Path) -> None:
    def waits_s(*overrides: str) -> Any:
        return load(tmp_path, *ONE, *overrides).synchronizer.peer_timeout_s

    assert waits_s("mode=explore") == waits_s(*AWAY, "mode=both") == 0.0
    assert waits_s(*AWAY, "mode=explore") == waits_s(*AWAY, "mode=train") == 600.0
    assert waits_s(*AWAY, "mode=train", "synchronizer.peer_timeout_s=5") == 5.0


@pytest.mark.parametrize(
    ("startup", "latest", "steps"),
    [(True, False, [0, 2, 10]), (False, False, [2, 10]), (True, True, [10])],
)
def test_a_benchmark_takes_complete_checkpoints_in_order(
    tmp_path: Path, startup: bool, latest: bool, steps: list[int]
) -> None:
    for step in (10, 2):
        write_checkpoint(tmp_path, step, {"step": step}, lambda path: None)
    (tmp_path / "global_step_20").mkdir()  # a save that was cut off
    cfg = Config(mode="bench", job_dir=str(tmp_path))
    cfg.explorer.eval_on_startup, cfg.explorer.bench_on_latest_checkpoint = startup, latest
    benchmark = Benchmark(cfg, None, None)  # type: ignore[arg-type]  # nothing is evaluated here
    assert [step for step, _ in benchmark.targets()] == steps


def test_a_benchmark_keeps_what_it_reads_and_leaves_out_what_went_before(tmp_path: Path) -> None:
    """A live run saves two checkpoints, and keeps one, while the first of two is evaluated."""

    def save(step: int, keep: int) -> None:
        write_checkpoint(tmp_path, step, {}, lambda path: None, keep=keep)

    class Live:
        """What the benchmark needs of engines and evaluations."""

        async def load(self, step: int, checkpoint: Path) -> None:
            if step == 2:
                save(11, 1)
                save(12, 1)
            assert is_complete(checkpoint)

        async def start(self, step: int, version: int) -> None:
            pass

        async def wait(self) -> list[Any]:
            return [{"error": None, "metrics": {"bench/x": 1.0}}]

    async def benched() -> list[int]:
        live: Any = Live()
        return [step async for step in Benchmark(cfg, live, live).run()]

    save(2, 0)
    save(10, 0)
    cfg = Config(mode="bench", job_dir=str(tmp_path))
    cfg.explorer.eval_on_startup = False
    assert asyncio.run(benched()) == [2, 12]
    save(13, 1)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["global_step_13"]

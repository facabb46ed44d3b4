"""Over-rollout, the in-flight window, refills, learned selection, and resuming in all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from explorer_parts import Parts, explore, make_config, records, run, start_cluster, task_order
from scheduler_stand import tasks_done

from trinity_dask.buffer.errors import StoreError
from trinity_dask.config.schema import Config, OperatorConfig
from trinity_dask.explorer.batches import RolloutState
from trinity_dask.explorer.coordinator import BatchAborted

UNEVEN = f"{Path(__file__).with_name('explorer_workflows.py')}:Uneven"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster.scheduler_address


def quiet(cfg: Config) -> Config:
    """Without evaluations."""
    cfg.explorer.eval_on_startup = cfg.explorer.eval_at_end = False
    cfg.explorer.eval_interval = 0
    return cfg


def test_over_rollout_goes_on_without_the_slowest_and_keeps_its_finished_runs(
    address: str, tmp_path: Path
) -> None:
    rows = [{"prompt": "a"}, {"prompt": "slow", "sleep_s": 600.0}]
    cfg = quiet(make_config(tmp_path, rows=rows))
    cfg.explorer.over_rollout.ratio = 0.5
    cfg.explorer.over_rollout.wait_after_min_s = 0.2
    (manifest,) = run(address, cfg, explore)
    accounts = manifest.meta["accounts"]
    assert (accounts["scheduled"], accounts["succeeded"], accounts["cancelled"]) == (8, 4, 4)
    assert manifest.rows == 4


def test_the_window_bounds_what_is_submitted_and_not_committed(
    address: str, tmp_path: Path
) -> None:
    cfg = quiet(make_config(tmp_path, rows=[{"prompt": "a", "sleep_s": 0.2}] * 12))
    cfg.explorer.max_inflight_batches = 3

    async def body(parts: Parts) -> list[int]:
        seen = []
        for _ in range(6):
            await parts.explorer.explore_step()
            seen.append(len(parts.explorer._in_flight.tasks))
        await parts.explorer.finish_current_steps()
        return seen

    seen = run(address, cfg, body)
    assert seen[:3] == [1, 2, 3]
    assert max(seen) == 3


def refilling(job: Path, n_rows: int = 12) -> Config:
    """Every other task has equal rewards, so that its group is dropped."""
    rows = [{"prompt": f"p{i}", "equal": i % 2 == 0} for i in range(n_rows)]
    cfg = quiet(make_config(job, rows=rows))
    cfg.buffer.explorer_input.taskset.workflow = UNEVEN
    cfg.buffer.operators = [OperatorConfig("dapo_dynamic_sampling")]
    cfg.buffer.max_refill_batches = 3
    cfg.buffer.total_steps = 3
    return cfg


def test_fault_38_a_thinned_batch_is_refilled_and_the_schedule_counts_steps(
    address: str, tmp_path: Path
) -> None:
    cfg = refilling(tmp_path)
    manifests = run(address, cfg, explore)
    assert [m.batch_id for m in manifests] == [1, 2, 3]
    for manifest in manifests:
        # two groups of four are wanted; half of all groups are dropped
        assert manifest.rows == 8
        assert manifest.meta["metrics"]["rollout/refill_batches"] == 1.0
        accounts = manifest.meta["accounts"]
        assert accounts["scheduled"] == accounts["produced"] == 16
        assert accounts["filtered"] == 8


def test_a_refill_is_bounded_and_ends_with_what_there_is(address: str, tmp_path: Path) -> None:
    cfg = refilling(tmp_path)
    job = tmp_path / "equal"
    rows = [{"prompt": f"p{i}", "equal": True} for i in range(4)]
    equal = quiet(make_config(job, rows=rows))
    equal.buffer.explorer_input.taskset.workflow = UNEVEN
    equal.buffer.operators, equal.buffer.max_refill_batches = cfg.buffer.operators, 2
    equal.buffer.total_steps = 1
    (manifest,) = run(address, equal, explore)
    assert manifest.rows == 0
    assert manifest.meta["metrics"]["rollout/refill_batches"] == 2.0
    assert manifest.meta["accounts"]["filtered"] == 24


@pytest.mark.parametrize("stop_after", [1, 2])
def test_fault_35_with_refills_a_resumed_run_reads_the_same_tasks(
    address: str, tmp_path: Path, stop_after: int
) -> None:
    async def whole(parts: Parts) -> list[list[int]]:
        await parts.explorer.explore()
        return task_order(parts)

    async def cut_off(parts: Parts) -> None:
        """Ends right after a commit, while the next batch is in flight."""
        for _ in range(stop_after + 1):
            await parts.explorer.explore_step()
        while len(await parts.buffer.manifests()) < stop_after:
            await asyncio.sleep(0.02)
        await parts.explorer.stop()
        await parts.explorer._drop_in_flight()

    expected = run(address, refilling(tmp_path / "whole"), whole)
    run(address, refilling(tmp_path / "parts"), cut_off)
    found = run(address, refilling(tmp_path / "parts"), whole)
    assert [sorted(batch) for batch in found] == [sorted(batch) for batch in expected]


def test_fault_37_a_resumed_run_generates_nothing_again(address: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    rows = [{"prompt": f"p{i}", "notes": str(notes)} for i in range(8)]

    async def two_steps(parts: Parts) -> None:
        for _ in range(2):
            await parts.explorer.explore_step()
        await parts.explorer.finish_current_steps()

    run(address, quiet(make_config(tmp_path, rows=rows)), two_steps)
    first = {path.name for path in notes.iterdir()}
    for path in notes.iterdir():
        path.unlink()
    run(address, quiet(make_config(tmp_path, rows=rows)), explore)
    second = {path.name for path in notes.iterdir()}
    assert {name.split("-")[1] for name in first} == {"1", "2"}
    assert {name.split("-")[1] for name in second} == {"3", "4"}


def test_a_finalisation_that_timed_out_can_be_repeated_and_loses_nothing(
    address: str, tmp_path: Path
) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "sleep_s": 4.0}]

    async def body(parts: Parts) -> dict[str, Any]:
        tasks = await parts.explorer.stream.read(1)
        await parts.coordinator.submit_batch(1, tasks or [], "train")
        await tasks_done(parts.coordinator.scheduler, 1, 1)
        with pytest.raises(TimeoutError, match="1 of 2 tasks finished"):
            await parts.coordinator.finalize_batch(1, "train", timeout=0.2)
        return await parts.coordinator.finalize_batch(1, "train")

    result = run(address, quiet(make_config(tmp_path, rows=rows)), body)
    assert result["finished_task_count"] == 2
    assert result["accounts"]["succeeded"] == result["accounts"]["committed"] == 8


def test_a_commit_that_failed_is_repeated_without_another_rollout(
    address: str, tmp_path: Path
) -> None:
    async def body(parts: Parts) -> dict[str, Any]:
        tasks = await parts.explorer.stream.read(1)
        coordinator = parts.coordinator
        await coordinator.submit_batch(1, tasks or [], "train")
        data = tmp_path / "store" / "data"
        data.parent.mkdir(exist_ok=True)
        data.write_text("no directory")  # nothing can be written below a file
        with pytest.raises(StoreError, match="is not committed"):
            await coordinator.finalize_batch(1, "train")
        assert coordinator._batches[1].state is RolloutState.FINALIZING
        data.unlink()
        result = await coordinator.finalize_batch(1, "train")
        assert (await coordinator.stats())["runs"]["scheduled"] == 8
        return result

    assert run(address, quiet(make_config(tmp_path)), body)["accounts"]["committed"] == 8


def test_abort_can_keep_what_was_finished(address: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    rows = [
        {"prompt": "a", "notes": str(notes)},
        {"prompt": "b", "sleep_s": 600.0, "notes": str(notes)},
    ]

    async def body(parts: Parts) -> None:
        tasks = await parts.explorer.stream.read(1)
        await parts.coordinator.submit_batch(1, tasks or [], "train")
        while not (notes / "ended-1-0").exists() or not (notes / "started-1-1").exists():
            await asyncio.sleep(0.02)
        while len(parts.coordinator.scheduler.state.running) > 1:
            await asyncio.sleep(0.02)
        kept = await parts.coordinator.abort_batch(1, "a test", keep_partial_results=True)
        assert kept is not None
        assert (kept.counts.succeeded, kept.counts.cancelled) == (4, 4)
        metrics = parts.coordinator.pipeline.process(kept.payloads)[1]
        assert metrics["experience_pipeline/experience_count"] == 4.0
        assert await parts.coordinator.abort_batch(1, "again") is None
        with pytest.raises(KeyError):
            await parts.coordinator.finalize_batch(1, "train")

    run(address, quiet(make_config(tmp_path, rows=rows)), body)


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_a_batch_that_is_aborted_while_it_is_finalised_is_not_committed_empty(
    address: str, tmp_path: Path, how: str
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    rows = [{"prompt": "a", "sleep_s": 600.0, "notes": str(notes)}] * 2

    async def body(parts: Parts) -> None:
        tasks = await parts.explorer.stream.read(1)
        await parts.coordinator.submit_batch(1, tasks or [], "train")
        finalising = asyncio.ensure_future(parts.coordinator.finalize_batch(1, "train"))
        while not (notes / "started-1-0").exists():
            await asyncio.sleep(0.02)
        if how == "abort":
            await parts.coordinator.abort_batch(1, "a test")
        else:
            await parts.coordinator.shutdown()
        with pytest.raises(BatchAborted, match="aborted while"):
            await asyncio.wait_for(finalising, 30.0)
        assert await parts.buffer.manifests() == []

    run(address, quiet(make_config(tmp_path, rows=rows)), body)


def test_fault_07_a_batch_with_a_rejected_sample_still_progresses(
    address: str, tmp_path: Path
) -> None:
    rows = [{"prompt": "bad", "raise": True}, {"prompt": "good"}] * 2
    cfg = quiet(make_config(tmp_path, rows=rows))
    cfg.explorer.max_inflight_batches = 1
    manifests = run(address, cfg, explore)
    assert [m.meta["accounts"]["succeeded"] for m in manifests] == [4, 4]


@pytest.mark.parametrize(("n_rows", "batches"), [(5, 2), (7, 3)])
def test_fault_09_rows_that_make_no_whole_batch_end_the_epoch(
    address: str, tmp_path: Path, n_rows: int, batches: int
) -> None:
    manifests = run(address, quiet(make_config(tmp_path, n_rows=n_rows)), explore)
    assert [m.batch_id for m in manifests] == list(range(1, batches + 1))
    assert {m.rows for m in manifests} == {8}


def test_fault_42_raw_and_committed_rewards_are_both_logged(address: str, tmp_path: Path) -> None:
    cfg = refilling(tmp_path)
    cfg.buffer.max_refill_batches = 0
    run(address, cfg, explore)
    first = next(r for r in records(cfg) if r["step"] == 1 and "rollout/reward/mean" in r)
    # of what was sampled, before the operator dropped the group of equal rewards
    assert first["rollout/reward/mean"] == 0.75
    assert first["experience_pipeline/experience_count"] == 4.0


def test_without_a_trainer_or_engines_there_is_nothing_to_sync_or_to_benchmark(
    address: str, tmp_path: Path
) -> None:
    async def body(parts: Parts) -> None:
        explorer = parts.explorer
        assert not await explorer.need_sync()
        assert await explorer.sync_weight() == -1
        with pytest.raises(RuntimeError, match="made without engines"):
            await explorer.benchmark()
        await explorer.stop()
        assert explorer.stopped

    run(address, quiet(make_config(tmp_path)), body)

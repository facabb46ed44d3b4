"""The explorer over real workers, a real buffer and a real monitor, without a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from explorer_parts import (
    Parts,
    explore,
    make_config,
    records,
    run,
    start_cluster,
    task_order,
)

from trinity_dask.buffer.errors import DataError
from trinity_dask.config.schema import Config
from trinity_dask.explorer.coordinator import BatchFailed


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with start_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster.scheduler_address


async def second_batch_runs(parts: Parts, notes: Path) -> None:
    """Until batch 1 is committed and the tasks of batch 2 have begun."""
    while not await parts.buffer.manifests() or not (notes / "started-2-1").exists():
        await asyncio.sleep(0.05)


def test_every_batch_is_committed_with_its_accounts_and_its_position(
    address: str, tmp_path: Path
) -> None:
    cfg = make_config(tmp_path)
    manifests = run(address, cfg, explore)
    assert [m.batch_id for m in manifests] == [1, 2, 3, 4]
    for step, manifest in enumerate(manifests, 1):
        assert manifest.meta["accounts"] == {
            "scheduled": 8,
            "succeeded": 8,
            "failed": 0,
            "cancelled": 0,
            "produced": 8,
            "committed": 8,
            "filtered": 0,
        }
        assert manifest.rows == 8
        assert manifest.meta["taskset_state"]["steps"] == step
    steps = [r["step"] for r in records(cfg) if "rollout/reward/mean" in r]
    assert steps == [1, 2, 3, 4]


def test_evals_run_at_the_start_by_interval_and_at_the_end(address: str, tmp_path: Path) -> None:
    cfg = make_config(tmp_path, n_rows=6)
    run(address, cfg, explore)
    evals = [r for r in records(cfg) if "eval/held_out/finished_task_count" in r]
    assert sorted(r["step"] for r in evals) == [0, 2, 3]  # the first may end after the second
    for record in evals:
        assert record["eval/held_out/finished_task_count"] == 3
        assert record["eval/held_out/reward/mean@1"] == 0.0
        assert "eval/held_out/time/run_execution" in record


def test_status_shows_step_reward_and_eval(address: str, tmp_path: Path) -> None:
    async def body(parts: Parts) -> dict[str, Any]:
        await parts.explorer.explore()
        return {**parts.explorer.status(), **parts.coordinator.status()}

    status = run(address, make_config(tmp_path, n_rows=2), body)
    assert status["explorer_step"] == 1
    assert status["reward"] == 1.5
    assert status["eval"] == {"held_out": 0.0}
    assert (status["in_flight"], status["failures"]) == (0, {})


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_fault_35_a_resumed_run_reads_the_tasks_of_an_uninterrupted_one(
    address: str, tmp_path: Path, stop_after: int
) -> None:
    def config(name: str) -> Config:
        cfg = make_config(tmp_path / name, n_rows=4)  # an epoch ends after step 2
        cfg.buffer.total_epochs = 2
        cfg.buffer.explorer_input.taskset.data_selector.selector_type = "shuffle"
        cfg.explorer.eval_on_startup = cfg.explorer.eval_at_end = False
        return cfg

    async def whole(parts: Parts) -> list[list[int]]:
        await parts.explorer.explore()
        return task_order(parts)

    async def some(parts: Parts) -> None:
        for _ in range(stop_after):
            await parts.explorer.explore_step()
        await parts.explorer.finish_current_steps()

    expected = run(address, config("whole"), whole)
    assert len(expected) == 4
    run(address, config("parts"), some)
    assert run(address, config("parts"), whole) == expected


def test_a_batch_without_one_success_ends_the_run_with_the_first_error(
    address: str, tmp_path: Path
) -> None:
    rows = [{"prompt": "a"}] * 2 + [{"prompt": "b", "raise": True}] * 2
    cfg = make_config(tmp_path, rows=rows)
    with pytest.raises(BatchFailed, match="RuntimeError: this task raises"):
        run(address, cfg, explore)

    async def committed(parts: Parts) -> list[int]:
        return [m.batch_id for m in await parts.buffer.manifests()]

    assert run(address, cfg, committed) == [1]


def test_fault_03_failed_runs_are_in_the_accounts(address: str, tmp_path: Path) -> None:
    cfg = make_config(tmp_path, rows=[{"prompt": "a"}, {"prompt": "b", "raise": True}])
    (manifest,) = run(address, cfg, explore)
    accounts = manifest.meta["accounts"]
    assert (accounts["scheduled"], accounts["succeeded"], accounts["failed"]) == (8, 4, 4)
    assert accounts["produced"] == accounts["committed"] == 4


def test_stop_drops_the_batch_in_flight_and_a_resumed_run_makes_it_again(
    address: str, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    rows = [{"prompt": "a"}] * 2 + [{"prompt": "b", "sleep_s": 600, "notes": str(notes)}] * 2
    cfg = make_config(tmp_path, rows=rows)

    async def stopped(parts: Parts) -> None:
        exploring = asyncio.ensure_future(parts.explorer.explore())
        await second_batch_runs(parts, notes)
        await parts.explorer.stop()
        await exploring
        assert parts.explorer.step == 1
        assert not parts.coordinator.scheduler.state.running

    run(address, cfg, stopped)
    make_config(tmp_path, rows=[{"prompt": "a"}] * 4)  # nobody waits ten minutes again
    with pytest.raises(DataError, match=r"is not what it was .*4 other rows"):
        run(address, cfg, explore)
    cfg.buffer.accept_other_data = True
    assert [m.batch_id for m in run(address, cfg, explore)] == [1, 2]


def test_fault_04_finish_ends_with_the_final_eval(address: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    slow = {"prompt": "b", "sleep_s": 600, "notes": str(notes)}
    cfg = make_config(tmp_path, rows=[{"prompt": "a"}] * 2 + [slow] * 2)
    cfg.explorer.eval_interval = 0
    cfg.explorer.eval_on_startup = False

    async def finished(parts: Parts) -> None:
        exploring = asyncio.ensure_future(parts.explorer.explore())
        await second_batch_runs(parts, notes)
        await parts.explorer.finish()
        await exploring

    run(address, cfg, finished)
    assert [r["step"] for r in records(cfg) if "eval/held_out/finished_task_count" in r] == [1]


def test_a_batch_is_finalised_once_and_by_its_own_kind(address: str, tmp_path: Path) -> None:
    async def body(parts: Parts) -> None:
        coordinator = parts.coordinator
        assert parts.explorer._reader is not None
        tasks = parts.explorer._reader.read() or []
        await coordinator.submit_batch(1, tasks, "train")
        with pytest.raises(ValueError, match="active already"):
            await coordinator.submit_batch(1, tasks, "train")
        with pytest.raises(ValueError, match="is a train batch"):
            await coordinator.finalize_batch(1, "eval")
        one, two = await asyncio.gather(
            coordinator.finalize_batch(1, "train"), coordinator.finalize_batch(1, "train")
        )
        assert one is two
        with pytest.raises(KeyError):
            await coordinator.finalize_batch(1, "train")
        await coordinator.submit_batch("1/x", tasks, "eval")
        await coordinator.abort_batch("1/x", "a test")
        await coordinator.abort_batch("1/x", "again")
        stats = await coordinator.stats()
        assert stats["runs"]["succeeded"] == 8

    run(address, make_config(tmp_path), body)

"""How many sub-tasks a stage lets run at a time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Optional

import pytest

from trinity_dask.cluster.slots import slot_of
from trinity_dask.cluster.specs import needed_workers, worker_options
from trinity_dask.config.schema import Config, GroupConfig
from trinity_dask.explorer.schedule.scheduler import Scheduler
from trinity_dask.explorer.schedule.state import SchedulerState
from trinity_dask.explorer.schedule.tasks import Counts
from trinity_dask.launcher.specs import engine_specs, joining_spec
from trinity_dask.launcher.stages import StageRunner
from trinity_dask.workflows import Task


class Started(Exception):
    """The scheduler is made; there is no cluster to start it in."""


@pytest.mark.parametrize(("runners", "busy"), [(0, 2), (1, 5), (2, 6)])
def test_the_lanes_of_runner_workers_come_on_top_of_those_of_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runners: int, busy: int
) -> None:
    found: list[SchedulerState] = []

    async def start(self: Scheduler) -> None:
        found.append(self.state)
        raise Started

    monkeypatch.setattr(Scheduler, "start", start)
    cfg = Config(mode="bench", checkpoint_root_dir=str(tmp_path))
    cfg.cluster.rollout = GroupConfig(n_workers=1, nthreads=2)
    cfg.cluster.runner = GroupConfig(n_workers=runners, nthreads=3)
    board: Optional[Any] = None

    async def main() -> None:
        stage = StageRunner(cfg, board, "run")
        async with AsyncExitStack() as stack:
            stage._make_engines(stack)
            await stage._make_explorer(stack, "explorer")

    with pytest.raises(Started):
        asyncio.run(main())
    (state,) = found
    for group, count in needed_workers(cfg).items():  # the workers that such a cluster has
        for index in range(count if group != "control" else 0):
            resources = worker_options(cfg, group, index, str(tmp_path))["resources"]
            state.worker_up(slot_of(group, index), int(resources[group]), 0.0, group)
    state.schedule(1, [Task("beside") for _ in range(4)], 0.0, lambda task: "rollout")
    state.schedule(2, [Task("blocking") for _ in range(4)], 0.0, lambda task: "runner")
    assert state.busy == busy
    assert state.batches[1].counts == Counts(scheduled=4)


def test_in_a_shared_cluster_only_a_run_s_own_slots_join_it() -> None:
    cfg = Config()
    cfg.synchronizer.in_flight, cfg.synchronizer.in_flight_timeout_s = "abort", 9.0
    assert [spec.slot for spec in engine_specs(cfg)] == ["engine-0"]
    joined = joining_spec(cfg, "engine-7")
    assert joined is not None
    assert (joined.slot, joined.in_flight, joined.in_flight_timeout_s) == ("engine-7", "abort", 9.0)
    cfg.cluster.rollout = GroupConfig(n_workers=2, first_index=4)
    slots = ("engine-3", "engine-4", "engine-5", "engine-6")
    assert [joining_spec(cfg, slot) is not None for slot in slots] == [False, True, True, False]

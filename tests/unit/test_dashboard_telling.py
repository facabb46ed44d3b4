"""From the parts of a stage to what is told of it, and how it gets into a scheduler."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin

from trinity_dask.aio import TOLD_S
from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.config.schema import Config, ExperienceBufferConfig, SynchronizerConfig
from trinity_dask.dashboard import plugin
from trinity_dask.dashboard.plugin import DashboardPlugin
from trinity_dask.experience import Experience
from trinity_dask.experience.experience import EID
from trinity_dask.experience.schema import to_table
from trinity_dask.explorer.schedule.workers import Workers
from trinity_dask.launcher import telling
from trinity_dask.launcher.accounts import errors_of
from trinity_dask.launcher.status import StatusBoard
from trinity_dask.launcher.telling import EngineWatch, bound_of
from trinity_dask.monitor.curves import AGES
from trinity_dask.monitor.events import RunEvents
from trinity_dask.sync.synchronizer import Synchronizer
from trinity_dask.trainer.step.row_metrics import OLDEST, describe_rows


def rows(versions: list[list[int]]) -> Any:
    made = []
    for run, of_row in enumerate(versions):
        response = np.array(of_row, dtype=np.int32)
        made.append(
            Experience(
                tokens=np.arange(len(response) + 2),
                prompt_length=2,
                eid=EID(batch=1, task=0, run=run),
                reward=1.0,
                logprobs=np.zeros(len(response), dtype=np.float32),
                versions=response,
            )
        )
    return to_table(made)


@pytest.mark.parametrize(
    ("versions", "step", "ages"),
    [
        ([[3, 3], [2, 2, 2]], 4, {0: 2, 1: 3}),  # the weights that step 4 changes are version 3
        ([[0, -1, -1]], 1, {0: 1}),  # what no model sampled has no age
        ([[0]], 500, {OLDEST: 1}),
        ([[7]], 5, {0: 1}),  # newer than the trainer: a run that went back
        ([[-1]], 3, {}),
    ],
)
def test_the_ages_of_trained_tokens_are_counted(
    versions: list[list[int]], step: int, ages: dict[int, int]
) -> None:
    found = describe_rows(rows(versions), step)
    counted = {int(k.removeprefix(AGES)): n for k, n in found.items() if k.startswith(AGES)}
    assert counted == ages


class Pool:
    def __init__(self) -> None:
        self.found = {"engine-0": {"state": "serving", "version": 1, "restarts": 0}}

    def states(self) -> dict[str, dict[str, Any]]:
        return {slot: dict(state) for slot, state in self.found.items()}


def test_engines_are_told_of_when_they_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """State and version from the pool, share and speed from the scheduler's books."""
    now = 100.0
    monkeypatch.setattr(telling.time, "monotonic", lambda: now)
    workers, pool, watch = Workers(), Pool(), EngineWatch()
    worker = workers.up("engine-0", 4, "rollout")
    workers.up("runner-0", 2, "runner")
    stage: Any = SimpleNamespace(pool=pool, coordinator=SimpleNamespace(workers=workers))
    assert watch.look(stage).keys() == {"engine-0", "runner-0"}
    assert watch.look(stage) == {}  # at once: not yet
    for _ in range(3):
        worker.take(now)
    worker.response_tokens = 500
    now = 105.0
    told = watch.look(stage)
    assert told == {
        "engine-0": {
            **pool.found["engine-0"],
            "busy": pytest.approx(0.25, abs=0.01),  # three looks, one of them at 3 of 4
            "tokens_per_s": 100.0,
        }
    }
    pool.found.clear()
    now = 200.0
    assert watch.look(stage)["engine-0"]["state"] == "up"
    workers.down("engine-0")  # its engine has left
    workers.down("runner-0")  # which will come back
    now = 210.0
    told = watch.look(stage)
    assert told["engine-0"] == {"state": "gone"}
    assert told["runner-0"]["state"] == "lost"


@pytest.mark.parametrize(
    ("bound", "strategy", "args", "found"),
    [
        (4, None, {}, (4.0, "synchronizer.max_staleness")),
        (
            None,
            "staleness_control",
            {"max_staleness": 2},
            (2.0, "algorithm.sample_strategy_args.max_staleness"),
        ),
        (None, "default", {}, (None, "")),
    ],
)
def test_the_bound_is_the_one_of_the_configuration(
    bound: int | None, strategy: str | None, args: dict[str, Any], found: tuple[float | None, str]
) -> None:
    cfg = Config()
    cfg.synchronizer.max_staleness = bound
    cfg.algorithm.sample_strategy, cfg.algorithm.sample_strategy_args = strategy, args
    assert bound_of(cfg) == found


def test_every_change_of_the_board_is_told() -> None:
    told = list[dict[str, Any]]()

    async def go() -> None:
        board = StatusBoard(lambda values: told.append(dict(values)), run_id="run")
        await board.update(state="running", step=1)
        await board.update(state="running", step=1)
        await board.update(step=2)

    asyncio.run(go())
    assert [status.get("step") for status in told] == [1, 2]


def test_a_wait_of_one_side_is_told_when_it_has_ended(tmp_path: Path) -> None:
    told = list[dict[str, Any]]()

    async def go() -> None:
        sync = Synchronizer(SynchronizerConfig(), str(tmp_path), "run")
        sync.spans.listeners.append(told.append)
        ready = asyncio.Event()

        async def soon() -> None:
            await asyncio.sleep(0.05)
            ready.set()
            sync.notify()

        waker = asyncio.create_task(soon())
        await sync.wait(ready.is_set, lambda: "trainer at step 3: the explorer to come")
        await waker
        await sync.wait(lambda: True, lambda: "trainer at step 4: nothing")  # none at all
        with pytest.raises(TimeoutError):  # a look that comes back by itself
            await sync.wait(lambda: False, lambda: "explorer 'x': news", timeout_s=0.01)

    asyncio.run(go())
    assert [(t["what"], t["who"], t["awaited"]) for t in told] == [
        ("wait", "trainer at step 3", "the explorer to come")
    ]
    assert told[0]["seconds"] >= 0.04


def test_a_batch_that_waited_for_room_says_so(tmp_path: Path) -> None:
    told = list[dict[str, Any]]()

    async def go() -> None:
        buffer = ExperienceBuffer(
            ExperienceBufferConfig(path=str(tmp_path), capacity_batches=1, max_read_timeout_s=60.0)
        )
        await buffer.prepare()
        buffer.spans.listeners.append(told.append)
        meta = {"explorer": "main", "step": 1}
        await buffer.commit("1", rows([[0]]), meta)
        second = asyncio.create_task(buffer.commit("2", rows([[0]]), meta))
        while not buffer.writes_blocked:
            await asyncio.sleep(0.001)
        await asyncio.sleep(2 * TOLD_S)
        lease = await buffer.lease(1, 10.0)
        assert lease is not None
        await buffer.ack(lease.lease_id)
        await second

    asyncio.run(go())
    assert [(t["who"], t["awaited"]) for t in told] == [("explorer 'main'", "room in the buffer")]


@pytest.mark.parametrize(
    ("counts", "wrong"),
    [
        ({"scheduled": 8, "succeeded": 8}, 0),
        ({"scheduled": 8, "succeeded": 7}, 1),
        ({"committed": 4, "produced": 4, "consumed": 4, "trained": 3}, 1),
    ],
)
def test_accounts_by_their_names_are_checked_as_ever(counts: dict[str, int], wrong: int) -> None:
    assert len(errors_of(counts)) == wrong


def test_events_that_cannot_be_read_cost_the_scheduler_nothing() -> None:
    found = DashboardPlugin()
    found._feeds = plugin.feeds_of(SimpleNamespace(extensions={}))
    good = {"kind": "status", "run": "r", "stage": "", "time": 1.0, "values": {"step": 1}}
    for wrong in (None, "text", {}, {**good, "time": "x"}, {**good, "values": None}):
        found.log_event("trinity", wrong)
    found.log_event("another topic", good)
    assert [feed.status for feed in found._feeds] in ([], [{}])
    found.log_event("trinity", good)
    assert [feed.status for feed in found._feeds] == [{"step": 1}]


class Unknown(SchedulerPlugin):
    """As on a scheduler without this package: loading it raises there."""

    def __reduce__(self) -> Any:
        return (_missing, ())


def _missing() -> None:
    raise ModuleNotFoundError("No module named 'trinity_dask'")


@pytest.fixture(scope="module")
def client() -> Any:
    options = {"processes": False, "n_workers": 1, "set_as_default": False, "protocol": "tcp://"}
    with Client(dashboard_address="127.0.0.1:0", **options) as found:
        yield found


def test_a_scheduler_that_does_not_know_us_fails_no_run(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "DashboardPlugin", lambda origins: Unknown())
    with caplog.at_level(logging.WARNING, "trinity_dask.dashboard"):
        assert plugin.join(client) is False
    assert "cannot show the page /trinity" in caplog.text
    assert "No module named 'trinity_dask'" in caplog.text


def test_what_a_worker_tells_is_in_the_feeds_of_its_scheduler(
    client: Client, tmp_path: Path
) -> None:
    """The whole way: a task on a worker, its stream, the plugin; and the worker's end."""
    plugin.join(client)
    plugin.join(client)  # a second run

    def tell(directory: str) -> None:
        events = RunEvents("told")
        events.begin("", directory, "", began=1.0, name="told", mode="both")
        events.metrics("trainer", 1, 1, {"actor/pg_loss": np.float32(0.5), "x": 1.0})
        events.status({"state": "running", "reward": np.float64("nan")})

    client.submit(tell, str(tmp_path)).result(timeout=60)

    async def states(dask_scheduler: Any) -> list[tuple[str, int]]:
        for _ in range(600):
            found = [
                (feed.state, len(feed.curves["loss"]["actor/pg_loss"].x))
                for feed in plugin.feeds_of(dask_scheduler)
                if feed.run == "told" and feed.curves["loss"] and feed.status
            ]
            if found:
                return found
            await asyncio.sleep(0.1)
        return []

    async def end_worker(dask_scheduler: Any) -> str:
        (address,) = dask_scheduler.workers
        await dask_scheduler.remove_worker(address, stimulus_id="test")
        (feed,) = [f for f in plugin.feeds_of(dask_scheduler) if f.run == "told"]
        return feed.state

    assert client.run_on_scheduler(states) == [("running", 1)]
    assert client.run_on_scheduler(end_worker) == "lost"

"""The synchronizer with real engines, files and groups: styles, methods, losses, exits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sync_actors import Plan, SyncHost, spread

from trinity_dask.cluster import RunCluster, call, start_actor, stop_actor

WAIT_S = 200.0
SHORT = 0.03  # what the scenarios of the reference count in seconds, scaled down
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def host(cluster: RunCluster) -> Iterator[Any]:
    ref = start_actor(cluster.client, SyncHost, slot="control", key="sync-host", timeout=WAIT_S)
    yield ref
    stop_actor(ref)


def play(cluster: RunCluster, host: Any, plan: Plan, job: Path) -> dict[str, Any]:
    arguments = (plan, str(job), f"{job.name}-{time.monotonic_ns()}")
    told = call(cluster.client, host.handle, "play", *arguments, timeout=WAIT_S)
    assert told["steps"] == {
        "trainer": plan.train_steps,
        **{name: steps for name, (steps, _) in plan.explorers.items()},
    }
    assert told["trainer"] == "stopped"
    assert told["statuses"] == {
        "running": 0,
        "require_sync": 0,
        "stopped": len(plan.explorers),
    }
    for versions in told["seen"].values():
        assert spread(versions), f"versions fell: {versions}"
    assert all(asked == step for asked, step in told["sent"]), "a label is not its weights"
    assert told["timeouts"] == 0
    return told


@pytest.mark.parametrize("style", ["fixed", "trainer_driven", "explorer_driven", "fully_async"])
@pytest.mark.parametrize("method", ["nccl", "checkpoint", "memory"])
def test_every_style_by_every_method_ends_with_the_last_weights(
    cluster: RunCluster, host: Any, tmp_path: Path, style: str, method: str
) -> None:
    steps = 8 if style == "fixed" else 5
    plan = Plan(
        style=style,
        method=method,
        interval=2,
        train_s=[2 * SHORT, SHORT],
        explorers={"explorer": (steps, 2 * SHORT)},
        engines={"explorer": ["engine-0", "engine-1"]},
    )
    told = play(cluster, host, plan, tmp_path)
    assert set(told["engines"].values()) == {8}
    if style == "fixed":
        assert told["seen"]["explorer"] == [2, 4, 6, 8, 8]
    if style in ("trainer_driven", "fully_async"):  # only versions of the trainer's sync points
        assert all(version % 2 == 0 for version in told["seen"]["explorer"])
    assert told["files"] == ([] if method == "nccl" else [8])
    assert not list(tmp_path.rglob("weights-*.safetensors"))


@pytest.mark.parametrize(
    ("style", "method"),
    [
        ("fixed", "checkpoint"),
        ("explorer_driven", "memory"),
        ("fully_async", "memory"),
        ("trainer_driven", "checkpoint"),
    ],
)
def test_a_slow_and_a_quick_explorer_share_one_trainer(
    cluster: RunCluster, host: Any, tmp_path: Path, style: str, method: str
) -> None:
    plan = Plan(
        style=style,
        method=method,
        interval=2,
        train_s=[3 * SHORT, 2 * SHORT],
        explorers={"slow": (8, 2.5 * SHORT), "quick": (8, 0.5 * SHORT)},
        engines={"slow": ["engine-0"], "quick": ["engine-1"]},
    )
    told = play(cluster, host, plan, tmp_path)
    assert set(told["engines"].values()) == {8}  # both took the last weights at their end
    assert told["files"] == [8]


@pytest.mark.parametrize(
    ("style", "method"),
    [("fully_async", "nccl"), ("fixed", "memory")],
)
def test_fault_13_a_reborn_engine_serves_and_is_labelled_with_what_it_got(
    cluster: RunCluster, host: Any, tmp_path: Path, style: str, method: str
) -> None:
    plan = Plan(
        style=style,
        method=method,
        train_steps=6,
        train_s=[5 * SHORT],
        explorers={"explorer": (6, 2 * SHORT)},
        engines={"explorer": ["engine-0", "engine-1"]},
        kill_engine="engine-1",
    )
    told = call(
        cluster.client, host.handle, "play", plan, str(tmp_path), tmp_path.name, timeout=WAIT_S
    )
    assert told["reborn"]["open"]
    # over a group the newcomer's weights may be newer than what was asked for: the label says so
    labels = {max(asked, step) for asked, step in told["sent"]}
    assert told["reborn"]["model_version"] in labels
    assert set(told["engines"].values()) == {6}

"""A run that is silent, or whose connection broke, is not dead."""

from __future__ import annotations

import asyncio
import time

import pytest
from distributed import Client, LocalCluster

from trinity_dask.cluster import claims
from trinity_dask.cluster.actors import start_actor, stop_actor
from trinity_dask.cluster.rpc import ActorLost, call
from trinity_dask.config import load_config
from trinity_dask.launcher.launcher import Launcher
from trinity_dask.run import Run, joining


class Control:
    """A launcher as a driver sees it; deaf for as long as it is told."""

    def __init__(self, deaf_s: float) -> None:
        self.deaf_s = deaf_s

    async def status(self, seen: int = 0, timeout_s: float = 0.0) -> dict[str, object]:
        await asyncio.sleep(self.deaf_s)
        return {"state": "running", "version": 7, "message": "at work"}


@pytest.fixture(scope="module")
def client():
    resources = {"slot:control": 1e6}
    with (
        LocalCluster(
            n_workers=1, processes=False, dashboard_address=None, resources=resources
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def actor(client, cls, *args, key):
    return start_actor(client, cls, *args, slot="control", key=key, timeout=30)


def end(client, ref):
    """Stop the actor, and wait until the scheduler has lost it."""
    stop_actor(ref)
    for _ in range(100):
        if not joining.is_held(client, ref.handle):
            break
        time.sleep(0.05)


def test_a_silent_run_is_alive_until_the_scheduler_has_lost_it(client, monkeypatch):
    monkeypatch.setattr(joining, "CALL_TIMEOUT_S", 0.3)
    ref = actor(client, Control, 3600.0, key="silent")
    entry = {"run_id": "silent", "handle": ref.handle, "client": client.id}
    client.publish_dataset(**{joining.PUBLISHED + "silent": entry})
    (live,) = joining.live_entries(client)
    assert live["state"] == "does not answer"
    end(client, ref)
    assert joining.live_entries(client) == []
    assert joining.entries(client) == []


def test_a_broken_connection_starts_no_second_launcher(client, tmp_path):
    run = Run(load_config("+experiment=sort_digits", f"checkpoint_root_dir={tmp_path}"), client)
    ref = actor(client, Control, 0.0, key="alive")
    run._handle = ref.handle
    run._lost(ActorLost(ref.handle, "status", ConnectionResetError()))
    assert (run.state, run.status["message"]) == ("running", "at work")
    assert run._relaunches == 0
    stop_actor(ref)


def test_a_run_whose_driver_died_before_it_was_started_can_be_stopped(client, tmp_path):
    run = Run(load_config("+experiment=sort_digits", f"checkpoint_root_dir={tmp_path}"), client)
    ref = actor(client, Launcher, run.stages, run.base_dir, run.run_id, key="early")
    call(client, ref.handle, "stop", "stopped by command", timeout=30)
    status = call(client, ref.handle, "status", timeout=30)
    assert (status["state"], status["message"]) == ("interrupted", "stopped by command")
    call(client, ref.handle, "start", timeout=30)
    assert call(client, ref.handle, "status", timeout=30)["state"] == "interrupted"
    stop_actor(ref)


def roles(client) -> set[str]:
    (member,) = claims.members(client)
    return set(member.resources)


def test_the_roles_of_a_run_whose_driver_is_gone_are_taken_back_by_the_next(client, tmp_path):
    (member,) = claims.members(client)
    for run_id in ("gone", "gone before"):
        given = {"rollout": 1.0, f"slot:engine-{len(run_id)}": 1.0}
        claims.claim(client, {member.identity: given}, run_id)
    assert {"rollout", "slot:engine-4", "slot:engine-11"} <= roles(client)
    ref = actor(client, Control, 0.0, key="gone")
    entry = {"run_id": "gone", "handle": ref.handle, "client": client.id}
    client.publish_dataset(**{joining.PUBLISHED + "gone": entry})
    end(client, ref)
    assert joining.live_entries(client) == []
    left = roles(client)
    assert "slot:engine-4" not in left
    assert "slot:engine-11" in left  # nobody knows whose it was
    cfg = load_config("+experiment=sort_digits", f"checkpoint_root_dir={tmp_path}")
    joining.announce(client, cfg, "next", str(tmp_path))
    assert roles(client) == {"slot:control"}  # the worker's own
    joining.withdraw(client, "next")

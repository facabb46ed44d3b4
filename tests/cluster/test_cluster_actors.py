"""Actors on a real local cluster: placement, calls, loss, re-creation."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_actors import Control, Counter

from trinity_dask.cluster import (
    ActorHandle,
    ActorLost,
    ActorRef,
    RunCluster,
    call,
    open_cluster,
    start_actor,
    stop_actor,
)
from trinity_dask.config.schema import Config, GroupConfig

WAIT_S = 60.0


def local_config(tmp: Path) -> Config:
    cfg = Config(mode="explore", job_dir=str(tmp))
    cfg.cluster.dashboard_address = None
    cfg.cluster.rollout = GroupConfig(nthreads=16)
    return cfg


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunCluster]:
    with open_cluster(local_config(tmp_path_factory.mktemp("job"))) as opened:
        yield opened


@pytest.fixture
def control(cluster: RunCluster) -> Iterator[ActorRef]:
    key = f"control-{time.monotonic_ns()}"
    ref = start_actor(cluster.client, Control, slot="control", key=key, timeout=WAIT_S)
    yield ref
    call(cluster.client, ref.handle, "release", timeout=WAIT_S)
    stop_actor(ref)


def make(cluster: RunCluster, control: ActorRef, slot: str) -> ActorHandle:
    key = f"counter-{time.monotonic_ns()}"
    return call(cluster.client, control.handle, "make", Counter, slot, key, timeout=WAIT_S)


def ask(cluster: RunCluster, control: ActorRef, *args: object) -> object:
    return call(cluster.client, control.handle, "ask", *args, timeout=WAIT_S)


def test_an_actor_lives_at_its_slot_and_answers_everyone(
    cluster: RunCluster, control: ActorRef
) -> None:
    handle = make(cluster, control, "engine-0")
    assert call(cluster.client, handle, "add", 2, timeout=WAIT_S) == 2
    # from an asyncio task inside another worker
    assert ask(cluster, control, handle, "add", 3) == 5
    # from a thread there that knows nothing of Dask
    assert call(cluster.client, control.handle, "ask_in_thread", handle, timeout=WAIT_S) == 6
    name = call(cluster.client, handle, "worker_name", timeout=WAIT_S)
    assert name == "rollout-0"


def test_an_actor_of_the_same_worker_is_called_without_serialising(
    cluster: RunCluster, control: ActorRef
) -> None:
    handle = make(cluster, control, "control")
    assert call(cluster.client, control.handle, "is_same_object", handle, timeout=WAIT_S)


def test_errors_of_a_method_arrive_as_they_are(cluster: RunCluster, control: ActorRef) -> None:
    for slot in ("engine-0", "control"):
        handle = make(cluster, control, slot)
        with pytest.raises(ValueError, match="no such luck"):
            ask(cluster, control, handle, "fail")
        with pytest.raises(KeyError, match="mine"):
            ask(cluster, control, handle, "fail_key")
        with pytest.raises(AttributeError, match="not_there"):
            ask(cluster, control, handle, "not_there")


def test_a_result_that_cannot_travel_is_an_error_and_not_a_hang(
    cluster: RunCluster, control: ActorRef
) -> None:
    handle = make(cluster, control, "engine-0")
    with pytest.raises(TypeError, match="serialize"):
        ask(cluster, control, handle, "lock")
    assert ask(cluster, control, handle, "add", 1) == 1


def test_a_call_ends_at_its_deadline_and_says_what_it_waited_for(
    cluster: RunCluster, control: ActorRef
) -> None:
    for slot in ("engine-0", "control"):
        handle = make(cluster, control, slot)
        with pytest.raises(TimeoutError, match=rf"'wait'.*'{slot}'.*0\.5 s"):
            call(cluster.client, control.handle, "ask_for", handle, "wait", 0.5, timeout=WAIT_S)


def test_a_missing_slot_is_named(cluster: RunCluster) -> None:
    with pytest.raises(TimeoutError, match=r"'engine-7'.*slots present: control, engine-0"):
        start_actor(cluster.client, Counter, slot="engine-7", key="nobody", timeout=1)


def test_an_error_of_the_constructor_arrives(cluster: RunCluster) -> None:
    with pytest.raises(TypeError, match="unexpected"):
        start_actor(
            cluster.client, Counter, slot="engine-0", key="broken", timeout=WAIT_S, unexpected=1
        )


def test_a_released_actor_is_dropped(cluster: RunCluster, control: ActorRef) -> None:
    ref = start_actor(cluster.client, Counter, slot="engine-0", key="short", timeout=WAIT_S)
    stop_actor(ref)
    with pytest.raises(ActorLost):
        call_for_ever(cluster, ref.handle)


def call_for_ever(cluster: RunCluster, handle: ActorHandle) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        call(cluster.client, handle, "add", 1, timeout=WAIT_S)


def test_fault_13_a_lost_actor_is_reported_at_once_and_created_again(
    cluster: RunCluster, control: ActorRef
) -> None:
    handle = make(cluster, control, "engine-0")
    ask(cluster, control, handle, "add", 5)
    pid = ask(cluster, control, handle, "pid")
    call(cluster.client, control.handle, "watch", timeout=WAIT_S)
    call(cluster.client, control.handle, "start_waiting", handle, timeout=WAIT_S)
    killed = time.monotonic()
    os.kill(int(str(pid)), signal.SIGKILL)
    # the call that was under way in another worker
    error = call(cluster.client, control.handle, "waited", timeout=WAIT_S)
    assert isinstance(error, ActorLost)
    assert "'engine-0'" in str(error)
    assert "'wait'" in str(error)
    assert time.monotonic() - killed < 30  # the call itself would have waited for 200
    # a call to the dead address, from a worker and from here
    with pytest.raises(ActorLost):
        ask(cluster, control, handle, "add", 1)
    with pytest.raises(ActorLost):
        call(cluster.client, handle, "add", 1, timeout=WAIT_S)
    call(cluster.client, control.handle, "lost_event", WAIT_S, timeout=WAIT_S)
    reborn = call(cluster.client, control.handle, "recreate", WAIT_S, timeout=WAIT_S)
    assert reborn.slot == handle.slot
    assert reborn.address != handle.address
    assert ask(cluster, control, reborn, "add", 1) == 1
    assert ask(cluster, control, reborn, "pid") != pid


def test_only_a_lost_actor_can_be_created_again(cluster: RunCluster, control: ActorRef) -> None:
    make(cluster, control, "engine-0")
    with pytest.raises(TimeoutError, match="not lost"):
        call(cluster.client, control.handle, "recreate", 0.5, timeout=WAIT_S)


def hold_once(flag: str, n_bytes: int) -> int:
    """Keep ``n_bytes`` until the process is ended; after that only say which one answers."""
    if not Path(flag).exists():
        Path(flag).touch()
        kept = bytearray(n_bytes)
        time.sleep(WAIT_S)
        del kept
    return os.getpid()


def test_a_process_beyond_its_memory_limit_is_ended_named_and_reborn(tmp_path: Path) -> None:
    cfg = local_config(tmp_path)
    cfg.cluster.rollout = GroupConfig(nthreads=1, memory_limit="600MB")
    with open_cluster(cfg) as cluster:
        where = {"resources": {"slot:engine-0": 1}, "pure": False}
        before = cluster.client.submit(os.getpid, **where).result(WAIT_S)
        flag = str(tmp_path / "flag")
        after = cluster.client.submit(hold_once, flag, 900 << 20, **where).result(WAIT_S)
        assert after != before
    named = (tmp_path / "log" / "driver.log").read_text()
    assert f"(pid={before}) exceeded 100% memory budget" in named

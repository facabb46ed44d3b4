"""Trinity-RFT's explorer and synchronizer as actors of a live cluster."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_actors import WAIT_S, Control
from distributed import Client
from explorer_parts import make_config, records

from trinity_dask.cluster import RunCluster, call, start_actor, stop_actor
from trinity_dask.config.schema import Config
from trinity_dask.explorer.explorer import Explorer
from trinity_dask.manager import StateManager
from trinity_dask.manager.synchronizer import Synchronizer
from trinity_dask.models.protocol import WeightGroupSpec
from trinity_dask.sync.state import RUNNING, STOPPED
from trinity_dask.weights.broadcast import make_group
from trinity_dask.weights.files import write_safetensors

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def client(cluster: RunCluster) -> Iterator[Client]:
    with cluster.client.as_current():
        yield cluster.client


def config(tmp_path: Path, **keys: Any) -> Config:
    cfg = make_config(tmp_path, **keys)
    cfg.name = f"compat-{tmp_path.name}"
    cfg.explorer.rollout_model.engine_type = "fake"
    return cfg


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_explorer_is_made_from_a_configuration_and_explores(
    client: Client, tmp_path: Path
) -> None:
    cfg = config(tmp_path)
    explorer = Explorer.get_actor(config=cfg)
    assert explorer.is_alive.remote().result(WAIT_S)
    with pytest.raises(RuntimeError, match=r"prepare\(\) must be called first"):
        explorer.explore_step.remote().result(WAIT_S)
    explorer.prepare.remote().result(WAIT_S)
    assert explorer.explore_step.remote().result(WAIT_S)
    assert not explorer.need_eval.remote().result(WAIT_S)
    assert not explorer.need_sync.remote().result(WAIT_S)  # nobody trains
    assert explorer.explore_step.remote().result(WAIT_S)
    assert explorer.need_eval.remote().result(WAIT_S)
    explorer.eval.remote().result(WAIT_S)
    assert explorer.sync_weight.remote().result(WAIT_S) is None
    assert StateManager(str(tmp_path), config=cfg).load_explorer()["latest_iteration"] == 2
    assert explorer.explore.remote().result(WAIT_S) == cfg.explorer.name
    explorer.save_checkpoint.remote().result(WAIT_S)
    explorer.shutdown.remote().result(WAIT_S)
    explorer.shutdown.remote().result(WAIT_S)
    steps = [r["step"] for r in records(cfg) if "rollout/reward/mean" in r]
    assert steps == [1, 2, 3, 4]
    evals = [r["step"] for r in records(cfg) if "eval/held_out/reward/mean@1" in r]
    assert 2 in evals


def test_its_attributes_are_those_of_its_parts(cluster: RunCluster, tmp_path: Path) -> None:
    ref = start_actor(cluster.client, Control, slot="control", key="control", timeout=WAIT_S)
    call_args = ("explorer_attributes", config(tmp_path, n_rows=4))
    told = call(cluster.client, ref.handle, *call_args, timeout=WAIT_S)
    stop_actor(ref)
    assert told == {"before": (0, -1, []), "after": (2, -1, 1), "engines": ["engine-0"]}


def test_engines_join_a_group_by_hand_and_leave_it(client: Client, tmp_path: Path) -> None:
    cfg, port = config(tmp_path), free_port()
    explorer = Explorer.get_actor(cfg)
    explorer.prepare.remote().result(WAIT_S)
    with pytest.raises(ValueError, match="world_size=5, but the trainer and the engines are 2"):
        explorer.setup_weight_sync_group.remote("127.0.0.1", port, world_size=5).result(WAIT_S)
    joined = explorer.setup_weight_sync_group.remote(
        "127.0.0.1", port, 2, group_name="rollout", timeout=60
    )
    spec = WeightGroupSpec("127.0.0.1", port, 2, 0, 1, "gloo", 60.0)
    with ThreadPoolExecutor(1) as thread:
        group = thread.submit(make_group, spec, 0, True).result(WAIT_S)
        joined.result(WAIT_S)
        explorer.set_state_dict_meta.remote([("w", "float32", (4,))]).result(WAIT_S)
        explorer.setup_model_level_weight_sync_group.remote().result(WAIT_S)
        explorer.teardown_weight_sync_group.remote().result(WAIT_S)
        thread.submit(group.close).result(WAIT_S)
    explorer.shutdown.remote().result(WAIT_S)


def test_a_benchmark_evaluates_checkpoints_and_shows_their_tensors(
    client: Client, tmp_path: Path
) -> None:
    cfg = config(tmp_path)
    cfg.mode = "bench"
    checkpoint = tmp_path / "global_step_3"
    weights = {"w": torch.arange(4.0)}
    write_safetensors(str(checkpoint / "actor" / "model.safetensors"), weights.items())
    (checkpoint / "COMPLETE").write_text(json.dumps({"files": {}}))
    explorer = Explorer.get_actor(cfg)
    explorer.prepare.remote().result(WAIT_S)
    assert explorer.benchmark.remote().result(WAIT_S)
    assert torch.equal(explorer.get_weight.remote(name="w").result(WAIT_S), weights["w"])
    with pytest.raises(LookupError, match="no tensor 'v'"):
        explorer.get_weight.remote("v").result(WAIT_S)
    explorer.shutdown.remote().result(WAIT_S)
    assert 3 in [r["step"] for r in records(cfg) if "bench/held_out/finished_task_count" in r]


def test_what_cannot_be_prepared_leaves_nothing_behind(client: Client, tmp_path: Path) -> None:
    cfg = config(tmp_path)
    cfg.buffer.explorer_input.taskset.path = str(tmp_path / "missing.jsonl")
    explorer = Explorer.get_actor(cfg)
    with pytest.raises(Exception, match=r"missing\.jsonl"):
        explorer.prepare.remote().result(WAIT_S)
    with pytest.raises(RuntimeError, match="must be called first"):
        explorer.explore.remote().result(WAIT_S)


def test_everybody_who_asks_for_a_run_gets_its_one_synchronizer(
    cluster: RunCluster, client: Client, tmp_path: Path
) -> None:
    cfg = config(tmp_path)
    cfg.synchronizer.sync_method = "checkpoint"
    module = start_actor(client, Control, slot="engine-1", key="module", timeout=WAIT_S)
    first, second = Synchronizer.get_actor(cfg), Synchronizer.get_actor(config=cfg)
    first.__ray_ready__.remote().result(WAIT_S)
    first.add_module.remote(module.handle).result(WAIT_S)
    first.set_trainer_status.remote(RUNNING).result(WAIT_S)
    second.set_explorer_status.remote(RUNNING, old_status=None).result(WAIT_S)
    waiting = second.wait_new_model_state_dict.remote(0)
    first.set_model_state_dict.remote({"w": torch.arange(4.0)}, trainer_step=3).result(WAIT_S)
    assert waiting.result(WAIT_S) == 3
    namespace = "/".join(part for part in (cfg.project, cfg.group, cfg.name) if part)
    by_name = Synchronizer.get_actor(namespace=namespace)
    assert by_name.get_latest_model_version.remote().result(WAIT_S) == 3
    path, version = by_name.get_model_state_dict.remote().result(WAIT_S)
    assert (Path(path).is_file(), version) == (True, 3)
    first.set_trainer_status.remote(STOPPED).result(WAIT_S)
    assert second.trainer_requires_weight_sync.remote().result(WAIT_S) is None

    async def awaited() -> Any:
        return await by_name.get_trainer_status.remote()

    assert asyncio.run(awaited()) is STOPPED
    with pytest.raises(LookupError, match="no synchronizer is registered"):
        Synchronizer.get_actor(namespace="nobody").is_alive.remote().result(WAIT_S)
    stop_actor(module)  # the last module leaves, and the shared synchronizer with it
    gone = client.sync(_until_gone, client, f"trinity-dask/{namespace}/synchronizer")
    assert gone
    assert not Path(path).exists()


async def _until_gone(client: Client, name: str) -> bool:
    async with asyncio.timeout(WAIT_S):
        while name in await client.list_datasets():
            await asyncio.sleep(0.1)
    return True


@pytest.mark.parametrize("method", ["nccl"])
def test_a_group_is_formed_and_left_by_both_sides(
    cluster: RunCluster, tmp_path: Path, method: str
) -> None:
    cfg = config(tmp_path)
    cfg.synchronizer.sync_method = method
    ref = start_actor(cluster.client, Control, slot="control", key="groups", timeout=WAIT_S)
    told = call(cluster.client, ref.handle, "groups", cfg, "engine-1", free_port(), timeout=WAIT_S)
    stop_actor(ref)
    assert told["formed"] == [True, False, True]
    assert told["generation"] == 2
    assert ("layer.weight", "float32", (64, 8)) in told["meta"]

"""The names and parameters that users of Trinity-RFT know, and what they mean."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from trinity_dask.config.schema import SynchronizerConfig
from trinity_dask.manager import Synchronizer

SYNCHRONIZER = {
    "add_module": ["module_ref"],
    "set_trainer_status": ["status"],
    "get_trainer_status": [],
    "set_explorer_status": ["status", "old_status"],
    "get_explorer_status_counts": [],
    "explorer_requires_sync": [],
    "set_model_state_dict": ["model_state_dict", "trainer_step"],
    "set_model_state_dict_with_step_num": ["step_num", "world_size"],
    "get_model_state_dict": [],
    "get_model_state_dict_iterator": [],
    "get_state_dict_meta": [],
    "setup_weight_sync_group": ["master_address", "master_port", "state_dict_meta"],
    "coordinate_weight_sync_setup": ["timeout"],
    "coordinate_weight_sync_teardown": [],
    "wait_new_model_state_dict": ["current_version"],
    "notify_no_new_model_state_dict": [],
    "get_latest_model_version": [],
    "get_latest_model_path": ["use_huggingface"],
    "ready_to_nccl_sync": ["module", "trainer_step"],
    "trainer_requires_weight_sync": [],
    "get_actor": ["config"],
}


@pytest.mark.parametrize(
    ("cls", "name", "known"),
    [(Synchronizer, name, known) for name, known in SYNCHRONIZER.items()],
)
def test_a_call_has_its_name_and_parameters(cls: type, name: str, known: list[str]) -> None:
    parameters = inspect.signature(getattr(cls, name)).parameters
    own = [p for p in parameters.values() if p.name != "self"]
    assert [p.name for p in own[: len(known)]] == known
    # what we added may be left out
    assert all(p.default is not inspect.Parameter.empty for p in own[len(known) :])


def synchronizer(path: Path, method: str) -> Any:
    return Synchronizer(SynchronizerConfig(sync_method=method), str(path), f"names-{path.name}")


def test_attributes_are_there_and_tell_the_state(tmp_path: Path) -> None:
    sync = synchronizer(tmp_path, "memory")
    assert sync.trainer_status.value == "stopped"
    assert {s.value: n for s, n in sync.explorer_status_counts.items()} == {
        "running": 0, "require_sync": 0, "stopped": 0,
    }  # fmt: skip
    assert sync.model_version == 0
    assert dict(sync.checkpoint_shard_counter) == {}


@pytest.mark.parametrize("method", ["memory", "checkpoint"])
def test_a_state_dict_can_be_had_tensor_by_tensor_and_as_a_path(
    tmp_path: Path, method: str
) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, method)
        assert [pair async for pair in sync.get_model_state_dict_iterator()] == []
        assert await sync.get_latest_model_path() is None
        weights = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
        await sync.set_model_state_dict(weights, 2)
        found = {name: tensor async for name, tensor in sync.get_model_state_dict_iterator()}
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        assert Path(await sync.get_latest_model_path()).is_file()
        assert await sync.get_latest_model_path(use_huggingface=True) is None
        export = tmp_path / "global_step_2" / "huggingface"
        export.mkdir(parents=True)
        (export / "model.safetensors").touch()
        assert await sync.get_latest_model_path(use_huggingface=True) == str(export)
        await sync.close()

    asyncio.run(body())


def test_a_group_needs_both_sides_and_its_end_passes_over_nobody(tmp_path: Path) -> None:
    async def body() -> None:
        sync = synchronizer(tmp_path, "nccl")
        with pytest.raises(RuntimeError, match="no explorer is attached"):
            await sync.coordinate_weight_sync_setup(1.0)
        await sync.coordinate_weight_sync_teardown()

    asyncio.run(body())

"""What workers import early is what their role needs, and all of it can be imported."""

from __future__ import annotations

import importlib.util

from trinity_dask.config.schema import Config
from trinity_dask.launcher.warm_up import ENGINE_MODULES, TRAINER_MODULES, modules_by_slot


def stage(mode: str, engine: str = "torch", first: int | None = None) -> Config:
    cfg = Config(mode=mode)
    cfg.explorer.rollout_model.engine_type = engine
    cfg.cluster.rollout.n_workers, cfg.cluster.rollout.first_index = 2, first
    return cfg


def test_each_role_is_warmed_up_for_what_some_stage_needs() -> None:
    found = modules_by_slot([stage("train"), stage("both")])
    assert sorted(found) == ["engine-0", "engine-1", "trainer-0"]
    assert found["trainer-0"] == TRAINER_MODULES
    assert found["engine-1"] == ENGINE_MODULES["torch"]
    assert sorted(modules_by_slot([stage("train")])) == ["trainer-0"]
    assert sorted(modules_by_slot([stage("explore", first=3)])) == ["engine-3", "engine-4"]
    assert modules_by_slot([stage("bench", engine="fake")]) == {}


def test_the_modules_exist() -> None:
    for name in {*TRAINER_MODULES, *ENGINE_MODULES["torch"], *ENGINE_MODULES["vllm"]}:
        assert importlib.util.find_spec(name) is not None, name

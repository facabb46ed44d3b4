"""A relative path means the directory in which the command was given."""

import os

import pytest

from trinity_dask.config import load_config, resolve, split_stages
from trinity_dask.config.compose import compose_tree
from trinity_dask.config.paths import absolute

TASKS = "buffer.explorer_input"
SMALL = ["engine=fake", "model.max_model_len=64"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    return str(tmp_path)


PATHS = {
    "checkpoint_root_dir": ("runs", "{here}/runs"),
    "model.model_path": ("made/later/on", "{here}/made/later/on"),
    "model.teacher_model_path": ("model", "{here}/model"),
    "plugin_dirs": ("[mine]", ["{here}/mine"]),
    "cluster.local_directory": ("scratch", "{here}/scratch"),
    "explorer.rollout_model.engine_type": ("engine.py:Mine", "{here}/engine.py:Mine"),
    "algorithm.advantage_fn": ("a/b.py:mine", "{here}/a/b.py:mine"),
    "prepare": ("make.py:it", "{here}/make.py:it"),
    "synchronizer.path": ("weights", "{here}/weights"),
    f"{TASKS}.taskset.path": ("data/*.jsonl.gz", "{here}/data/*.jsonl.gz"),
    f"{TASKS}.taskset.reward_fn": ("../one.py:one", "{parent}/one.py:one"),
    f"{TASKS}.default_workflow": ("'~/flow.py:Flow'", "{home}/flow.py:Flow"),
}
NO_PATHS = {
    "model.model_path": "some-org/some-model",  # told as it was given
    f"{TASKS}.taskset.path": "openai/gsm8k",
    f"{TASKS}.taskset.reward_fn": "math_reward",
    f"{TASKS}.taskset.workflow": "package.module:Flow",
    "synchronizer.path": "s3://bucket/weights",
}


def at(config, key):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_what_is_a_path_becomes_absolute(here):
    names = {"here": here, "parent": os.path.dirname(here), "home": os.path.expanduser("~")}
    given = [f"{key}={value}" for key, (value, _) in PATHS.items()]
    config = resolve(compose_tree([*SMALL, *given]))
    for key, (_, wanted) in PATHS.items():
        expected = [e.format(**names) for e in wanted] if isinstance(wanted, list) else wanted
        assert at(config, key) == (
            expected if isinstance(wanted, list) else wanted.format(**names)
        ), key
    os.chdir("/")
    assert resolve(config) == config  # wherever it is looked at again


def test_what_is_no_path_stays():
    config = resolve(compose_tree([*SMALL, *(f"{k}={v}" for k, v in NO_PATHS.items())]))
    assert {key: at(config, key) for key in NO_PATHS} == NO_PATHS


def test_a_directory_named_like_a_data_set_of_the_hub_is_the_directory(here):
    os.makedirs("mine/tasks")
    config = resolve(compose_tree([*SMALL, f"{TASKS}.taskset.path=mine/tasks"]))
    assert config.buffer.explorer_input.taskset.path == f"{here}/mine/tasks"


def test_paths_of_a_stage(here):
    own = "++stages.1.buffer.explorer_input.taskset"
    config = load_config(
        "+experiment=sort_digits", f"{own}.path=own.jsonl", f"{own}.reward_fn=own.py:one"
    )
    taskset = split_stages(config)[1].buffer.explorer_input.taskset
    assert (taskset.path, taskset.reward_fn) == (f"{here}/own.jsonl", f"{here}/own.py:one")


def test_paths_of_databases(here):
    assert absolute("sqlite:///tasks.db") == f"sqlite:///{here}/tasks.db"
    assert absolute("duckdb:////data/x.duckdb") == "duckdb:////data/x.duckdb"
    assert absolute("sqlite:///:memory:") == "sqlite:///:memory:"

"""Trainer ranks on real workers: two ranks by gloo, a file of demonstrations, a SIGKILL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_actor import TrainerHost
from trainer_support import grpo_config, save_tiny_model

from trinity_dask.cluster import RunCluster, call, open_cluster, start_actor, stop_actor
from trinity_dask.config.schema import Config, GroupConfig
from trinity_dask.demo import sort_digits
from trinity_dask.trainer.checkpoints.checkpoint import complete_checkpoints, latest_hf_export

WAIT_S = 240.0
SIZES = [6, 7, 5, 8]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunCluster]:
    cfg = Config(mode="train", job_dir=str(tmp_path_factory.mktemp("cluster")))
    cfg.cluster.dashboard_address = None
    cfg.cluster.trainer = GroupConfig(n_workers=2, nthreads=4)
    with open_cluster(cfg) as opened:
        yield opened


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(cluster: RunCluster, cfg: Config, name: str, kill=None) -> dict:
    """Run a trainer on the control worker to its end."""
    host = start_actor(cluster.client, TrainerHost, slot="control", key=name, timeout=WAIT_S)
    try:
        arguments = (cfg, f"run-{name}", SIZES, kill)
        return call(cluster.client, host.handle, "train", *arguments, timeout=WAIT_S)
    finally:
        stop_actor(host)


def two_ranks(job_dir: Path, model_path: str) -> Config:
    cfg = grpo_config(job_dir, model_path, max_checkpoints_to_keep=0)
    cfg.cluster.trainer = GroupConfig(n_workers=2, nthreads=4)
    return cfg


def last_weights(cfg: Config) -> dict[str, torch.Tensor]:
    return load_file(complete_checkpoints(str(cfg.job_dir))[-1] / "actor" / "model.safetensors")


def test_two_ranks_train_and_a_killed_one_comes_back_with_the_same_weights(
    cluster: RunCluster, tmp_path: Path, model_path: str
) -> None:
    quiet, lossy = two_ranks(tmp_path / "quiet", model_path), two_ranks(tmp_path / "l", model_path)
    expected = train(cluster, quiet, "quiet")
    assert expected["result"]["step"] == len(SIZES)
    assert expected["result"]["trained_rows"] == sum(SIZES)
    assert expected["restarts"] == 0
    assert expected["host"] == "control-0"
    assert all(m["actor/grad_norm"] > 0 for m in expected["metrics"].values())

    # rank 1 dies after step 3, one step after the checkpoint: both ranks start over from it
    got = train(cluster, lossy, "lossy", kill=(3, 1))
    assert got["restarts"] == 1
    assert got["moved"] == [1]
    assert got["result"]["trained_rows"] == sum(SIZES)
    for name, value in last_weights(quiet).items():
        torch.testing.assert_close(last_weights(lossy)[name], value, atol=0, rtol=0)


def test_sft_from_a_file_learns_and_leaves_an_export(cluster: RunCluster, tmp_path: Path) -> None:
    cfg = Config(mode="train", job_dir=str(tmp_path / "job"))
    sort_digits.prepare(cfg, dir=str(tmp_path / "demo"), n_train=64, n_eval=8)
    cfg.model.model_path = str(tmp_path / "demo" / "model")
    cfg.algorithm.algorithm_type = "sft"
    cfg.algorithm.optimizer.lr = 3e-3
    cfg.buffer.train_batch_size = 16
    cfg.buffer.total_epochs = 3
    source = cfg.buffer.trainer_input.experience_buffer
    source.storage_type = "file"
    source.path = str(tmp_path / "demo" / "train.jsonl")
    source.format.apply_chat_template = False
    result = train(cluster, cfg, "sft")
    steps = result["metrics"]
    assert result["result"]["step"] == 12
    assert steps[12]["actor/sft_loss"] < steps[1]["actor/sft_loss"] - 0.5
    export = latest_hf_export(str(cfg.job_dir))
    assert export is not None
    original = json.loads((tmp_path / "demo/model/tokenizer.json").read_text())
    assert json.loads((export / "tokenizer.json").read_text()) == original

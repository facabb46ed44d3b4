"""Sharded ranks on real workers: the same training as one rank that holds everything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import pytest
import torch
from safetensors.torch import load_file
from trainer_actor import TrainerHost
from trainer_support import grpo_config, save_tiny_model

from trinity_dask.cluster import RunCluster, call, open_cluster, start_actor, stop_actor
from trinity_dask.config.schema import Config, GroupConfig, LoraConfig, OptimizerConfig
from trinity_dask.trainer.checkpoints.checkpoint import complete_checkpoints
from trinity_dask.trainer.checkpoints.shards import saved_weights

WAIT_S = 240.0
SIZES = [6, 7, 1, 8]  # in the third step one of two ranks has no row
pytestmark = pytest.mark.timeout(900)


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


def train(cluster: RunCluster, cfg: Config, name: str, kill=None, sizes=SIZES) -> dict:
    host = start_actor(cluster.client, TrainerHost, slot="control", key=name, timeout=WAIT_S)
    try:
        arguments = (cfg, f"run-{name}", sizes, kill)
        return call(cluster.client, host.handle, "train", *arguments, timeout=WAIT_S)
    finally:
        stop_actor(host)


def config(
    job_dir: Path, model_path: str, ranks: int, strategy: str = "fsdp2", kind: str = "ppo"
) -> Config:
    """A stage of type ``kind`` with every model it uses; sharded if there are two ranks."""
    cfg = grpo_config(
        job_dir, model_path, max_checkpoints_to_keep=0, micro_batch_tokens=40, logits_mb=0
    )
    cfg.algorithm.algorithm_type = kind
    cfg.critic.optimizer = cfg.algorithm.optimizer
    cfg.cluster.trainer = GroupConfig(n_workers=ranks, nthreads=4)
    cfg.trainer.parallel.strategy = strategy
    return cfg


def last(cfg: Config) -> Path:
    return complete_checkpoints(str(cfg.job_dir))[-1]


def weights(cfg: Config) -> dict[str, torch.Tensor]:
    """Of the policy and, with one, the critic."""
    return {
        f"{path.name}/{name}": tensor
        for path in sorted(last(cfg).iterdir())
        if path.name in ("actor", "critic")
        for name, tensor in saved_weights(path)
    }


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=atol, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("kind", "policy", "other"),
    [
        ("ppo", "fsdp2", None),
        ("jsd", "fsdp2", None),
        ("ppo", "ddp", "fsdp2"),
        ("ppo", "fsdp2", "ddp"),
        ("jsd", "ddp", "fsdp2"),
    ],
)
def test_fault_31_shards_have_the_loss_and_the_gradient_of_one_rank(
    kind: str,
    policy: str,
    other: Optional[str],
    cluster: RunCluster,
    tmp_path: Path,
    model_path: str,
) -> None:
    """One SGD step: the weights move by the clipped gradient, so they tell it.

    ppo has a critic; jsd a teacher that says its log-probs and its whole distributions. They
    are laid out as the policy, or in their ``other`` way.
    """
    sgd = OptimizerConfig(optimizer_type="sgd", lr=1.0, weight_decay=0.0)
    found = {}
    for name, ranks in (("one", 1), ("two", 2)):
        cfg = config(tmp_path / name, model_path, ranks, policy if ranks > 1 else "ddp", kind)
        if ranks > 1:
            cfg.critic.strategy = cfg.trainer.frozen_strategy = other
        cfg.algorithm.optimizer = cfg.critic.optimizer = sgd
        if kind == "jsd":
            cfg.model.teacher_model_path = save_tiny_model(tmp_path / f"teacher-{name}", seed=5)
            cfg.algorithm.policy_loss_fn = "jsd"
            cfg.algorithm.rollout_correction.mode = "none"  # it has no ratio
        result = train(cluster, cfg, f"{kind}-{policy}-{other}-{name}", sizes=[7])
        found[name] = result["metrics"][1], weights(cfg)
    (expected, moved), (got, same) = found["one"], found["two"]
    names = [name for name in expected if name.startswith(("actor/", "critic/", "advantage/"))]
    assert {"ppo": "critic/vf_loss", "jsd": "advantage/jsd/mean"}[kind] in names
    for name in names:
        assert got[name] == pytest.approx(expected[name], abs=1e-6, rel=1e-6), name
    assert expected["actor/grad_norm"] > 0.1
    assert_close(same, moved, atol=1e-6)
    start = load_file(Path(model_path) / "model.safetensors")
    assert max(float((moved[f"actor/{n}"] - start[n]).abs().max()) for n in start) > 1e-3


def test_a_killed_rank_comes_back_and_other_numbers_of_ranks_go_on(
    cluster: RunCluster, tmp_path: Path, model_path: str
) -> None:
    quiet = config(tmp_path / "quiet", model_path, 2)
    expected = train(cluster, quiet, "quiet")
    assert expected["restarts"] == 0

    # rank 1 dies after step 3, one step after the checkpoint
    lossy = config(tmp_path / "lossy", model_path, 2)
    got = train(cluster, lossy, "lossy", kill=(3, 1))
    assert got["restarts"] == 1
    assert got["moved"] == [1]
    assert_close(weights(lossy), weights(quiet), atol=0)
    exported = json.loads((last(lossy) / "huggingface" / "config.json").read_text())
    assert exported["architectures"] == ["Qwen2ForCausalLM"]

    # the checkpoint of two ranks' shards after step 2, continued by one that holds everything
    shutil.copytree(tmp_path / "quiet", tmp_path / "alone")
    shutil.rmtree(tmp_path / "alone" / "global_step_4")
    alone = config(tmp_path / "alone", model_path, 1, "ddp")
    again = train(cluster, alone, "alone", sizes=[])
    assert sorted(again["metrics"]) == [3, 4]
    for step in (3, 4):
        for name in ("actor/grad_norm", "critic/vf_loss", "actor/final_loss"):
            value = expected["metrics"][step][name]
            assert again["metrics"][step][name] == pytest.approx(value, abs=1e-5, rel=1e-3), name
    assert_close(weights(alone), weights(quiet), atol=1e-4)


def test_a_sharded_policy_with_an_adapter(
    cluster: RunCluster, tmp_path: Path, model_path: str
) -> None:
    found = []
    for name, ranks in (("one", 1), ("two", 2)):
        cfg = config(tmp_path / name, model_path, ranks, "fsdp2" if ranks > 1 else "ddp", "grpo")
        cfg.model.lora = LoraConfig(rank=4, alpha=8.0)
        cfg.algorithm.kl_loss_fn = "k2"  # the reference is the base under the adapter
        cfg.algorithm.kl_loss_fn_args = {"kl_coef": 0.1}
        cfg.trainer.offload = True
        train(cluster, cfg, f"lora-{name}", sizes=[7, 6])
        found.append(load_file(last(cfg) / "actor/lora_adapter/adapter_model.safetensors"))
    assert any(float(v.abs().max()) > 0 for n, v in found[0].items() if "lora_B" in n)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-4, rtol=1e-3)

"""Every algorithm type trains three steps from its preset: rollouts, advantages, updates, syncs.

The cluster of all end-to-end tests serves all runs. What an algorithm computes is shown
elsewhere (tests/golden); here it is that the whole job works with nothing but the type's own
defaults.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from distributed import Client
from safetensors.torch import load_file

from trinity_dask import Run, load_config
from trinity_dask.algorithm import ALGORITHM, resolve_algorithm
from trinity_dask.algorithm.table import AlgorithmSpec

STEPS = 3
HERE = Path(__file__).parent
PLAIN = "{prompt_type: plaintext, apply_chat_template: false}"
# a metric that only this type has, besides those of all types
OWN = {
    "sft": "actor/sft_loss",
    "cpt": "actor/sft_loss",
    "raft": "actor/sft_loss",
    "dpo": "actor/dpo_loss",
    "ppo": "critic/vf_loss",
    "reinforceplusplus": "critic/advantages/mean",
    "reinforceplusplus_baseline": "critic/advantages/mean",
    "rloo": "critic/rewards/mean",
    "remax": "critic/rewards/mean",
    "grpo_verl": "critic/rewards/mean",
    "topr": "actor/topr_loss",
    "cispo": "actor/cispo_loss",
    "sapo": "actor/sapo_loss",
    "opmd": "actor/opmd_loss",
    "asymre": "actor/opmd_loss",
    "gspo": "actor/ppo_kl_seq",
    "mix": "actor/expert/sft_loss",
    "mix_chord": "actor/mu",
    "clipb": "advantage/frac_clipped",
    "clipv": "advantage/frac_clipped",
    "on_policy_distill": "advantage/kl/mean",
    "jsd": "advantage/jsd/mean",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("algorithms")


def overrides(kind: str, spec: AlgorithmSpec) -> list[str]:
    """What the preset of a type leaves open: the data, and the size of it."""
    if spec.schema != "experience":
        return file_rows(spec)
    walks = kind in ("multi_step_grpo", "gigpo")
    chosen = [
        "mode=both",
        "buffer.batch_size=4",
        "algorithm.repeat_times=4",
        f"buffer.total_steps={STEPS}",
        f"buffer.explorer_input.taskset.reward_fn={HERE}/algorithm_workflows.py:spread",
    ]
    if walks:
        workflow = f"{HERE}/algorithm_workflows.py:Walk"
        chosen.append(f"buffer.explorer_input.taskset.workflow={workflow}")
    if spec.uses_teacher:
        chosen += [
            "prepare_args.teacher_steps=5",
            "model.teacher_model_path=${prepare_args.dir}/teacher",
        ]
    if spec.sample_strategy == "mix":
        path = "${prepare_args.dir}/train.jsonl"
        chosen += [
            "buffer.train_batch_size=24",
            "++algorithm.sample_strategy_args.expert_data_ratio=0.33",
            "++algorithm.sample_strategy_args.sft_dataset_name=shown",
            "buffer.trainer_input.auxiliary_buffers="
            f"[{{name: shown, storage_type: file, path: '{path}', format: {PLAIN}}}]",
        ]
    return chosen


def file_rows(spec: AlgorithmSpec) -> list[str]:
    name = {"sft": "train", "cpt": "text", "dpo": "pairs"}[spec.schema]
    store = "buffer.trainer_input.experience_buffer"
    chosen = [
        "mode=train",
        "buffer.train_batch_size=16",
        f"{store}.storage_type=file",
        f"{store}.path=${{prepare_args.dir}}/{name}.jsonl",
    ]
    return chosen + ([f"{store}.format.prompt_key=text"] if spec.schema == "cpt" else [])


def run(kind: str, root: Path, client: Client, name: str = "", *more: str) -> Run:
    spec = resolve_algorithm({"algorithm_type": kind})
    cfg = load_config(
        "+experiment=sort_task",
        f"algorithm={kind}",
        "engine=torch",
        "monitor=quiet",
        f"checkpoint_root_dir={root}",
        f"name={name or kind}",
        "prepare_args.n_digits=2",
        "prepare_args.n_train=64",
        "prepare_args.n_eval=32",
        f"trainer.total_steps={STEPS}",
        "trainer.save_hf_checkpoint=never",
        "explorer.eval_on_startup=false",
        "explorer.eval_at_end=false",
        "buffer.explorer_input.eval_tasksets=[]",
        *overrides(kind, spec),
        *more,
    )
    with Run(cfg, client) as job:
        job.wait(timeout=500)
    return job


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", sorted(ALGORITHM.names()))
def test_three_steps_from_the_preset(kind: str, root: Path, client: Client) -> None:
    spec = resolve_algorithm({"algorithm_type": kind})
    job = run(kind, root, client)
    trained = trainer_metrics(job)
    assert list(trained["step"]) == list(range(1, STEPS + 1))
    assert all(math.isfinite(value) for value in trained["actor/final_loss"])
    assert (trained["actor/grad_norm"] > 0).any()
    for name in (OWN.get(kind, "actor/pg_loss"), *common_metrics(spec)):
        assert trained[name].notna().all(), name
    assert weights_moved(job)
    if spec.schema == "experience":
        check_accounts(job)


@pytest.mark.timeout(600)
def test_an_adapter_alone_is_trained_synchronised_and_saved(root: Path, client: Client) -> None:
    """The probes of every sync compare the engine's log-probs with the trainer's."""
    lora = ["model.lora.rank=4", "model.lora.alpha=8", "trainer.save_hf_checkpoint=last"]
    job = run("grpo", root, client, "adapter", *lora)
    check_accounts(job)
    trained = trainer_metrics(job)
    assert (trained["actor/kl_loss"].iloc[1:] > 0).any()  # from the base under the adapter
    checkpoint = Path(job.job_dirs[-1]) / f"global_step_{STEPS}"
    saved = load_file(checkpoint / "actor" / "lora_adapter" / "adapter_model.safetensors")
    assert any(float(tensor.abs().max()) > 0 for name, tensor in saved.items() if "lora_B" in name)
    assert not (checkpoint / "actor" / "model.safetensors").exists()
    assert (checkpoint / "huggingface" / "adapter_config.json").is_file()


def trainer_metrics(job: Run) -> pd.DataFrame:
    frame = job.metrics
    return frame[frame["role"] == "trainer"].sort_values("step")


def common_metrics(spec: AlgorithmSpec) -> list[str]:
    names = ["actor/grad_norm", "actor/lr", "response_length/mean", "sample/truncated_share"]
    if spec.kl_loss.active:
        names.append("actor/kl_loss")
    if spec.entropy_loss.measured:
        names.append("actor/entropy")
    if spec.schema == "experience" and spec.uses_old_logprobs:
        names += ["correction/ess", "correction/ratio_p99", "correction/gap"]
    return names


def weights_moved(job: Run) -> bool:
    stage = Path(job.job_dirs[-1])
    end = load_file(stage / f"global_step_{STEPS}" / "actor" / "model.safetensors")
    start = load_file(Path(str(job.stages[-1].model.model_path)) / "model.safetensors")
    return any(not torch.equal(start[name], tensor) for name, tensor in end.items())


def check_accounts(job: Run) -> None:
    status = job.status
    accounts = status["accounts"]
    assert accounts["scheduled"] == accounts["succeeded"] + accounts["failed"]
    assert accounts["failed"] == 0
    assert accounts["queued"] == accounts["leased"] == 0
    assert status["model_version"] == STEPS  # every step's weights reached the engine

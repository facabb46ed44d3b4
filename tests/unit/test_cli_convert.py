"""``trinity-dask convert``: every checkpoint, the listed ones, adapters, damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from trainer_support import engine, save_tiny_model

from trinity_dask.cli import main
from trinity_dask.config.schema import LoraConfig
from trinity_dask.trainer.checkpoints.checkpoint import (
    MARKER,
    is_complete,
    latest_complete,
    latest_hf_export,
    write_checkpoint,
)
from trinity_dask.trainer.checkpoints.export import export_policy, write_engine
from trinity_dask.trainer.model.policy_model import load_policy


@pytest.fixture
def job(tmp_path) -> Path:
    """Steps 1 and 2, and step 3 whose save was cut off."""
    job = tmp_path / "job"
    for step in (1, 2, 3):
        write_checkpoint(job, step, {}, lambda d: write_engine(engine().trainables, d))
    (job / "global_step_3" / MARKER).unlink()
    return job


def exported(job: Path) -> list[str]:
    return sorted(path.parent.parent.name for path in job.rglob("huggingface/config.json"))


def test_every_complete_checkpoint_is_converted_once(job, capsys):
    from transformers import AutoModelForCausalLM

    assert main(["convert", str(job)]) == 0
    assert exported(job) == ["global_step_1", "global_step_2"]
    target = job / "global_step_2" / "huggingface"
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    again = AutoModelForCausalLM.from_pretrained(target)
    weight = engine().policy.module.get_input_embeddings().weight.detach()
    torch.testing.assert_close(again.get_input_embeddings().weight, weight.to(torch.bfloat16))
    assert latest_hf_export(job) == target
    before = (target / "model.safetensors").stat().st_mtime_ns
    assert main(["convert", str(job)]) == 0
    assert "there already" in capsys.readouterr().out
    assert (target / "model.safetensors").stat().st_mtime_ns == before


def test_listed_steps_and_single_checkpoints(job, capsys):
    assert main(["convert", str(job), "--step", "1", "--dtype", "float32"]) == 0
    assert exported(job) == ["global_step_1"]
    assert main(["convert", str(job / "global_step_2")]) == 0
    assert exported(job) == ["global_step_1", "global_step_2"]
    assert main(["convert", str(job.parent)]) == 0  # a job with stages
    assert main(["convert", str(job), "--step", "3"]) == 1
    assert "no complete checkpoint of step 3" in capsys.readouterr().err
    assert main(["convert", str(job / "global_step_3")]) == 1
    assert main(["convert", str(job / "nothing")]) == 1


def test_an_export_that_is_made_again_or_deleted_leaves_the_checkpoint_complete(tmp_path):
    def fill(directory: Path) -> None:
        write_engine(engine().trainables, directory)
        export_policy(directory, torch.bfloat16)

    path = write_checkpoint(tmp_path, 1, {}, fill)
    assert not any(
        "huggingface" in name for name in json.loads((path / MARKER).read_text())["files"]
    )
    assert main(["convert", str(tmp_path), "--force", "--dtype", "float32"]) == 0
    assert json.loads((path / "huggingface/config.json").read_text())["dtype"] == "float32"
    assert is_complete(path)
    assert not list(path.glob(".huggingface*"))
    # a marker of before still names the files
    marker = json.loads((path / MARKER).read_text())
    marker["files"]["huggingface/config.json"] = {"size": 1}
    (path / MARKER).write_text(json.dumps(marker))
    shutil.rmtree(path / "huggingface")
    assert latest_complete(tmp_path) == path


def test_an_adapter_is_merged_into_its_base(tmp_path, capsys):
    base = save_tiny_model(tmp_path / "base")
    trained = engine(model=load_policy(base, lora=LoraConfig(rank=2)))
    job = tmp_path / "job"
    write_checkpoint(job, 1, {}, lambda d: write_engine(trained.trainables, d, base))
    assert main(["convert", str(job), "--dtype", "float32"]) == 0
    assert exported(job) == ["global_step_1"]
    assert main(["convert", str(job), "--adapter", "--force"]) == 0
    assert (job / "global_step_1/huggingface/adapter_config.json").is_file()
    (tmp_path / "base").rename(tmp_path / "moved")
    assert main(["convert", str(job), "--force"]) == 1
    assert "which is not there; put it back" in capsys.readouterr().err
    assert (job / "global_step_1/huggingface/adapter_config.json").is_file()

"""A model directory that cannot work is refused with the reason."""

import json

import pytest
from models_support import save_model

from trinity_dask.models.checks import (
    check_model_dir,
    check_vllm_cpu_head_size,
    head_size,
)


@pytest.fixture
def directory(tmp_path):
    save_model(tmp_path / "model")
    return tmp_path / "model"


def test_a_complete_directory_passes(directory):
    check_model_dir(str(directory))
    check_vllm_cpu_head_size(str(directory))


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("config.json", r"config\.json"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_what_is_missing_is_named(directory, file, named):
    (directory / file).unlink()
    with pytest.raises(ValueError, match=f"lacks .*{named}"):
        check_model_dir(str(directory))


def test_no_directory(tmp_path):
    with pytest.raises(ValueError, match="not a directory"):
        check_model_dir(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="not a directory"):
        check_model_dir("")


def test_head_size_16_is_refused_for_vllm_on_a_cpu(directory):
    config = json.loads((directory / "config.json").read_text())
    config["num_attention_heads"] = 4
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"head size 16.*engine_type=torch"):
        check_vllm_cpu_head_size(str(directory))


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"hidden_size": 64, "num_attention_heads": 2}, 32),
        ({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 128}, 128),
        ({"text_config": {"hidden_size": 128, "num_attention_heads": 2}}, 64),
        ({}, None),
    ],
)
def test_head_size(config, size):
    assert head_size(config) == size


def test_broken_config_is_named(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        check_vllm_cpu_head_size(str(directory))

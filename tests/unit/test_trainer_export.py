"""What a checkpoint holds: an engine that continues, and a model others can load."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from trainer_support import batch_of, engine, rows, tiny_model, weights

from trinity_dask.trainer.checkpoint import write_checkpoint
from trinity_dask.trainer.export import export_model, read_engine, write_engine


def test_a_resumed_engine_is_bit_equal(tmp_path):
    first = engine(mini_batches=2)
    first.train_step(batch_of(rows(8, seed=1)), 1)
    path = write_checkpoint(tmp_path, 1, {}, lambda d: write_engine(first, d))
    second = engine(model=tiny_model(seed=9), mini_batches=2)
    read_engine(second, path)
    results = [t.train_step(batch_of(rows(8, seed=2)), 2) for t in (first, second)]
    assert results[0] == results[1]
    for name, value in weights(first).items():
        torch.testing.assert_close(weights(second)[name], value, atol=0, rtol=0)


def test_a_fresh_engine_without_optimizer_state_can_be_saved(tmp_path):
    path = write_checkpoint(tmp_path, 0, {}, lambda d: write_engine(engine(), d))
    read_engine(engine(model=tiny_model(seed=3)), path)


def test_rng_is_part_of_the_state(tmp_path):
    trained = engine()
    path = write_checkpoint(tmp_path, 0, {}, lambda d: write_engine(trained, d))
    expected = torch.rand(3)
    torch.rand(5)
    read_engine(trained, path)
    torch.testing.assert_close(torch.rand(3), expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_export_loads_in_transformers_and_keeps_the_tokenizer_files(tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    model = tiny_model()
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text('{"mine": true}')
    (source / "chat_template.jinja").write_text("hello")
    (source / "model.safetensors.index.json").write_text("{}")
    export_model(model, tmp_path, dtype, str(source))
    target = tmp_path / "huggingface"
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (target / "chat_template.jinja").exists()
    assert not (target / "model.safetensors.index.json").exists()
    assert json.loads((target / "config.json").read_text())["dtype"] == str(dtype)[6:]
    assert "lm_head.weight" not in load_file(target / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(target)
    assert again.dtype == dtype
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value.to(dtype), atol=0, rtol=0)

"""What a checkpoint holds: an engine that continues, and a model others can load."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file
from trainer_support import batch_of, engine, rows, tiny_model, weights

from trinity_dask.config.schema import OptimizerConfig
from trinity_dask.trainer.checkpoints.checkpoint import write_checkpoint
from trinity_dask.trainer.checkpoints.export import export_policy, read_engine, write_engine
from trinity_dask.trainer.model.policy_model import load_policy


def test_a_resumed_engine_is_bit_equal(tmp_path):
    first = engine(mini_batches=2)
    first.train_step(batch_of(rows(8, seed=1)), 1)
    path = write_checkpoint(tmp_path, 1, {}, lambda d: write_engine(first.trainables, d))
    second = engine(model=tiny_model(seed=9), mini_batches=2)
    read_engine(second.trainables, path)
    results = [t.train_step(batch_of(rows(8, seed=2)), 2) for t in (first, second)]
    timeless = [{n: v for n, v in r.items() if not n.startswith("time/")} for r in results]
    assert timeless[0] == timeless[1]
    for name, value in weights(first).items():
        torch.testing.assert_close(weights(second)[name], value, atol=0, rtol=0)


def test_a_fresh_engine_without_optimizer_state_can_be_saved(tmp_path):
    path = write_checkpoint(tmp_path, 0, {}, lambda d: write_engine(engine().trainables, d))
    read_engine(engine(model=tiny_model(seed=3)).trainables, path)


def test_rng_is_part_of_the_state(tmp_path):
    trained = engine()
    path = write_checkpoint(tmp_path, 0, {}, lambda d: write_engine(trained.trainables, d))
    expected = torch.rand(3)
    torch.rand(5)
    read_engine(trained.trainables, path)
    torch.testing.assert_close(torch.rand(3), expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_export_loads_in_transformers_and_keeps_the_tokenizer_files(tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    trained = engine()
    trained.policy.module.save_pretrained(source)
    (source / "tokenizer.json").write_text('{"mine": true}')
    (source / "chat_template.jinja").write_text("hello")
    (source / "model.safetensors.index.json").write_text("{}")
    write_engine(trained.trainables, tmp_path, str(source))
    target = export_policy(tmp_path, dtype)
    assert target == tmp_path / "huggingface"
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (target / "chat_template.jinja").exists()
    assert not (target / "model.safetensors.index.json").exists()
    assert json.loads((target / "config.json").read_text())["dtype"] == str(dtype)[6:]
    assert "lm_head.weight" not in load_file(target / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(target)
    assert again.dtype == dtype
    for name, value in trained.policy.module.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value.to(dtype), atol=0, rtol=0)


def test_the_directory_of_the_policy_is_a_model_for_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    trained = engine()
    write_engine(trained.trainables, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "actor")
    for name, value in weights(trained).items():
        torch.testing.assert_close(again.state_dict()[name], value, atol=0, rtol=0)


def test_a_generation_config_is_kept_as_the_model_came_with_it(tmp_path):
    """Hub models ship a temperature without do_sample, which transformers refuses to save."""
    source = tmp_path / "source"
    tiny_model().save_pretrained(source)
    shipped = '{"temperature": 0.6, "top_p": 0.9, "do_sample": false}\n'
    (source / "generation_config.json").write_text(shipped)
    trained = engine(model=load_policy(source))
    write_engine(trained.trainables, tmp_path, str(source))
    assert (tmp_path / "actor" / "generation_config.json").read_text() == shipped
    write_engine(trained.trainables, tmp_path / "again")  # where there is no source to copy from
    kept = json.loads((tmp_path / "again" / "actor" / "generation_config.json").read_text())
    assert kept["temperature"] == 0.6
    read_engine(engine(model=load_policy(tmp_path / "actor")).trainables, tmp_path)


def test_actor_and_critic_share_one_checkpoint(tmp_path):
    first = {"actor": engine().policy, "critic": engine(model=tiny_model(seed=4)).policy}
    path = write_checkpoint(tmp_path, 1, {}, lambda d: write_engine(first, d))
    assert (path / "critic" / "optimizer.safetensors").is_file()
    second = {name: engine(model=tiny_model(seed=7)).policy for name in first}
    read_engine(second, path)
    for name, model in first.items():
        for (a, value), (b, same) in zip(
            model.full_weights(), second[name].full_weights(), strict=True
        ):
            assert a == b
            torch.testing.assert_close(same, value, atol=0, rtol=0)


def test_momentum_of_sgd_is_part_of_the_state(tmp_path):
    sgd = OptimizerConfig(optimizer_type="sgd", lr=0.1, momentum=0.9)
    first, second = engine(optimizer=sgd), engine(optimizer=sgd, model=tiny_model(seed=2))
    first.train_step(batch_of(rows(8, seed=1)), 1)
    read_engine(
        second.trainables,
        write_checkpoint(tmp_path, 1, {}, lambda d: write_engine(first.trainables, d)),
    )
    for trained in (first, second):
        trained.train_step(batch_of(rows(8, seed=2)), 2)
    for name, value in weights(first).items():
        torch.testing.assert_close(weights(second)[name], value, atol=0, rtol=0)


def test_offloaded_models_train_alike(tmp_path):
    plain, offloaded = engine(), engine(offload=True)
    for step in (1, 2):
        for trained in (plain, offloaded):
            trained.train_step(batch_of(rows(8, seed=step)), step)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(offloaded)[name], value, atol=0, rtol=0)
    assert all(p.grad is None for p in offloaded.policy.module.parameters())
    with offloaded.policy.on_device(), offloaded.policy.on_device():
        pass
    path = write_checkpoint(tmp_path, 2, {}, lambda d: write_engine(offloaded.trainables, d))
    read_engine(plain.trainables, path)


def test_a_checkpoint_without_adapter_is_refused_by_a_policy_with_one(tmp_path):
    from trinity_dask.config.schema import LoraConfig
    from trinity_dask.models.lora import add_adapter

    path = write_checkpoint(tmp_path, 1, {}, lambda d: write_engine(engine().trainables, d))
    model = tiny_model()
    add_adapter(model, asdict(LoraConfig(rank=2)))
    with pytest.raises(FileNotFoundError, match="no adapter at"):
        read_engine(engine(model=model).trainables, path)

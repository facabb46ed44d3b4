"""Adapters: what is trained, what is saved, what an engine gets."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from models_support import PROMPT, engine_spec, hf_logprobs, run, save_model, send_named
from safetensors.torch import load_file
from trainer_support import GRPO, batch_of, engine, rows, save_tiny_model, weights

from trinity_dask.config.schema import LoraConfig
from trinity_dask.models.lora import (
    adapter_off,
    adapter_parameters,
    add_adapter,
    load_adapter,
)
from trinity_dask.models.protocol import SamplingParams, WeightUpdate
from trinity_dask.models.torch.engine import TorchEngine, load_model
from trinity_dask.trainer.checkpoints.checkpoint import ADAPTER, write_checkpoint
from trinity_dask.trainer.checkpoints.export import export_policy, read_engine, write_engine
from trinity_dask.trainer.model.frozen import BaseUnderAdapter
from trinity_dask.trainer.model.policy_model import load_policy
from trinity_dask.weights.checksum import checksum
from trinity_dask.weights.files import write_safetensors

LORA = LoraConfig(rank=4, alpha=8.0)


def adapted(path: str, **kwargs):
    return load_policy(path, lora=LORA, **kwargs)


def stirred(model, seed: int = 0):
    """The adapter with an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_only_the_adapter_is_trained(path):
    trained = engine(model=adapted(path))
    before = weights(trained)
    metrics = trained.train_step(batch_of(rows(8)), 1)
    assert metrics["actor/grad_norm"] > 0
    moved = {n for n, value in weights(trained).items() if not torch.equal(value, before[n])}
    assert moved
    assert all(".lora_" in name for name in moved)
    assert not any("lm_head" in n or "embed" in n for n in dict(trained.policy.full_weights()))


def test_a_new_adapter_changes_nothing_and_the_base_stays_reachable(path):
    base, model = load_policy(path), adapted(path)
    ids = torch.arange(6)[None]
    torch.testing.assert_close(model(ids).logits, base(ids).logits)
    stirred(model)
    assert not torch.allclose(model(ids).logits, base(ids).logits)
    with adapter_off(model):
        torch.testing.assert_close(model(ids).logits, base(ids).logits)
    assert not torch.allclose(model(ids).logits, base(ids).logits)


def test_the_reference_is_the_base_under_the_adapter(path):
    cfg = {**GRPO, "kl_loss_fn": "k2", "kl_loss_fn_args": {"kl_coef": 0.5}}
    found = []
    for own_reference in (True, False):
        model = stirred(adapted(path))
        trained = engine(cfg, model=model, reference=load_policy(path) if own_reference else None)
        if not own_reference:
            trained.reference = BaseUnderAdapter(model)
        found.append(trained.train_step(batch_of(rows(8)), 1)["actor/kl_loss"])
    assert found[0] > 0.01
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_an_adapter_checkpoint_continues_bit_for_bit(path, tmp_path):
    from peft import PeftModel

    first = engine(model=adapted(path))
    first.train_step(batch_of(rows(8, seed=1)), 1)
    saved = write_checkpoint(tmp_path, 1, {}, lambda d: write_engine(first.trainables, d, path))
    assert not (saved / "actor" / "model.safetensors").exists()
    second = engine(model=adapted(path))
    read_engine(second.trainables, saved)
    results = [t.train_step(batch_of(rows(8, seed=2)), 2) for t in (first, second)]
    assert results[0]["actor/final_loss"] == results[1]["actor/final_loss"]
    for name, value in weights(first).items():
        torch.testing.assert_close(weights(second)[name], value, atol=0, rtol=0)
    # and peft itself loads what was saved
    third = engine(model=adapted(path))
    read_engine(third.trainables, saved)
    wrapped = PeftModel.from_pretrained(load_policy(path), str((saved / ADAPTER).parent))
    ids = torch.arange(6)[None]
    torch.testing.assert_close(wrapped(ids).logits, third.policy.module(ids).logits)


@torch.no_grad()
def merged_weights(model):
    """Weights of the whole model by its own names, the adapter added to the base by peft."""
    merged = {}
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            merged[name.replace(".base_layer.", ".")] = parameter.detach()
    for name, part in model.named_modules():
        if hasattr(part, "get_delta_weight"):
            delta = part.get_delta_weight("default")
            merged[f"{name}.weight"] = part.base_layer.weight.detach() + delta
    return merged


@pytest.mark.parametrize("merge", [False, True])
def test_the_export_is_the_adapter_or_the_merged_model(path, tmp_path, merge):
    from transformers import AutoModelForCausalLM

    model = stirred(adapted(path))
    write_engine(engine(model=model).trainables, tmp_path, path)
    target = export_policy(tmp_path, torch.float32, merge)
    assert (target / "adapter_model.safetensors").exists() is not merge
    assert (target / "config.json").exists() is merge
    if not merge:
        assert load_file(target / "adapter_model.safetensors").keys() == (
            adapter_parameters(model).keys()
        )
        return
    again = AutoModelForCausalLM.from_pretrained(target)
    for name, value in merged_weights(model).items():
        torch.testing.assert_close(again.state_dict()[name], value, atol=1e-6, rtol=1e-6)
    ids = torch.arange(6)[None]
    torch.testing.assert_close(again(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_an_adapter_of_another_rank_is_refused(path):
    other = load_policy(path, lora=LoraConfig(rank=2))
    with pytest.raises(ValueError, match=r"lora_A.weight'; use the rank"):
        load_adapter(adapted(path), adapter_parameters(other))
    with pytest.raises(FileNotFoundError, match="no adapter"):
        load_policy(path, lora=LoraConfig(rank=2, path="/nowhere"))


@pytest.mark.parametrize("method", ["memory", "checkpoint", "nccl"])
def test_fault_14_the_adapter_reaches_the_engine_and_not_the_frozen_base(tmp_path, method):
    """Checksum of what was sent, and the log-probs of the trainer's model, on both sides."""
    directory = save_model(tmp_path / "model")
    spec = engine_spec(directory)
    spec.model["lora"] = asdict(LORA)
    model = load_model(directory, "float32", "cpu")
    add_adapter(model, asdict(LORA))

    async def serve():
        served = TorchEngine(spec)
        await served.prepare()
        seen = []
        for version in (1, 2):
            stirred(model, seed=version)
            named = [(name, p.detach()) for name, p in adapter_parameters(model).items()]
            receipt = await send_named(served, named, version, tmp_path / "same.st", method)
            assert receipt.checksum == checksum(named)
            assert receipt.n_bytes == sum(tensor.numel() * 4 for _, tensor in named)
            (answer,) = await served.generate(PROMPT, SamplingParams(max_tokens=8), f"r{version}")
            expected = hf_logprobs(model, PROMPT, answer.token_ids, 1.0)
            np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
            with adapter_off(model):
                base = hf_logprobs(model, PROMPT, answer.token_ids, 1.0)
            assert np.abs(answer.logprobs - base).max() > 1e-2
            assert (answer.versions == version).all()
            seen.append(receipt.checksum)
        write_safetensors(str(tmp_path / "x.st"), [("a", torch.zeros(1))])
        with pytest.raises(ValueError, match=r"does not fit model\.lora"):
            await served.update_weights(WeightUpdate(3, "memory", path=str(tmp_path / "x.st")))
        await served.close()
        return seen

    first, second = run(serve())
    assert first != second

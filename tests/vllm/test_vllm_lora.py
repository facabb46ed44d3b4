"""The adapter in a real vLLM on a CPU: not merged, chosen by every request."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import asdict

import numpy as np
import pytest
import torch
from models_support import PROMPT, engine_spec, free_port, hf_logprobs, save_model

from trinity_dask.config.schema import LoraConfig
from trinity_dask.models.engine_actor import EngineActor
from trinity_dask.models.lora import adapter_off, adapter_parameters, add_adapter
from trinity_dask.models.protocol import SamplingParams, WeightGroupSpec, WeightUpdate
from trinity_dask.models.torch_engine import load_model
from trinity_dask.models.weight_transfer import (
    checksum,
    make_group,
    send,
    tensor_meta,
    write_safetensors,
)

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

START_S, CALL_S = 600.0, 240.0
LORA = asdict(LoraConfig(rank=4, alpha=8.0))
names = itertools.count()


class Served:
    def __init__(self, path: str) -> None:
        self.loop = asyncio.new_event_loop()
        spec = engine_spec(path, "vllm")
        spec.model["lora"] = LORA
        self.actor = EngineActor(spec)
        self.model = load_model(path, "float32", "cpu")
        add_adapter(self.model, LORA)

    def run(self, coroutine, timeout_s: float = CALL_S):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, timeout_s))

    def stir(self, seed: int) -> list:
        generator = torch.Generator().manual_seed(seed)
        named = adapter_parameters(self.model)
        with torch.no_grad():
            for value in named.values():
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))
        return [(name, value.detach()) for name, value in named.items()]

    def assert_serves_the_adapter(self, version: int) -> None:
        params = SamplingParams(max_tokens=8)
        (answer,) = self.run(self.actor.generate(PROMPT, params, f"lora-{next(names)}"))
        expected = hf_logprobs(self.model, PROMPT, answer.token_ids, 1.0)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-3)
        with adapter_off(self.model):
            base = hf_logprobs(self.model, PROMPT, answer.token_ids, 1.0)
        assert np.abs(answer.logprobs - base).max() > 1e-2
        assert (answer.versions == version).all()
        tokens = [*PROMPT, *answer.token_ids.tolist()]
        probe = self.run(self.actor.logprobs(tokens))[len(PROMPT) - 1 :]
        np.testing.assert_allclose(probe, expected, atol=1e-3)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(save_model(tmp_path_factory.mktemp("model")))
    served.run(served.actor.prepare(), START_S)
    served.run(served.actor.open())
    yield served
    served.run(served.actor.close())
    served.loop.close()


def test_fault_15_every_request_uses_the_adapter_and_its_newest_version(served, tmp_path):
    """The same prompt before and after each update: neither base, nor old cache, nor old file."""
    for version in (1, 2):
        named = served.stir(version)
        file = str(tmp_path / "adapter.safetensors")  # overwritten in place
        sent = write_safetensors(file, named)
        receipt = served.run(
            served.actor.update_weights(WeightUpdate(version, "memory", path=file))
        )
        assert receipt.checksum == sent.value == checksum(named)
        served.assert_serves_the_adapter(version)


def test_the_adapter_comes_over_the_group(served):
    named = served.stir(3)
    spec = WeightGroupSpec("127.0.0.1", free_port(), 2, 1, 1, "gloo", 60.0)

    async def transfer():
        join = asyncio.to_thread(make_group, spec, 0, True)
        group, _ = await asyncio.gather(join, served.actor.init_weight_group(spec))
        meta = tensor_meta(named)
        update = WeightUpdate(3, "nccl", meta, 1, None, 4096)
        sending = asyncio.to_thread(send, group, named, meta, 4096)
        digest, receipt = await asyncio.gather(sending, served.actor.update_weights(update))
        group.close()
        return digest, receipt

    digest, receipt = served.run(transfer())
    assert receipt.checksum == digest.value == checksum(named)
    served.assert_serves_the_adapter(3)


def test_a_request_answered_without_the_adapter_is_an_error(served, monkeypatch):
    engine = served.actor._engine
    original = engine._llm.generate
    monkeypatch.setattr(
        engine._llm, "generate", lambda *args, lora_request=None, **kw: original(*args, **kw)
    )
    with pytest.raises(RuntimeError, match="with adapter None"):
        served.run(served.actor.generate(PROMPT, SamplingParams(max_tokens=2), "base"))

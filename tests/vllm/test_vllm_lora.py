"""The adapter in a real vLLM on a CPU: not merged, chosen by every request."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import asdict

import numpy as np
import pytest
import torch
from models_support import PROMPT, engine_spec, hf_logprobs, save_model, send_named

from trinity_dask.config.schema import LoraConfig
from trinity_dask.models.actor.actor import EngineActor
from trinity_dask.models.lora import adapter_off, adapter_parameters, add_adapter
from trinity_dask.models.protocol import SamplingParams
from trinity_dask.models.torch.engine import load_model
from trinity_dask.weights.checksum import checksum

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

START_S, CALL_S = 600.0, 240.0
LORA = asdict(LoraConfig(rank=4, alpha=8.0))
names = itertools.count()
versions = itertools.count(1)


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


@pytest.mark.parametrize("method", ["memory", "checkpoint", "nccl"])
def test_fault_15_every_request_uses_the_adapter_and_its_newest_version(served, tmp_path, method):
    """The same prompt before and after each update: neither base, nor old cache, nor old file."""
    for _ in range(2):
        version = next(versions)
        named = served.stir(version)
        path = tmp_path / "adapter.safetensors"  # overwritten in place
        receipt = served.run(send_named(served.actor, named, version, path, method))
        assert receipt.checksum == checksum(named)
        assert receipt.n_bytes == sum(4 * tensor.numel() for _, tensor in named)
        served.assert_serves_the_adapter(version)


def test_a_request_answered_without_the_adapter_is_an_error(served, monkeypatch):
    engine = served.actor._engine
    original = engine._llm.generate
    monkeypatch.setattr(
        engine._llm, "generate", lambda *args, lora_request=None, **kw: original(*args, **kw)
    )
    with pytest.raises(RuntimeError, match="with adapter None"):
        served.run(served.actor.generate(PROMPT, SamplingParams(max_tokens=2), "base"))

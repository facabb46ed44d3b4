"""A small model directory with opinions, engines over it, and a sender of weights."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trinity_dask.demo.sort_digits import SortDigitsSpec, write_model
from trinity_dask.models.protocol import (
    EngineSpec,
    InferenceEngine,
    WeightGroupSpec,
    WeightReceipt,
    WeightUpdate,
)
from trinity_dask.models.torch.engine import load_model, sequence_logprobs
from trinity_dask.weights.broadcast import make_group, named_weights, send, tensor_meta
from trinity_dask.weights.checksum import checksum
from trinity_dask.weights.files import write_safetensors
from trinity_dask.weights.memory import SharedFiles

MAX_LEN = 64
SHARED = SharedFiles()
PROMPT = [84, 80, 83, 85, 1, 21, 17, 24]


def save_model(directory: Path, seed: int = 0) -> str:
    """The demo's model (head size 32), its weights spread so that some tokens are likely."""
    write_model(SortDigitsSpec(seed=seed), directory)
    model = load_model(str(directory), "float32", "cpu")
    for _, parameter in named_weights(model):
        parameter.mul_(8.0 if parameter.ndim == 2 else 1.0)
    write_safetensors(str(directory / "model.safetensors"), named_weights(model))
    return str(directory)


def engine_spec(path: str, engine_type: str = "torch", **config: Any) -> EngineSpec:
    return EngineSpec(
        slot="engine-0",
        engine_type=engine_type,
        model_path=path,
        config={"max_num_seqs": 256, "seed": 1, **config},
        model={"max_model_len": MAX_LEN, "dtype": "float32"},
    )


def hf_logprobs(model: Any, prompt: list[int], response: Any, temperature: float) -> np.ndarray:
    """What Hugging Face says of the response tokens."""
    tokens = [*prompt, *(int(t) for t in response)]
    return sequence_logprobs(model, tokens, temperature)[len(prompt) - 1 :]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(coroutine: Coroutine[Any, Any, Any], timeout_s: float = 240.0) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))


Named = list[tuple[str, torch.Tensor]]


async def send_by_group(
    engine: InferenceEngine, model: Any, version: int, generation: int, bucket_bytes: int = 40_000
) -> WeightReceipt:
    """Trainer rank 0: form the group, send ``model``, and check the engine's receipt."""
    return await send_over_group(engine, named_weights(model), version, generation, bucket_bytes)


async def send_over_group(
    engine: InferenceEngine, named: Named, version: int, generation: int, bucket_bytes: int
) -> WeightReceipt:
    spec = WeightGroupSpec("127.0.0.1", free_port(), 2, 1, generation, "gloo", 60.0)
    join = asyncio.to_thread(make_group, spec, 0, True)
    group, _ = await asyncio.gather(join, engine.init_weight_group(spec))
    meta = tensor_meta(named)
    update = WeightUpdate(version, "nccl", meta, generation, None, bucket_bytes)
    sending = asyncio.to_thread(send, group, named, meta, bucket_bytes)
    digest, receipt = await asyncio.gather(sending, engine.update_weights(update))
    await engine.teardown_weight_group()
    group.close()
    assert receipt.checksum == digest.value == checksum(named)
    assert receipt.n_bytes == digest.n_bytes
    return receipt


async def send_by_file(
    engine: InferenceEngine, model: Any, version: int, path: Path, method: str
) -> WeightReceipt:
    """Method ``memory`` with the trainer's writer of shared files, ``checkpoint`` with a file."""
    return await send_in_file(engine, named_weights(model), version, path, method)


async def send_in_file(
    engine: InferenceEngine, named: Named, version: int, path: Path, method: str
) -> WeightReceipt:
    write = SHARED.write if method == "memory" else write_safetensors
    digest = write(str(path), named)
    receipt = await engine.update_weights(WeightUpdate(version, method, path=str(path)))
    assert receipt.checksum == digest.value
    return receipt


async def send_named(
    engine: InferenceEngine, named: Named, version: int, path: Path, method: str
) -> WeightReceipt:
    """``named`` by any method."""
    if method == "nccl":
        return await send_over_group(engine, named, version, version, 4096)
    return await send_in_file(engine, named, version, path, method)


def randomised(model: Any, seed: int) -> Any:
    """``model`` with other weights, in place."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in named_weights(model):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.15 * noise if parameter.ndim == 2 else 0.05 * noise)
    return model

"""vLLM on a CPU computes what the trainer does, before and after updates by each method.

A few architectures that differ in what vLLM keeps beside the weights: packed experts, soft-capping,
windows, fused and transposed layers. docs/make_models.py tries all of them.
"""

import pytest
import torch
from architectures import Stand, vllm_sync
from models_support import engine_spec, run, send_named

from trinity_dask.trainer.model.policy_model import load_policy
from trinity_dask.weights.broadcast import named_weights

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma2", "gpt2"])
def test_log_probs_are_the_trainer_s_before_and_after_updates(name, tmp_path):
    assert vllm_sync(Stand(name, tmp_path)) == "✓"


def test_what_the_engine_cannot_hold_ends_the_update(tmp_path):
    """A tensor that no parameter takes, and a parameter that no tensor fills, are named."""
    from trinity_dask.models.vllm.engine import VLLMEngine

    stand = Stand("qwen3-moe", tmp_path)
    own = named_weights(load_policy(stand.path))  # transformers' own names: fused experts
    named = [("model.layers.0.self_attn.r_proj.weight", torch.ones(4, 4)), *own]

    async def use() -> None:
        engine = VLLMEngine(engine_spec(stand.path, "vllm"))
        await engine.prepare()
        try:
            with pytest.raises(Exception, match=r"r_proj|does not hold what was sent"):
                await send_named(engine, named, 1, tmp_path / "w.safetensors", "checkpoint")
        finally:
            await engine.close()

    run(use())

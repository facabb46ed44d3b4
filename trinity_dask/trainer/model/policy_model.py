"""The policy as the trainer holds it: float32 master weights, no dropout.

Invariant: what is trained is float32 whatever the sampler's dtype is, and a forward pass
is deterministic, so the ratio to the same weights is exactly 1.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from torch.utils.checkpoint import checkpoint

from trinity_dask.config.schema import LoraConfig
from trinity_dask.models.checks import attention_implementation
from trinity_dask.models.lora import add_adapter
from trinity_dask.trainer.model.sharded import Skeleton
from trinity_dask.trainer.ranks.parallel import Sharding, is_sharded

# from_pretrained swaps global default devices and initialisers: two loads at once in one
# process leave tensors without data
LOADING = threading.Lock()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def torch_dtype(name: str) -> torch.dtype:
    """Raises ValueError for a dtype that the policy cannot have."""
    if name not in DTYPES:
        raise ValueError(f"model.dtype {name!r} is not supported; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


def load_policy(
    model_path: str | Path,
    *,
    device: str = "cpu",
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    lora: Optional[LoraConfig] = None,
    fused_kernels: bool = False,
    attention: Optional[str] = None,
    sharding: Optional[Sharding] = None,
    trained: bool = True,
) -> Any:
    """A Hugging Face causal language model for training, float32 on ``device``.

    Args:
        lora: with a rank above 0 only an adapter wants a gradient.
        fused_kernels: take liger-kernel's layers on a GPU where it is installed.
        attention: ``model.attn_implementation``; None is what the architecture needs.
        sharding: read only this rank's shards; None reads the whole model.
        trained: False for a model that only scores; its shards are kept in the compute dtype.

    Raises:
        OSError, ValueError: ``model_path`` is no model, or lacks weights (from transformers).
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # it would end up in a worker's log
    path, trust = str(model_path), {"trust_remote_code": trust_remote_code}
    skeleton = None
    with LOADING:
        config = AutoConfig.from_pretrained(path, **trust)
        options = {"attn_implementation": attention_implementation(config, attention), **trust}
        if sharding is not None:
            skeleton = Skeleton(AutoModelForCausalLM, path, config, **options)
            model: Any = skeleton.module.requires_grad_(trained)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    if fused_kernels and device != "cpu" and importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        # norms, rotary embedding and MLP; its fused loss knows no log-prob of each token
        _apply_liger_kernel_to_instance(
            model=model, cross_entropy=False, fused_linear_cross_entropy=False
        )
    if lora is not None and lora.rank > 0:
        with LOADING:
            add_adapter(model, asdict(lora), path)
    if skeleton is not None and sharding is not None:
        skeleton.fill(sharding, device)
    return deterministic(model, device, gradient_checkpointing)


def deterministic(model: Any, device: str, gradient_checkpointing: bool) -> Any:
    """``model`` on ``device`` in evaluation mode, so without dropout wherever the architecture has
    it: with it the trainer's policy would not be the sampler's.

    Raises:
        ValueError: it has no layers that transformers could compute again in the backward pass.
    """
    if not is_sharded(model):  # shards are there already
        model.to(device)
    for module in model.modules():  # should somebody train() it
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.eval()
    if not gradient_checkpointing:
        return model
    from transformers.modeling_layers import GradientCheckpointingLayer

    # transformers checkpoints in training mode only, where dropout is on too: so its layers are
    # only marked, and are computed again by us
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"trainer.gradient_checkpointing=true: {type(model).__name__} has no layers that could "
            "be computed again (transformers' GradientCheckpointingLayer); set it to false"
        )
    for layer in layers:
        layer.forward = partial(_computed_again, layer.forward)
    return model


def _computed_again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``forward`` that keeps its inputs only, and is called once more in the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # nothing in it is random
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def autocast_dtype(name: str) -> Optional[torch.dtype]:
    dtype = torch_dtype(name)
    return None if dtype == torch.float32 else dtype

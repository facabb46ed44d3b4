"""The policy as the trainer holds it: float32 master weights, no dropout.

Invariant: what is trained is float32 whatever the sampler's dtype is, and a forward pass
is deterministic, so the ratio to the same weights is exactly 1.
"""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import torch

from trinity_dask.config.schema import LoraConfig
from trinity_dask.models.lora import add_adapter

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
) -> Any:
    """A Hugging Face causal language model for training, float32 on ``device``.

    Args:
        lora: with a rank above 0 only an adapter wants a gradient.
        fused_kernels: take liger-kernel's layers on a GPU where it is installed.

    Raises:
        OSError, ValueError: ``model_path`` is no model, or lacks weights (from transformers).
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # it would end up in a worker's log
    with LOADING:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(model_path),
            dtype=torch.float32,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )
    if fused_kernels and device != "cpu" and importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        # norms, rotary embedding and MLP; its fused loss knows no log-prob of each token
        _apply_liger_kernel_to_instance(
            model=model, cross_entropy=False, fused_linear_cross_entropy=False
        )
    if lora is not None and lora.rank > 0:
        add_adapter(model, asdict(lora), str(model_path))
    return deterministic(model, device, gradient_checkpointing)


def deterministic(model: Any, device: str, gradient_checkpointing: bool) -> Any:
    """``model`` on ``device`` without any dropout: with it the trainer's policy would not be the
    sampler's."""
    model.to(device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.eval()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # transformers checkpoints only in training mode
    return model


def autocast_dtype(name: str) -> Optional[torch.dtype]:
    dtype = torch_dtype(name)
    return None if dtype == torch.float32 else dtype

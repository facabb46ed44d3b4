"""Moving a model's memory between device and CPU.

Invariant: a parameter keeps its identity (the optimizer and tied names refer to the same
object); only its storage moves, and its values do not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(module: Any, device: torch.device) -> None:
    """Move parameters, buffers and shards; gradients are dropped."""
    for parameter in module.parameters():
        parameter.grad = None
    module.to(device)


def optimizer_to_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's moments; step counters stay where the optimizer keeps them."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[key] = value.to(device)

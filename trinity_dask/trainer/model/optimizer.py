"""The optimizer, and its learning rate as a function of the train step.

Invariant: all mini-batches of a train step share its learning rate, so the schedule counts
what the config counts, however many updates a step is cut into.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

import torch

from trinity_dask.config.fields import choices_of
from trinity_dask.config.schema import OptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from 0, then constant, linear, cosine or wsd down to a floor.

    Step 1 is the first train step. Step ``warmup_steps`` is the first at the full rate,
    ``total_steps`` the one at ``min_ratio`` of it; later steps stay there. ``wsd`` (warm-up,
    stable, decay; arXiv 2404.06395) is constant until the last ``decay_ratio`` of all steps
    and then linear.

    Raises:
        ValueError: an unknown type, or a decaying one without ``total_steps``.
    """

    kind: str
    warmup_steps: int
    total_steps: Optional[int]
    min_ratio: float
    decay_ratio: float = 0.2

    def __post_init__(self) -> None:
        allowed = choices_of(OptimizerConfig, "lr_scheduler_type")
        if self.kind not in allowed:
            raise ValueError(
                f"unknown lr_scheduler_type {self.kind!r}; allowed: {', '.join(allowed)}"
            )
        if self.kind != "constant" and self.total_steps is None:
            raise ValueError(
                f"lr_scheduler_type {self.kind!r} needs to know the last step: set "
                "trainer.total_steps, or use 'constant'"
            )

    def factor(self, step: int) -> float:
        """Share of the base learning rate at train step ``step`` >= 1."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant" or self.total_steps is None:
            return 1.0
        start = max(self.warmup_steps, 1)  # the last step at the full rate
        if self.kind == "wsd":
            n_decay = max(round(self.decay_ratio * self.total_steps), 1)
            start = max(start, self.total_steps - n_decay)
        done = min(max(step - start, 0) / max(self.total_steps - start, 1), 1.0)
        left = 0.5 * (1.0 + math.cos(math.pi * done)) if self.kind == "cosine" else 1.0 - done
        return self.min_ratio + (1.0 - self.min_ratio) * left


def build_schedule(cfg: OptimizerConfig, total_steps: Optional[int]) -> Schedule:
    return Schedule(
        cfg.lr_scheduler_type,
        cfg.lr_warmup_steps,
        total_steps,
        cfg.min_lr_ratio,
        cfg.wsd_decay_ratio,
    )


def build_optimizer(
    cfg: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """AdamW (one fused kernel), SGD or 8-bit AdamW over the parameters that want a gradient.

    Raises:
        ValueError: an unknown ``optimizer_type``.
        ImportError: ``adamw8bit`` without bitsandbytes.
    """
    trainable = [p for p in parameters if p.requires_grad]
    allowed = choices_of(OptimizerConfig, "optimizer_type")
    if cfg.optimizer_type not in allowed:
        raise ValueError(
            f"unknown optimizer_type {cfg.optimizer_type!r}; allowed: {', '.join(allowed)}"
        )
    if cfg.optimizer_type == "sgd":
        return torch.optim.SGD(
            trainable, lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay
        )
    adam: dict[str, Any] = {
        "lr": cfg.lr,
        "betas": (cfg.betas[0], cfg.betas[1]),
        "eps": cfg.eps,
        "weight_decay": cfg.weight_decay,
    }
    if cfg.optimizer_type == "adamw":
        return torch.optim.AdamW(trainable, fused=True, **adam)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ImportError(
            "algorithm.optimizer.optimizer_type=adamw8bit needs bitsandbytes on the trainer's "
            f"workers: pip install bitsandbytes, or use adamw ({error})"
        ) from error
    return AdamW8bit(trainable, **adam)

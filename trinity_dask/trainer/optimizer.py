"""The optimizer, and its learning rate as a function of the train step.

Invariant: all mini-batches of a train step share its learning rate, so the schedule counts
what the config counts, however many updates a step is cut into.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

import torch

from trinity_dask.config.schema import OptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from 0, then constant, linear or cosine down to a floor.

    Step 1 is the first train step. Step ``warmup_steps`` is the first at the full rate,
    ``total_steps`` the one at ``min_ratio`` of it; later steps stay there.

    Raises:
        ValueError: an unknown type, or a decaying one without ``total_steps``.
    """

    kind: str
    warmup_steps: int
    total_steps: Optional[int]
    min_ratio: float

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise ValueError(
                f"unknown lr_scheduler_type {self.kind!r}; allowed: constant, linear, cosine"
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
        start = max(self.warmup_steps, 1)
        done = min((step - start) / max(self.total_steps - start, 1), 1.0)
        left = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_ratio + (1.0 - self.min_ratio) * left


def build_schedule(cfg: OptimizerConfig, total_steps: Optional[int]) -> Schedule:
    return Schedule(cfg.lr_scheduler_type, cfg.lr_warmup_steps, total_steps, cfg.min_lr_ratio)


def build_optimizer(
    cfg: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """AdamW (one fused kernel) or SGD over the parameters that want a gradient.

    Raises:
        ValueError: an unknown ``optimizer_type``.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if cfg.optimizer_type == "adamw":
        return torch.optim.AdamW(
            trainable,
            lr=cfg.lr,
            betas=(cfg.betas[0], cfg.betas[1]),
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            fused=True,
        )
    if cfg.optimizer_type == "sgd":
        return torch.optim.SGD(trainable, lr=cfg.lr, weight_decay=cfg.weight_decay)
    raise ValueError(f"unknown optimizer_type {cfg.optimizer_type!r}; allowed: adamw, sgd")


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr

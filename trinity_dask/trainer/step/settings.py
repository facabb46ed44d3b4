"""The numbers of the config that a rank trains by.

Invariant: the engine reads no configuration, so a test can set every number by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch

from trinity_dask.config.schema import Config, CriticConfig, OptimizerConfig
from trinity_dask.trainer.model.logprobs import LOGITS_BYTES
from trinity_dask.trainer.ranks.layout import CRITIC, POLICY, offload_of


@dataclass(frozen=True)
class EngineSettings:
    """See ``trainer``, ``critic``, ``model`` and ``algorithm`` in the configuration.

    ``response_tokens``: the response budget, the length L of Dr.GRPO's divisor.
    """

    optimizer: OptimizerConfig
    total_steps: Optional[int] = None
    temperature: float = 1.0
    autocast: Optional[torch.dtype] = None
    offload: bool = False
    critic_offload: bool = False
    logits_bytes: int = LOGITS_BYTES
    seed: int = 42
    grad_clip: float = 1.0
    ppo_epochs: int = 1
    mini_batches: int = 1
    min_mini_batch_rows: int = 1
    micro_batch_tokens: int = 65_536
    share_prompts: bool = True
    variance_proxies: bool = False
    response_tokens: Optional[int] = None
    critic: CriticConfig = field(default_factory=CriticConfig)

    @classmethod
    def from_config(cls, cfg: Config, autocast: Optional[torch.dtype] = None) -> EngineSettings:
        trainer = cfg.trainer
        return cls(
            optimizer=cfg.algorithm.optimizer,
            total_steps=trainer.total_steps or cfg.buffer.total_steps,
            temperature=cfg.model.temperature,
            autocast=autocast,
            offload=offload_of(cfg, POLICY),
            critic_offload=offload_of(cfg, CRITIC),
            logits_bytes=trainer.logits_mb << 20,
            seed=cfg.seed,
            grad_clip=trainer.grad_clip,
            ppo_epochs=trainer.ppo_epochs,
            mini_batches=trainer.mini_batches,
            min_mini_batch_rows=trainer.min_mini_batch_rows,
            micro_batch_tokens=trainer.micro_batch_tokens,
            share_prompts=trainer.share_prompts,
            variance_proxies=trainer.variance_proxies,
            response_tokens=cfg.model.max_response_tokens,
            critic=cfg.critic,
        )

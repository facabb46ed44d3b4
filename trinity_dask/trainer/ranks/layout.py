"""Which of a rank's models hold shards, and which wait in CPU memory between uses.

Invariant: what a model's own keys leave open is as ``trainer.parallel`` and
``trainer.offload`` say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from trinity_dask.config.schema import Config

POLICY, CRITIC, FROZEN = "policy", "critic", "frozen"
ROLES = (POLICY, CRITIC, FROZEN)  # frozen: reference and teacher


def strategy_of(cfg: Config, role: str) -> str:
    """``ddp`` or ``fsdp2``."""
    own = {CRITIC: cfg.critic.strategy, FROZEN: cfg.trainer.frozen_strategy}.get(role)
    return cfg.trainer.parallel.strategy if own is None else own


def offload_of(cfg: Config, role: str) -> bool:
    own = {CRITIC: cfg.critic.offload, FROZEN: cfg.trainer.frozen_offload}.get(role)
    return cfg.trainer.offload if own is None else own


def any_sharded(cfg: Config) -> bool:
    return any(strategy_of(cfg, role) == "fsdp2" for role in ROLES)


def shard_all(
    cfg: Config, models: dict[str, list[Optional[Any]]], shard: Callable[[Any], None]
) -> None:
    """``shard`` every module of the roles that ask for it, once each.

    ``models``: by role, the policy first: the reference under an adapter is the policy itself.
    """
    seen: set[int] = set()
    for role, modules in models.items():
        for module in modules:
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            if strategy_of(cfg, role) == "fsdp2":
                shard(module)

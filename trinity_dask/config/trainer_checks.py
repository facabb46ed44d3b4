"""How the trainer's options go together.

Invariant: as in :mod:`trinity_dask.config.checks`; a message says what to set instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from trinity_dask.config import modes
from trinity_dask.config.schema import Config


def schedule(config: Config) -> Iterator[str]:
    """A schedule that decays has to know its last step."""
    if not modes.trains(config.mode) or _total_steps(config) is not None:
        return
    for key, optimizer in (
        ("algorithm.optimizer", config.algorithm.optimizer),
        ("critic.optimizer", config.critic.optimizer),
    ):
        if optimizer.lr_scheduler_type != "constant":
            yield (
                f"{key}.lr_scheduler_type={optimizer.lr_scheduler_type} ends at a step that is not "
                "known: set trainer.total_steps (or buffer.total_steps), or constant"
            )


def short_for_warmup(config: Config) -> Iterator[str]:
    """Runs all the same: a few steps of a longer recipe are a fair trial of it."""
    steps, total = config.algorithm.optimizer.lr_warmup_steps, _total_steps(config)
    if modes.trains(config.mode) and total is not None and steps > total:
        yield (
            f"algorithm.optimizer.lr_warmup_steps={steps} is more than the {total} steps of the "
            "run: the learning rate never reaches algorithm.optimizer.lr"
        )


def _total_steps(config: Config) -> Optional[int]:
    return config.trainer.total_steps or config.buffer.total_steps


def parallel(config: Config) -> Iterator[str]:
    """What shards cannot do."""
    if not modes.trains(config.mode):
        return
    own = config.trainer.parallel.strategy
    strategies = {
        "trainer.parallel.strategy": own,
        "trainer.frozen_strategy": config.trainer.frozen_strategy,
        "critic.strategy": config.critic.strategy,
    }
    sharded = [key for key, strategy in strategies.items() if strategy == "fsdp2"]
    if sharded and config.cluster.trainer.n_workers < 2:
        yield (
            f"{sharded[0]}=fsdp2 with cluster.trainer.n_workers="
            f"{config.cluster.trainer.n_workers} has nothing to share: raise n_workers, or use ddp"
        )
    for key, strategy, optimizer in (
        ("algorithm", own, config.algorithm.optimizer),
        ("critic", config.critic.strategy or own, config.critic.optimizer),
    ):
        if strategy == "fsdp2" and optimizer.optimizer_type == "adamw8bit":
            yield (
                f"{key}.optimizer.optimizer_type=adamw8bit cannot hold shards: set it to adamw, or "
                "the model's strategy to ddp"
            )


def lora(config: Config) -> Iterator[str]:
    """An adapter needs something to sit on, and engines that can hold it."""
    section = config.model.lora
    if section.rank == 0:
        if section.path is not None:
            yield (
                f"model.lora.path={section.path} has no effect with model.lora.rank=0: set the "
                "adapter's rank, or leave the path out"
            )
        return
    if not section.target_modules:
        yield "model.lora.target_modules is empty: name linear layers, or write [all-linear]"
    if config.explorer.rollout_model.engine_type == "vllm" and section.rank > 512:
        yield f"model.lora.rank={section.rank} is more than vLLM serves: 512 or less"

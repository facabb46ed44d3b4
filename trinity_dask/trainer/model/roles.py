"""The models beside the policy: reference, teacher, critic.

Invariant: a model that no term of the algorithm uses is neither loaded nor evaluated.
"""

from __future__ import annotations

from typing import Any, Optional

from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.config.schema import Config
from trinity_dask.models.lora import has_adapter
from trinity_dask.trainer.model.frozen import BaseUnderAdapter, FrozenModel
from trinity_dask.trainer.model.policy_model import autocast_dtype, load_policy
from trinity_dask.trainer.model.value_model import load_value_model
from trinity_dask.trainer.ranks.layout import FROZEN, offload_of


def load_reference(
    cfg: Config, spec: AlgorithmSpec, path: str, device: str, policy: Any = None
) -> Any:
    """The policy before training; ``path`` is where this stage starts.

    A policy with an adapter is its own reference, with the adapter switched off.
    """
    if not spec.uses_reference:
        return None
    if policy is not None and has_adapter(policy):
        return BaseUnderAdapter(policy, autocast_dtype(cfg.model.dtype))
    return _frozen(cfg, path, device)


def load_teacher(cfg: Config, spec: AlgorithmSpec, policy: Any, device: str) -> Any:
    """The teacher of ``model.teacher_model_path``; None when the rows bring its log-probs.

    Raises:
        ValueError: its vocabulary is not the policy's.
    """
    path = cfg.model.teacher_model_path
    if not spec.uses_teacher or not path:
        return None
    teacher = _frozen(cfg, path, device)
    own, of_teacher = policy.config.vocab_size, teacher.module.config.vocab_size
    if own != of_teacher:
        raise ValueError(
            f"model.teacher_model_path={path} has {of_teacher} tokens in its vocabulary and the "
            f"policy {own}: a teacher scores the policy's own tokens, so both need one tokenizer"
        )
    return teacher


def load_critic(cfg: Config, spec: AlgorithmSpec, path: str, device: str) -> Optional[Any]:
    """The value model, from ``critic.model_path`` or else the stage's start model."""
    if not spec.uses_critic:
        return None
    return load_value_model(
        cfg.critic.model_path or path,
        device=device,
        trust_remote_code=cfg.model.trust_remote_code,
        gradient_checkpointing=cfg.trainer.gradient_checkpointing,
    )


def _frozen(cfg: Config, path: str, device: str) -> FrozenModel:
    trust = cfg.model.trust_remote_code
    module = load_policy(path, device=device, trust_remote_code=trust)
    return FrozenModel(module, autocast_dtype(cfg.model.dtype), offload_of(cfg, FROZEN))

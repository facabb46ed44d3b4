"""Models that only score: reference and teacher.

Invariant: nothing here ever has a gradient, and with ``offload`` a model takes device
memory only while it scores. A model that no term of the algorithm uses is not loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch

from trinity_dask.algorithm.table import AlgorithmSpec
from trinity_dask.config.schema import Config
from trinity_dask.models.checks import TOKENIZER_FILES
from trinity_dask.models.lora import adapter_off, has_adapter
from trinity_dask.models.tokenizer import load_tokenizer
from trinity_dask.trainer.model.logprobs import LOGITS_BYTES, Scorer
from trinity_dask.trainer.model.policy_model import autocast_dtype, load_policy
from trinity_dask.trainer.ranks.parallel import (
    FROZEN,
    Sharding,
    is_sharded,
    offload_of,
    to_device,
)


class FrozenModel:
    """A causal language model without gradients.

    Args:
        module: on the device it scores on, or on the CPU with ``offload``.
        autocast: dtype of forward passes, None for float32.
        offload: keep the weights on the CPU outside :meth:`on_device`.
    """

    def __init__(
        self, module: Any, autocast: Optional[torch.dtype] = None, offload: bool = False
    ) -> None:
        self.module = module.requires_grad_(False)
        self.autocast = autocast
        self._device = next(module.parameters()).device
        self._offload = offload
        if offload:
            to_device(module, torch.device("cpu"))

    @property
    def lockstep(self) -> bool:
        """Whether its passes need all ranks: its weights are shards."""
        return is_sharded(self.module)

    def scorer(self, temperature: float = 1.0, logits_bytes: int = LOGITS_BYTES) -> Scorer:
        return Scorer(self.module, temperature, self.autocast, logits_bytes=logits_bytes)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within it the model can score."""
        if not self._offload:
            yield
            return
        to_device(self.module, self._device)
        try:
            yield
        finally:
            to_device(self.module, torch.device("cpu"))


class BaseUnderAdapter(FrozenModel):
    """The reference of a policy with an adapter: its own base model, the adapter switched off.

    It holds no memory of its own, and is on its device whenever the policy is.
    """

    def __init__(self, policy: Any, autocast: Optional[torch.dtype] = None) -> None:
        self.module, self.autocast, self._offload = policy, autocast, False

    def scorer(self, temperature: float = 1.0, logits_bytes: int = LOGITS_BYTES) -> Scorer:
        off = partial(adapter_off, self.module)
        return Scorer(self.module, temperature, self.autocast, off, logits_bytes)


def load_reference(
    cfg: Config,
    spec: AlgorithmSpec,
    path: str,
    device: str,
    policy: Any = None,
    sharding: Optional[Sharding] = None,
) -> Any:
    """The policy before training; ``path`` is where this stage starts.

    A policy with an adapter is its own reference, with the adapter switched off.
    """
    if not spec.uses_reference:
        return None
    if policy is not None and has_adapter(policy):
        return BaseUnderAdapter(policy, autocast_dtype(cfg.model.dtype))
    return _frozen(cfg, path, device, sharding)


def load_teacher(
    cfg: Config,
    spec: AlgorithmSpec,
    policy: Any,
    device: str,
    sharding: Optional[Sharding] = None,
) -> Any:
    """The teacher of ``model.teacher_model_path``; None when the rows bring its log-probs.

    Raises:
        ValueError: its tokens are not the policy's.
    """
    path = cfg.model.teacher_model_path
    if not spec.uses_teacher or not path:
        return None
    teacher = _frozen(cfg, path, device, sharding)
    own, of_teacher = (
        each.config.get_text_config().vocab_size for each in (policy, teacher.module)
    )
    vocabularies = [
        load_tokenizer(each, cfg.model.trust_remote_code).get_vocab()
        for each in (cfg.model.model_path, path)
        if any((Path(each) / name).is_file() for name in TOKENIZER_FILES)
    ]
    if len(vocabularies) == 2:  # sizes are padded, by each model as it likes
        mine, theirs = vocabularies
        others = [token for token, number in mine.items() if theirs.get(token) != number]
        if others:
            raise ValueError(
                f"model.teacher_model_path={path} has other numbers for {len(others)} of the "
                f"policy's {len(mine)} tokens, as {min(others)!r}: a teacher scores the policy's "
                "own tokens, so both need one tokenizer"
            )
    elif own != of_teacher:
        raise ValueError(
            f"model.teacher_model_path={path} has {of_teacher} tokens in its vocabulary and the "
            f"policy {own}, and there are no two tokenizers to compare: a teacher scores the "
            "policy's own tokens, so both need one tokenizer"
        )
    return teacher


def _frozen(cfg: Config, path: str, device: str, sharding: Optional[Sharding]) -> FrozenModel:
    module = load_policy(
        path,
        device=device,
        trust_remote_code=cfg.model.trust_remote_code,
        attention=cfg.model.attn_implementation,
        sharding=sharding,
        trained=False,
    )
    return FrozenModel(module, autocast_dtype(cfg.model.dtype), offload_of(cfg, FROZEN))

"""Models that only score: reference and teacher.

Invariant: nothing here ever has a gradient, and with ``offload`` a model takes device
memory only while it scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Optional

import torch

from trinity_dask.models.lora import adapter_off
from trinity_dask.trainer.model.logprobs import LOGITS_BYTES, Scorer
from trinity_dask.trainer.ranks.offload import to_device
from trinity_dask.trainer.ranks.parallel import is_sharded


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
        """See :attr:`TrainableModel.lockstep`."""
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


class BaseUnderAdapter:
    """The reference of a policy with an adapter: its own base model, the adapter switched off.

    Same methods as :class:`FrozenModel`; it holds no memory of its own.
    """

    def __init__(self, policy: Any, autocast: Optional[torch.dtype] = None) -> None:
        self.module = policy
        self.autocast = autocast

    @property
    def lockstep(self) -> bool:
        return is_sharded(self.module)

    def scorer(self, temperature: float = 1.0, logits_bytes: int = LOGITS_BYTES) -> Scorer:
        return Scorer(
            self.module,
            temperature,
            self.autocast,
            around=partial(adapter_off, self.module),
            logits_bytes=logits_bytes,
        )

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The policy is on its device whenever the reference is asked."""
        yield

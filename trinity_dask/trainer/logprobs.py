"""Log-probs of the response tokens under a model, in float32, at the sampling temperature.

Invariant: value ``[i, r]`` is the log-prob of ``input_ids[i, P + r]`` given everything
before it: the token itself, never the one after.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from trinity_dask.algorithm.entropy import token_entropy
from trinity_dask.trainer.batching import MicroBatch


@dataclass(frozen=True)
class Scores:
    """logprob float32 ``[b, R]``, and the entropy ``[b, R]`` where it was asked for."""

    logprob: Tensor
    entropy: Optional[Tensor] = None


class Scorer:
    """Runs a causal language model over micro-batches.

    ``temperature`` is the sampler's; 0 (greedy) means log-probs at temperature 1, as in
    the engines. ``autocast`` is the dtype of the forward pass, None for float32.
    """

    def __init__(
        self, model: Any, temperature: float = 1.0, autocast: Optional[torch.dtype] = None
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.autocast = autocast
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(
        self, micro: MicroBatch, entropy: bool = False, entropy_gradient: bool = True
    ) -> Scores:
        """Log-probs, and entropies when asked for (as a mere metric: without gradient)."""
        logits = self.response_logits(micro)
        targets = micro.input_ids[:, micro.prompt_width :]
        logprob = -F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none"
        ).view(targets.shape)
        if not entropy:
            return Scores(logprob)
        return Scores(logprob, token_entropy(logits if entropy_gradient else logits.detach()))

    def response_logits(self, micro: MicroBatch) -> Tensor:
        """float32 ``[b, R, V]``, divided by the temperature."""
        # the last token predicts nothing that is scored
        inputs: dict[str, Any] = {"input_ids": micro.input_ids[:, :-1], "use_cache": False}
        if micro.padded_left:
            # right padding needs no mask: causal attention never looks at it
            mask = micro.attention_mask[:, :-1]
            inputs |= {"attention_mask": mask, "position_ids": positions(mask)}
        if self._keeps_logits:
            inputs["logits_to_keep"] = micro.response_width
        device = micro.input_ids.device.type
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            logits = self.model(**inputs).logits[:, -micro.response_width :]
        logits = logits.float()
        return logits if self.temperature in (0.0, 1.0) else logits / self.temperature


def positions(attention_mask: Tensor) -> Tensor:
    """Position of each token among the real ones: int64, padding clamped to 0."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)

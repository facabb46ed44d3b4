"""Log-probs of the response tokens under a model, in float32, at the sampling temperature.

Invariant: value ``[i, r]`` is the log-prob of ``input_ids[i, P + r]`` given everything
before it: the token itself, never the one after.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from trinity_dask.algorithm.entropy import token_entropy
from trinity_dask.trainer.model.token_scores import score_tokens
from trinity_dask.trainer.step.batching import MicroBatch
from trinity_dask.trainer.step.shared_prompts import (
    forward_shared,
    is_proven,
    join,
    may_share,
    positions,
    prove,
)

LOGITS_BYTES = 256 << 20
Score = Callable[[Tensor], list[Tensor]]  # hidden states of the response -> Scores' tensors


@dataclass(frozen=True)
class Scores:
    """logprob float32 ``[b, R]``; where asked for, entropy ``[b, R]`` and logits ``[b, R, V]``."""

    logprob: Tensor
    entropy: Optional[Tensor] = None
    logits: Optional[Tensor] = None

    def of(self, rows: Tensor) -> Scores:
        """Row ``i`` of the result is row ``rows[i]``; gradients add up."""
        index = rows.to(self.logprob.device)
        entropy, logits = (
            None if part is None else part.index_select(0, index)
            for part in (self.entropy, self.logits)
        )
        return Scores(self.logprob.index_select(0, index), entropy, logits)


class Scorer:
    """Runs a causal language model over micro-batches.

    Args:
        model: a Hugging Face causal language model.
        temperature: the sampler's; 0 (greedy) means log-probs at temperature 1, as in the
            engines.
        autocast: dtype of the forward pass, None for float32.
        around: a forward pass runs inside ``around()``.
        logits_bytes: more float32 logits than that are computed in parts and never kept.
    """

    def __init__(
        self,
        model: Any,
        temperature: float = 1.0,
        autocast: Optional[torch.dtype] = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        self.model = model
        self.temperature = temperature or 1.0
        self.autocast = autocast
        self.logits_bytes = logits_bytes
        self._around = around
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._padding = padding_inputs(model)
        # the output head if it is one linear layer and nothing else
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        plain = self._keeps_logits and type(head) is torch.nn.Linear
        self._head: Optional[torch.nn.Linear] = head if plain else None
        self._shares = self._keeps_logits and may_share(model)

    def __call__(
        self,
        micro: MicroBatch,
        entropy: bool = False,
        entropy_gradient: bool = True,
        keep_logits: bool = False,
    ) -> Scores:
        """Log-probs, and entropies when asked for (as a mere metric: without gradient).

        ``keep_logits``: the logits too, divided by the temperature, with gradient.
        """
        if micro.distinct is not None:
            few = self(micro.distinct.micro, entropy, entropy_gradient, keep_logits)
            return few.of(micro.distinct.of_row)
        targets = micro.input_ids[:, micro.prompt_width :]
        if micro.shared is not None and self._shares and not is_proven(self.model):
            self._prove(micro)
        n_words = 0 if keep_logits or self._head is None else self._head.out_features
        if 4 * targets.numel() * n_words > self.logits_bytes:
            score = partial(self._scored, targets, entropy, entropy_gradient)
            in_parts = self._in_parts_shared if self._shared(micro) else self._in_parts
            scores = in_parts(micro, score)
            if scores is not None:
                return scores
        logits = self.response_logits(micro)
        logprob = -F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none"
        ).view(targets.shape)
        kept = logits if keep_logits else None
        if not entropy:
            return Scores(logprob, None, kept)
        entropies = token_entropy(logits if entropy_gradient else logits.detach())
        return Scores(logprob, entropies, kept)

    def _shared(self, micro: MicroBatch) -> bool:
        return micro.shared is not None and self._shares

    @torch.no_grad()
    def _prove(self, micro: MicroBatch) -> None:
        """The first shared pass of a model is made both ways; from then on it is trusted."""
        targets = micro.input_ids[:, micro.prompt_width :, None]
        shared, plain = (
            self.response_logits(m).log_softmax(dim=-1).gather(2, targets)[..., 0]
            for m in (micro, replace(micro, shared=None))
        )
        mask = micro.attention_mask[:, micro.prompt_width :]
        self._shares = prove(self.model, shared, plain, mask, self.autocast is not None)

    def _in_parts(self, micro: MicroBatch, score: Score) -> Optional[Scores]:
        """Scores computed in the place of the logits; None if the model changes its logits."""
        scored: list[Tensor] = []

        def in_place(hidden: Tensor) -> Tensor:
            scored.extend(score(hidden[:, -micro.response_width :]))
            return scored[0]

        assert self._head is not None
        with _replaced_forward(self._head, in_place):
            output = self._forward(micro)
        return Scores(*scored) if self._unchanged([output], scored[:1]) else None

    def _in_parts_shared(self, micro: MicroBatch, score: Score) -> Optional[Scores]:
        """As :meth:`_in_parts`; the head works once, on what both passes left for it."""
        seen: list[Tensor] = []

        def keep(hidden: Tensor) -> Tensor:
            seen.append(hidden)
            return hidden

        assert self._head is not None
        assert micro.shared is not None
        with _replaced_forward(self._head, keep):
            outputs = self._outputs(micro)
        if not self._unchanged(outputs, seen):
            return None
        return Scores(*score(join(outputs, micro.shared)))

    def _unchanged(self, outputs: list[Tensor], of_head: list[Tensor]) -> bool:
        """Whether the model gives out what its head does. If not (soft-capped logits, say), it
        would do to log-probs what it does to logits, and its head is left alone from now on."""
        same = all(a is b for a, b in zip(outputs, of_head, strict=True))
        if not same:
            self._head = None
        return same

    def _scored(
        self, targets: Tensor, entropy: bool, entropy_gradient: bool, hidden: Tensor
    ) -> list[Tensor]:
        """Log-probs and, where wanted, entropies ``[b, R]`` from hidden states ``[b, R, H]``."""
        head = self._head
        assert head is not None
        dtype = hidden.dtype if self.autocast is None else self.autocast
        flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
        goal, heat = targets.reshape(-1), self.temperature
        found = score_tokens(flat, head.weight, head.bias, goal, heat, entropy, entropy_gradient)
        return [part.view(targets.shape) for part in found if part.numel()]

    def response_logits(self, micro: MicroBatch) -> Tensor:
        """float32 ``[b, R, V]``, divided by the temperature."""
        logits = self._forward(micro)[:, -micro.response_width :].float()
        return logits if self.temperature == 1.0 else logits / self.temperature

    def _forward(self, micro: MicroBatch) -> Tensor:
        """What the model says of at least the response's tokens, ``[b, R or more, ...]``."""
        outputs = self._outputs(micro)
        if not self._shared(micro):
            return outputs[0]
        assert micro.shared is not None
        return join(outputs, micro.shared)

    def _outputs(self, micro: MicroBatch) -> list[Tensor]:
        device = micro.input_ids.device.type
        with (
            self._around(),
            torch.autocast(device, self.autocast, enabled=self.autocast is not None),
        ):
            if self._shared(micro):
                assert micro.shared is not None
                return forward_shared(self.model, micro, micro.shared)
            return [self.model(**self._inputs(micro)).logits]

    def _inputs(self, micro: MicroBatch) -> dict[str, Any]:
        # the last token predicts nothing that is scored
        inputs: dict[str, Any] = {"input_ids": micro.input_ids[:, :-1], "use_cache": False}
        if micro.padded_left:
            # right padding needs no mask: causal attention never looks at it
            inputs |= self._padding(micro.attention_mask[:, :-1])
        if self._keeps_logits:
            inputs["logits_to_keep"] = micro.response_width
        return inputs


def padding_inputs(model: Any) -> Callable[[Tensor], dict[str, Tensor]]:
    """What ``model`` is told of padding on the left, as a function of the mask ``[b, T]``: where
    it has no position ids (a recurrent model, a bias by distance) the mask alone."""
    places = "position_ids" in inspect.signature(model.forward).parameters
    return lambda mask: {
        "attention_mask": mask,
        **({"position_ids": positions(mask)} if places else {}),
    }


@contextmanager
def _replaced_forward(module: torch.nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # the class's own again

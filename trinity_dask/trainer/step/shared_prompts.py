"""Answers to one prompt share the prompt's forward and backward pass, equal ones their own.

Invariant: log-probs and gradients are those of every row computed by itself, up to rounding.
A model shares prompts only if its attention is full everywhere, and only after its first
shared pass gave what the plain one gives.

A group of n answers of R tokens to a prompt of P tokens, k of them different, costs P + kR
tokens instead of n(P + R). The prompt's keys and values are computed once and repeated for
its answers, as a sampler does; gradients add up on the way back.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from trinity_dask.models.checks import FULL_ATTENTION, attention_kinds

if TYPE_CHECKING:
    from trinity_dask.trainer.step.batching import MicroBatch

log = logging.getLogger(__name__)

WORTH = 0.2  # least share of a pass's tokens that must be saved: two passes cost more calls
# largest mean difference of a log-prob between the two ways, by whether autocast rounds
TOLERANCE = {False: 1e-4, True: 3e-2}


@dataclass(frozen=True)
class SharedPrompts:
    """first int64 ``[u]``: rows with distinct prompts; of_row int64 ``[b]``: which of them
    is the row's."""

    first: Tensor
    of_row: Tensor


@dataclass(frozen=True)
class Numbers:
    """int64 ``[B]`` each: equal where prompts are, and where whole rows are."""

    prompts: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, input_ids: Tensor, prompt: np.ndarray, response: np.ndarray, width: int) -> Numbers:
        """``input_ids`` ``[B, P+R]`` with P = ``width``, prompts padded on the left; ``prompt``
        and ``response`` are the rows' real lengths, since padding is a token like others."""
        ids = np.ascontiguousarray(input_ids.cpu().numpy())
        return cls(
            _numbered(prompt[:, None], np.ascontiguousarray(ids[:, :width])),
            _numbered(np.stack([prompt, response], axis=1), ids),
        )


def _numbered(lengths: np.ndarray, ids: np.ndarray) -> np.ndarray:
    known: dict[tuple[bytes, bytes], int] = {}
    keys = ((a.tobytes(), b.tobytes()) for a, b in zip(lengths, ids, strict=True))
    return np.fromiter((known.setdefault(key, len(known)) for key in keys), np.int64, len(ids))


def _kinds(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _, first, of_row = np.unique(numbers, return_index=True, return_inverse=True)
    return first, of_row


def distinct(numbers: np.ndarray) -> Optional[tuple[np.ndarray, np.ndarray]]:
    """``(first, of_row)``: one row of each kind, and the kind of each row, int64; None when
    too few are alike."""
    first, of_row = _kinds(numbers)
    return None if len(first) > (1 - WORTH) * len(numbers) else (first, of_row)


def shared_prompts(
    numbers: np.ndarray, prompt_width: int, response_width: int
) -> Optional[SharedPrompts]:
    """How the rows with these prompt numbers share them; None when it saves too little."""
    first, of_row = _kinds(numbers)
    saved = (len(numbers) - len(first)) * prompt_width
    if saved < WORTH * len(numbers) * (prompt_width + response_width):
        return None
    return SharedPrompts(torch.from_numpy(first), torch.from_numpy(of_row))


def forward_shared(model: Any, micro: MicroBatch, shared: SharedPrompts) -> list[Tensor]:
    """What ``model`` says after each prompt, ``[u, 1, ...]``, and after each response token
    but the last, ``[b, R - 1, ...]`` (missing when R = 1)."""
    from transformers import DynamicCache

    width, n_response = micro.prompt_width, micro.response_width
    first = shared.first.to(micro.input_ids.device)
    masks: dict[str, Any] = {}
    if micro.padded_left:
        mask = micro.attention_mask.index_select(0, first)[:, :width]
        masks = {"attention_mask": mask, "position_ids": positions(mask)}
    cache: Any = DynamicCache()
    head = model(
        input_ids=micro.input_ids.index_select(0, first)[:, :width],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        **masks,
    ).logits
    if n_response == 1:
        return [head]
    of_row = shared.of_row.to(first.device)
    for layer in cache.layers:  # one row for each answer; gradients flow back
        layer.keys = layer.keys.index_select(0, of_row)
        layer.values = layer.values.index_select(0, of_row)
    mask = micro.attention_mask[:, :-1]
    masks = {"position_ids": positions(mask)[:, width:]}
    if micro.padded_left:
        masks["attention_mask"] = mask
    ids = micro.input_ids[:, width:-1]
    return [head, model(input_ids=ids, past_key_values=cache, use_cache=True, **masks).logits]


def join(parts: list[Tensor], shared: SharedPrompts) -> Tensor:
    """What :func:`forward_shared` returned as ``[b, R, ...]``."""
    heads = parts[0].index_select(0, shared.of_row.to(parts[0].device))
    return heads if len(parts) == 1 else torch.cat([heads, parts[1]], dim=1)


def positions(attention_mask: Tensor) -> Tensor:
    """Position of each token among the real ones: int64, padding clamped to 0."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


# which models can ----------------------------------------------------------------------------
_proven: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def may_share(model: Any) -> bool:
    """Whether a model's attention and signature allow it, and no check of it has failed."""
    config = model.config.get_text_config()
    slides = getattr(config, "sliding_window", None) is not None and bool(
        getattr(config, "use_sliding_window", True)
    )
    names = inspect.signature(model.forward).parameters
    takes_cache = {"past_key_values", "position_ids", "logits_to_keep", "use_cache"} <= names.keys()
    # with checkpointing transformers drops the cache in the middle of the model
    keeps_cache = not getattr(model, "is_gradient_checkpointing", False)
    full = attention_kinds(config) == {FULL_ATTENTION} and not slides
    return _proven.get(model, full and takes_cache and keeps_cache)


def is_proven(model: Any) -> bool:
    return model in _proven


def prove(model: Any, shared: Tensor, plain: Tensor, mask: Tensor, rounded: bool) -> bool:
    """Compare a model's first shared pass with a plain one; log-probs ``[b, R]`` each.

    ``mask`` are the tokens that count; ``rounded``: the passes ran under autocast.
    """
    count = mask.sum().clamp(min=1)
    gap = float(((shared.float() - plain.float()).abs() * mask).sum() / count)
    fine = gap <= TOLERANCE[rounded]
    _proven[model] = fine
    if not fine:
        log.warning(
            "%s gives other log-probs when answers share their prompt's pass (%.2g apart on "
            "average); it computes every row by itself from here on, which costs time only. "
            "trainer.share_prompts=false does so from the start",
            type(model).__name__,
            gap,
        )
    return fine

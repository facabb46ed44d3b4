"""What may be asked of an engine, checked before it reaches the engine's own thread.

Invariant: a request that passes cannot fail the batch it is put into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trinity_dask.models.protocol import SamplingParams


def checked(
    prompt: Sequence[int], sampling: SamplingParams, vocab_size: int, max_model_len: int
) -> SamplingParams:
    """``sampling`` with ``max_tokens`` cut to what fits into the model after ``prompt``.

    Raises:
        ValueError: the prompt is empty, too long or has an unknown id, or a sampling
            parameter is out of range.
    """
    check_token_ids(prompt, vocab_size)
    if len(prompt) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, which leaves no room for an answer in "
            f"max_model_len = {max_model_len}; shorten it or raise model.max_model_len"
        )
    check_sampling(sampling)
    room = max_model_len - len(prompt)
    return sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room)


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError unless there are ids and all are in ``[0, vocab_size)``."""
    if len(token_ids) == 0:
        raise ValueError("the prompt has no tokens; a model needs at least one")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token id {low if low < 0 else high} is outside of the model's vocabulary of "
            f"{vocab_size}; was the prompt made with another tokenizer?"
        )


def check_sampling(sampling: SamplingParams) -> None:
    """Raises ValueError naming the first parameter that is out of range."""
    rules = {
        "n": (sampling.n >= 1, "at least 1"),
        "temperature": (sampling.temperature >= 0, "at least 0 (0 is greedy)"),
        "top_p": (0 < sampling.top_p <= 1, "in (0, 1]"),
        "top_k": (sampling.top_k == -1 or sampling.top_k >= 1, "-1 (off) or at least 1"),
        "max_tokens": (sampling.max_tokens >= 1, "at least 1"),
        "min_tokens": (0 <= sampling.min_tokens <= sampling.max_tokens, "in [0, max_tokens]"),
    }
    for name, (good, allowed) in rules.items():
        if not good:
            raise ValueError(f"{name} must be {allowed} (got {getattr(sampling, name)})")

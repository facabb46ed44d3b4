"""Which rows go into which update, on which rank, in which forward pass.

Invariant: the mini-batches of a step depend on the rows, the seed and the step, never on
the number of ranks or the size of a micro-batch; every row is in exactly one mini-batch of
each epoch and on exactly one rank in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Batch = dict[str, Any]  # tensors by name, and the int prompt_width
# what a loss reads, [B, R] each
RESPONSE_TENSORS = frozenset(
    ("action_mask", "advantages", "rollout_logprobs", "start_logprobs", "ref_logprobs")
)


@dataclass(frozen=True)
class UpdatePlan:
    """One rank's share of a train step.

    rows int64 ``[B]``: the global rows this rank needs, ascending. updates: per optimizer
    update the indices *into rows*; may be empty on a rank when rows are few.
    """

    rows: np.ndarray
    updates: tuple[np.ndarray, ...]


def n_mini_batches(n_rows: int, wanted: int, min_rows: int) -> int:
    """As many as wanted, but fewer rather than smaller than ``min_rows``; at least one."""
    return max(min(wanted, n_rows // max(min_rows, 1)), 1)


def plan_updates(
    lengths: np.ndarray,
    *,
    seed: int,
    step: int,
    epochs: int = 1,
    mini_batches: int = 1,
    min_mini_batch_rows: int = 1,
    rank: int = 0,
    world_size: int = 1,
) -> UpdatePlan:
    """Cut a step of ``len(lengths)`` rows into updates and take this rank's share.

    Rows are shuffled by (seed, step) in every epoch; inside a mini-batch they are dealt to
    the ranks longest first, back and forth, so that the ranks have equal work.
    """
    parts = n_mini_batches(len(lengths), mini_batches, min_mini_batch_rows)
    generator = np.random.default_rng((seed, step))
    shares = [
        _share(chunk, lengths, rank, world_size)
        for _ in range(epochs)
        for chunk in np.array_split(generator.permutation(len(lengths)), parts)
    ]
    rows = np.unique(np.concatenate(shares)).astype(np.int64)
    return UpdatePlan(rows, tuple(np.searchsorted(rows, share) for share in shares))


def _share(chunk: np.ndarray, lengths: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    if world_size == 1:
        return chunk
    order = chunk[np.argsort(-lengths[chunk], kind="stable")]
    turn = np.arange(len(order)) % (2 * world_size)
    return order[np.minimum(turn, 2 * world_size - 1 - turn) == rank]


@dataclass(frozen=True)
class Widths:
    """Prompt and response tokens of each row: int64 ``[B]``."""

    prompt: np.ndarray
    response: np.ndarray

    @classmethod
    def of(cls, batch: Batch) -> Widths:
        response = batch["response_mask"].sum(dim=1)
        return cls((batch["lengths"] - response).numpy(), response.numpy())


def micro_batches(rows: np.ndarray, widths: Widths, max_tokens: int) -> list[np.ndarray]:
    """Groups of ``rows`` of similar length, each at most ``max_tokens`` padded tokens.

    A row longer than the limit gets a forward pass of its own.
    """
    prompt, response = widths.prompt[rows], widths.response[rows]
    # equal prompts together: a group without left padding needs no attention mask
    order = np.lexsort((response, prompt))
    groups: list[np.ndarray] = []
    start = width_prompt = width_response = 0
    for end, k in enumerate(order):
        widest_prompt = max(width_prompt, int(prompt[k]))
        widest_response = max(width_response, int(response[k]))
        if end > start and (end - start + 1) * (widest_prompt + widest_response) > max_tokens:
            groups.append(rows[order[start:end]])
            start, widest_prompt, widest_response = end, int(prompt[k]), int(response[k])
        width_prompt, width_response = widest_prompt, widest_response
    if len(order):
        groups.append(rows[order[start:]])
    return groups


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass, cut to their own widths.

    input_ids, attention_mask int64 ``[b, P+R]``; ``fields`` the ``[b, R]`` tensors;
    ``padded_left`` false when all prompts have the same length.
    """

    rows: torch.Tensor
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    fields: Batch
    prompt_width: int
    response_width: int
    padded_left: bool


def take(batch: Batch, rows: np.ndarray, widths: Widths) -> MicroBatch:
    """Cut ``rows`` out of a collated batch and drop the columns that only they do not use."""
    index = torch.from_numpy(rows)
    whole = int(batch["prompt_width"])
    prompt, response = int(widths.prompt[rows].max()), int(widths.response[rows].max())
    columns = slice(whole - prompt, whole + response)
    fields = {name: batch[name][index, :response] for name in RESPONSE_TENSORS & batch.keys()}
    return MicroBatch(
        rows=index,
        input_ids=batch["input_ids"][index, columns],
        attention_mask=batch["attention_mask"][index, columns],
        fields=fields,
        prompt_width=prompt,
        response_width=response,
        padded_left=bool((widths.prompt[rows] != prompt).any()),
    )


def sequence_batch(token_ids: list[int], device: torch.device | str = "cpu") -> MicroBatch:
    """One sequence in which every token after the first is to be scored."""
    ids = torch.tensor([token_ids], dtype=torch.int64, device=device)
    return MicroBatch(
        rows=torch.zeros(1, dtype=torch.int64),
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        fields={},
        prompt_width=1,
        response_width=len(token_ids) - 1,
        padded_left=False,
    )

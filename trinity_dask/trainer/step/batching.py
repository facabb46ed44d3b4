"""Which rows go into which update, on which rank, in which forward pass.

Invariant: the mini-batches of a step depend on the rows, the seed and the step, never on
the number of ranks or the size of a micro-batch; every row is in exactly one mini-batch of
each epoch and on exactly one rank in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np
import torch

from trinity_dask.trainer.step.shared_prompts import SharedPrompts

Batch = dict[str, Any]  # tensors by name, and the int prompt_width
# what a loss reads, [B, R] each
RESPONSE_TENSORS = frozenset(
    (
        "action_mask",
        "advantages",
        "returns",
        "rollout_logprobs",
        "start_logprobs",
        "ref_logprobs",
        "teacher_logprobs",
        "values",
        "expert_mask",
    )
)


@dataclass(frozen=True)
class UpdatePlan:
    """One rank's share of a train step.

    rows int64 ``[B]``: the global rows this rank needs, ascending. updates: per optimizer
    update of the policy the indices *into rows*; may be empty on a rank when rows are few.
    owned: the indices into rows of those that this rank scores for all ranks; every row of
    the step has one owner. n_rows: rows of the step on all ranks. critic_updates: as updates.
    """

    rows: np.ndarray
    updates: tuple[np.ndarray, ...]
    owned: np.ndarray
    n_rows: int
    critic_updates: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class Cut:
    """How often a step's rows are used, and in how many updates."""

    epochs: int = 1
    mini_batches: int = 1
    min_mini_batch_rows: int = 1


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
    unit: int = 1,
    critic: Optional[Cut] = None,
    groups: Optional[np.ndarray] = None,
) -> UpdatePlan:
    """Cut a step of ``len(lengths)`` rows into updates and take this rank's share.

    Units of ``unit`` neighbouring rows (a preference pair) stay together and in order. They
    are shuffled by (seed, step) in every epoch; inside a mini-batch they are dealt to the
    ranks longest first, back and forth, so that the ranks have equal work. With ``groups``
    (int64 ``[B]``, equal for rows that share a prompt) a rank gets whole groups as far as
    equal work allows. ``critic`` cuts the same rows once more, for the critic's updates.

    Raises:
        ValueError: the rows are not whole units.
    """
    if len(lengths) % unit:
        raise ValueError(
            f"{len(lengths)} rows are no whole units of {unit} rows that belong together"
        )

    def shares(cut: Cut) -> list[np.ndarray]:
        deal = _Deal(lengths, groups, rank, world_size, unit)
        return _shares(deal, cut, np.random.default_rng((seed, step)))

    actor = shares(Cut(epochs, mini_batches, min_mini_batch_rows))
    of_critic = [] if critic is None else shares(critic)
    # the first epoch deals every row to exactly one rank
    owned = np.sort(np.concatenate(actor[: len(actor) // epochs]))
    rows = np.unique(np.concatenate([*actor, *of_critic])).astype(np.int64)

    def local(parts: list[np.ndarray]) -> tuple[np.ndarray, ...]:
        return tuple(np.searchsorted(rows, part) for part in parts)

    return UpdatePlan(
        rows, local(actor), np.searchsorted(rows, owned), len(lengths), local(of_critic)
    )


@dataclass(frozen=True)
class _Deal:
    """Which units of a mini-batch one rank gets."""

    lengths: np.ndarray
    groups: Optional[np.ndarray]
    rank: int
    world_size: int
    unit: int

    def of_units(self) -> np.ndarray:
        """Tokens of each unit."""
        return self.lengths.reshape(-1, self.unit).sum(axis=1)

    def share(self, chunk: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if self.world_size == 1:
            return chunk
        if self.groups is None:
            return self._back_and_forth(chunk, tokens)
        order = chunk[np.argsort(self.groups[:: self.unit][chunk], kind="stable")]
        middle = np.cumsum(tokens[order]) - tokens[order] / 2
        part = (middle * self.world_size / max(int(tokens[order].sum()), 1)).astype(np.int64)
        return order[part == self.rank]

    def _back_and_forth(self, chunk: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        order = chunk[np.argsort(-tokens[chunk], kind="stable")]
        turn = np.arange(len(order)) % (2 * self.world_size)
        return order[np.minimum(turn, 2 * self.world_size - 1 - turn) == self.rank]


def _shares(deal: _Deal, cut: Cut, generator: np.random.Generator) -> list[np.ndarray]:
    """The global rows of one rank in every update."""
    tokens, unit = deal.of_units(), deal.unit
    parts = n_mini_batches(len(tokens), cut.mini_batches, -(-cut.min_mini_batch_rows // unit))
    return [
        _rows_of(deal.share(chunk, tokens), unit)
        for _ in range(cut.epochs)
        for chunk in np.array_split(generator.permutation(len(tokens)), parts)
    ]


def _rows_of(units: np.ndarray, unit: int) -> np.ndarray:
    return (units[:, None] * unit + np.arange(unit)).reshape(-1)


@dataclass(frozen=True)
class Widths:
    """Prompt and response tokens of each row: int64 ``[B]``."""

    prompt: np.ndarray
    response: np.ndarray

    @classmethod
    def of(cls, batch: Batch) -> Widths:
        response = batch["response_mask"].sum(dim=1)
        return cls((batch["lengths"] - response).numpy(), response.numpy())


def micro_batches(
    rows: np.ndarray, widths: Widths, max_tokens: int, unit: int = 1
) -> list[np.ndarray]:
    """Groups of ``rows`` of similar length, each at most ``max_tokens`` padded tokens.

    ``rows`` come in units of ``unit`` that stay together and in order. A unit beyond the
    limit gets a forward pass of its own.
    """
    if unit > 1:
        return _micro_batches_of_units(rows.reshape(-1, unit), widths, max_tokens)
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


def _micro_batches_of_units(units: np.ndarray, widths: Widths, max_tokens: int) -> list[np.ndarray]:
    """Like :func:`micro_batches`; a unit is as wide as its widest row. units ``[n, unit]``."""
    size = units.shape[1]
    widest = Widths(widths.prompt[units].max(axis=1), widths.response[units].max(axis=1))
    groups = micro_batches(np.arange(len(units)), widest, max_tokens // size)
    return [units[group].reshape(-1) for group in groups]


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass, cut to their own widths.

    input_ids, attention_mask int64 ``[b, P+R]``; ``fields`` the ``[b, R]`` tensors;
    ``padded_left`` false when all prompts have the same length; ``shared`` where rows with
    equal prompts may be computed together, ``distinct`` where many rows are equal.
    """

    rows: torch.Tensor
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    fields: Batch
    prompt_width: int
    response_width: int
    padded_left: bool
    shared: Optional[SharedPrompts] = None
    distinct: Optional[Distinct] = None


@dataclass(frozen=True)
class Distinct:
    """The different rows of a pass, and which of them each row is: int64 ``[b]``."""

    micro: MicroBatch
    of_row: torch.Tensor


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


def blank_batch(batch: Batch, unit: int = 1) -> MicroBatch:
    """A forward pass that changes nothing: no row of ``batch``, no token that counts.

    For a rank that must run as many passes as its peers. ``rows`` is empty.
    """
    device = batch["input_ids"].device
    fields = {
        name: torch.zeros(unit, 2, dtype=batch[name].dtype, device=device)
        for name in RESPONSE_TENSORS & batch.keys()
    }
    one = sequence_batch([[0, 0, 0]], device)
    return replace(
        one,
        rows=torch.zeros(0, dtype=torch.int64),
        input_ids=one.input_ids.expand(unit, -1),
        attention_mask=one.attention_mask.expand(unit, -1),
        fields=fields,
    )


def check_pairs(batch: Batch) -> None:
    """Raise ValueError unless rows 2i and 2i+1 are the two answers to one prompt, chosen first."""
    group, run = batch["group"], batch["run"]
    whole = len(group) % 2 == 0
    if not whole or bool((group[0::2] != group[1::2]).any() or (run[0::2] >= run[1::2]).any()):
        raise ValueError(
            f"{len(group)} rows are not preference pairs: each chosen answer (run 0) must be "
            "followed by the rejected one (run 1) of the same task"
        )


def sequence_batch(sequences: list[list[int]], device: torch.device | str = "cpu") -> MicroBatch:
    """Sequences in which every token after the first is to be scored, padded on the right."""
    width = max(len(ids) for ids in sequences)
    tokens = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, ids in zip(tokens, sequences, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([[len(ids)] for ids in sequences])
    return MicroBatch(
        rows=torch.arange(len(sequences)),
        input_ids=tokens.to(device),
        attention_mask=(torch.arange(width) < lengths).long().to(device),
        fields={},
        prompt_width=1,
        response_width=width - 1,
        padded_left=False,
    )

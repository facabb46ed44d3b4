"""Rows as tensors, and which of them go into which update, on which rank, in which forward pass.

Invariant: token ``t`` of row ``i`` lands at ``P - prompt_length[i] + t``, so every row's
response starts at column ``P`` and response column ``r`` of every ``[B, R]`` tensor speaks
about ``input_ids[:, P + r]``; that work is vectorised over the Arrow buffers, no Python loop
touches a token or a row. The mini-batches of a step depend on the rows, the seed and the step,
never on the number of ranks or the size of a micro-batch; every row is in exactly one
mini-batch of each epoch and on exactly one rank in it. For the same rows every rank makes the
same number of passes (at least one), so models whose passes are collective never wait for a
peer; a pass that only keeps step is blank: it has no valid token and adds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import Denominator
from trinity_dask.experience.schema import check_lengths, column, group_codes, list_values
from trinity_dask.trainer.ranks.gradients import GradientGroup
from trinity_dask.trainer.step.shared_prompts import (
    Numbers,
    SharedPrompts,
    distinct,
    shared_prompts,
)

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


# tensors that are present when every row has the field: destination name -> column
_IF_ALL_HAVE = {
    "rollout_logprobs": "logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "token_level_reward": "token_level_reward",
    "teacher_logprobs": "teacher_logprobs",
}
UNKNOWN_VERSION = -1


# --------------------------------------------------------------------------- rows as tensors
def _scatter(
    out: np.ndarray, first_column: np.ndarray, values: np.ndarray, offsets: np.ndarray
) -> None:
    """Write row ``i``'s values into ``out[i]`` from ``first_column[i]`` on."""
    lengths = np.diff(offsets)
    rows = np.arange(len(lengths))
    start = rows * out.shape[1] + first_column - offsets[:-1]
    index = np.repeat(start, lengths)
    index += np.arange(len(values))
    out.reshape(-1)[index] = values


def _response_tensor(table: pa.Table, name: str, width: int, dtype: Any, pad: Any) -> np.ndarray:
    out = np.full((table.num_rows, width), pad, dtype)
    values, offsets = list_values(column(table, name))
    _scatter(out, np.zeros(table.num_rows, np.int64), values, offsets)
    return out


def _sequence_tensors(
    table: pa.Table, prompt: np.ndarray, width: int, pad_token_id: int
) -> dict[str, np.ndarray]:
    values, offsets = list_values(column(table, "tokens"))
    prompt_width = int(prompt.max(initial=0))
    first = prompt_width - prompt
    ids = np.full((table.num_rows, prompt_width + width), pad_token_id, np.int64)
    _scatter(ids, first, values, offsets)
    columns = np.arange(prompt_width + width)
    last = first + np.diff(offsets)
    mask = (columns >= first[:, None]) & (columns < last[:, None])
    position = np.clip(columns - first[:, None], 0, None)
    # right padding keeps the last real position: clip(cumsum(mask) - 1, 0)
    position = np.minimum(position, np.maximum(last - first - 1, 0)[:, None])
    return {
        "input_ids": ids,
        "attention_mask": mask.astype(np.int64),
        "position_ids": position,
        "response_mask": mask[:, prompt_width:],
    }


def flagged(table: pa.Table, key: str) -> np.ndarray:
    """Rows whose ``info[key]`` is true: bool ``[rows]``. Only candidates are parsed."""
    texts = column(table, "info")
    found = pc.match_substring(texts, f'"{key}"').to_numpy(zero_copy_only=False).astype(np.bool_)
    for row in np.flatnonzero(found):
        found[row] = json.loads(texts[int(row)].as_py()).get(key) is True
    return found


def collate(table: pa.Table, pad_token_id: int, step: Optional[pa.Table] = None) -> Batch:
    """Padded tensors of ``table``: prompts left-padded to P, responses right-padded to R.

    ``input_ids``, ``attention_mask``, ``position_ids`` int64 ``[B, P+R]``;
    ``prompt_width`` = P (an int); ``action_mask``, ``response_mask`` (real response
    tokens) bool ``[B, R]``; ``rollout_logprobs``, ``advantages``, ``returns``,
    ``token_level_reward``, ``teacher_logprobs`` float32 ``[B, R]``, each only when every
    row has it, 0 on padding; ``versions`` int32 ``[B, R]``, -1 where unknown or padding;
    ``expert_mask`` bool ``[B, R]``: the action mask of rows with ``info.is_expert``;
    ``reward`` float32 ``[B]``, NaN where there is none; ``reward_baselines`` float32
    ``[B]`` when every row has ``info.reward_baseline``; ``group``, ``run``, ``eid_step``
    int64 ``[B]``: index of the row's task, its run, its step in a multi-step run;
    ``lengths`` int64 ``[B]``, real tokens of the row.

    ``step``: the rows of which ``table`` is one rank's share, perhaps an empty one. "Every
    row" then means all of its rows, so that all ranks have the same tensors.

    Raises:
        ValueError: a column is missing, lengths do not fit, or the rows are pairs.
    """
    if column(table, "chosen").null_count < table.num_rows:
        raise ValueError(
            "collate takes experiences with one response each; this table holds preference "
            "pairs (chosen/rejected)"
        )
    check_lengths(table)
    lengths = np.diff(list_values(column(table, "tokens"))[1])
    prompt = column(table, "prompt_length").to_numpy(zero_copy_only=False).astype(np.int64)
    width = int((lengths - prompt).max(initial=0))
    arrays = _sequence_tensors(table, prompt, width, pad_token_id)
    arrays["action_mask"] = _response_tensor(table, "action_mask", width, np.bool_, False)
    arrays["versions"] = _response_tensor(table, "versions", width, np.int32, UNKNOWN_VERSION)
    for key, name in _IF_ALL_HAVE.items():
        if column(table if step is None else step, name).null_count == 0:
            arrays[key] = _response_tensor(table, name, width, np.float32, 0.0)
    reward = pc.fill_null(column(table, "reward"), float("nan"))
    arrays["reward"] = reward.to_numpy(zero_copy_only=False).astype(np.float32)
    arrays["expert_mask"] = arrays["action_mask"] & flagged(table, "is_expert")[:, None]
    texts = column(table, "info")
    if table.num_rows and pc.all(pc.match_substring(texts, '"reward_baseline"')).as_py():
        baselines = [json.loads(text).get("reward_baseline") for text in texts.to_pylist()]
        if None not in baselines:
            arrays["reward_baselines"] = np.array(baselines, np.float32)
    arrays["group"] = group_codes(table)
    for key, name in (("run", "run"), ("eid_step", "step")):
        arrays[key] = column(table, name).to_numpy(zero_copy_only=False).astype(np.int64)
    arrays["lengths"] = lengths
    batch: Batch = {name: torch.from_numpy(a) for name, a in arrays.items()}
    batch["prompt_width"] = int(prompt.max(initial=0))
    return batch


# --------------------------------------------------------------------------- shares
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


@dataclass(frozen=True)
class Planner:
    """How the rows of every step are cut into updates and dealt to the ranks.

    Units of ``unit`` neighbouring rows (a preference pair) stay together and in order. They
    are shuffled by (seed, step) in every epoch; inside a mini-batch they are dealt to the
    ranks longest first, back and forth, so that the ranks have equal work. With ``by_groups``
    a rank gets whole groups of rows that share a prompt as far as equal work allows.
    ``critic`` cuts the same rows once more, for the critic's updates.
    """

    policy: Cut = Cut()
    critic: Optional[Cut] = None
    seed: int = 42
    unit: int = 1
    by_groups: bool = False

    def plan(
        self,
        lengths: np.ndarray,
        step: int,
        rank: int = 0,
        world_size: int = 1,
        groups: Optional[np.ndarray] = None,
    ) -> UpdatePlan:
        """A rank's share of a step whose rows have ``lengths`` tokens and come from the tasks
        ``groups`` (int64 ``[B]`` each).

        Raises:
            ValueError: the rows are not whole units.
        """
        if len(lengths) % self.unit:
            raise ValueError(
                f"{len(lengths)} rows are no whole units of {self.unit} rows that belong together"
            )
        tokens = lengths.reshape(-1, self.unit).sum(axis=1)
        of_units = groups[:: self.unit] if self.by_groups and groups is not None else None

        def shares(cut: Cut) -> list[np.ndarray]:
            """The global rows of this rank in every update."""
            generator = np.random.default_rng((self.seed, step))
            least = -(-cut.min_mini_batch_rows // self.unit)
            parts = n_mini_batches(len(tokens), cut.mini_batches, least)
            found = []
            for _ in range(cut.epochs):
                for chunk in np.array_split(generator.permutation(len(tokens)), parts):
                    mine = _share(chunk, tokens, of_units, rank, world_size)
                    found.append((mine[:, None] * self.unit + np.arange(self.unit)).reshape(-1))
            return found

        actor = shares(self.policy)
        critic = [] if self.critic is None else shares(self.critic)
        # the first epoch deals every row to exactly one rank
        owned = np.sort(np.concatenate(actor[: len(actor) // self.policy.epochs]))
        rows = np.unique(np.concatenate([*actor, *critic])).astype(np.int64)
        updates, of_critic = (
            tuple(np.searchsorted(rows, part) for part in parts) for parts in (actor, critic)
        )
        return UpdatePlan(rows, updates, np.searchsorted(rows, owned), len(lengths), of_critic)


def _share(
    chunk: np.ndarray,
    tokens: np.ndarray,
    groups: Optional[np.ndarray],
    rank: int,
    world_size: int,
) -> np.ndarray:
    """The units of mini-batch ``chunk`` that one rank gets; ``tokens`` and ``groups`` of all."""
    if world_size == 1:
        return chunk
    if groups is None:
        order = chunk[np.argsort(-tokens[chunk], kind="stable")]
        turn = np.arange(len(order)) % (2 * world_size)
        return order[np.minimum(turn, 2 * world_size - 1 - turn) == rank]
    order = chunk[np.argsort(groups[chunk], kind="stable")]
    middle = np.cumsum(tokens[order]) - tokens[order] / 2
    part = (middle * world_size / max(int(tokens[order].sum()), 1)).astype(np.int64)
    return order[part == rank]


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
    if unit > 1:  # a unit is as wide as its widest row
        units = rows.reshape(-1, unit)
        widest = Widths(widths.prompt[units].max(axis=1), widths.response[units].max(axis=1))
        groups = micro_batches(np.arange(len(units)), widest, max_tokens // unit)
        return [units[group].reshape(-1) for group in groups]
    prompt, response = widths.prompt[rows], widths.response[rows]
    # equal prompts together: a group without left padding needs no attention mask
    order = np.lexsort((response, prompt))
    groups = []
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
    ``padded_left`` false when all prompts have the same length; ``shared`` where rows with
    equal prompts may be computed together, ``distinct`` where many rows are equal.
    """

    rows: Tensor
    input_ids: Tensor
    attention_mask: Tensor
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
    of_row: Tensor


def take(
    batch: Batch, rows: np.ndarray, widths: Widths, numbers: Optional[Numbers] = None
) -> MicroBatch:
    """Cut ``rows`` out of a collated batch and drop the columns that only they do not use.

    ``numbers``: which prompts are equal, so that their rows may be computed together.
    """
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
        shared=None if numbers is None else shared_prompts(numbers.prompts[rows], prompt, response),
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


@dataclass
class StepRows:
    """The collated rows of a rank, cut into forward passes of ``max_tokens`` padded tokens.

    ``batch`` gains tensors ``[B, R]`` phase by phase; ``unit`` rows are never separated.
    ``lockstep``: the models' passes are collective, so the ranks count them together.
    ``share_prompts``: equal prompts and equal rows of a pass are computed once; not in lockstep.

    Raises:
        ValueError: with units of two, the rows are not preference pairs.
    """

    batch: Batch
    plan: UpdatePlan
    max_tokens: int
    unit: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: GradientGroup = field(default_factory=GradientGroup)
    lockstep: bool = False
    share_prompts: bool = False

    def __post_init__(self) -> None:
        if self.unit == 2:
            _check_pairs(self.batch)
        self.every = np.arange(len(self.plan.rows))  # indices of all rows of this rank
        self.widths = Widths.of(self.batch)
        self._numbers: Optional[Numbers] = None
        if self.share_prompts:
            ids, width = self.batch["input_ids"], int(self.batch["prompt_width"])
            self._numbers = Numbers.of(ids, self.widths.prompt, self.widths.response, width)
        self.known: dict[str, Tensor] = {}  # bool [B]: rows that a tensor was filled for
        self.batch = {
            name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in self.batch.items()
        }

    @property
    def mask(self) -> Tensor:
        return self.batch["action_mask"]

    def counted(
        self, updates: Sequence[np.ndarray], response_tokens: Optional[int] = None
    ) -> list[Denominator]:
        """Counts of every mini-batch over all ranks, by one all-reduce; taken *before* any rule
        rejects a token, so what is left of a mini-batch weighs what it weighed in the whole.

        ``response_tokens``: the response budget, for the modes that divide by it.
        """
        mask = self.mask.cpu()
        expert = self.batch.get("expert_mask")
        expert = torch.zeros_like(mask) if expert is None else expert.cpu() & mask
        counts = torch.zeros(len(updates), 5, dtype=torch.float64)
        for row, update in zip(counts, updates, strict=True):
            index = torch.from_numpy(update)
            of_rows, of_experts = mask[index].sum(dim=1), expert[index].sum(dim=1)
            for k, of in ((0, of_rows), (2, of_experts)):
                row[k], row[k + 1] = of.sum(), (of > 0).sum()
            row[4] = (of_rows > 0).reshape(-1, self.unit).all(dim=1).sum()  # units with rows left
        counts = self.group.sum_(counts.to(self.group.device))
        width = None if response_tokens is None else float(response_tokens)
        return [
            Denominator(t, r, expert_tokens, expert_rows, pairs if self.unit == 2 else None, width)
            for t, r, expert_tokens, expert_rows, pairs in counts.tolist()
        ]

    def passes(self, rows: np.ndarray) -> Iterator[MicroBatch]:
        """Forward passes over ``rows``, then as many blank ones as the peers need."""
        parts = micro_batches(rows, self.widths, self.max_tokens, self.unit)
        wanted = max(len(parts), 1)
        if self.lockstep:
            counts = torch.tensor([wanted], device=self.group.device)
            wanted = int(self.group.max_(counts))
        for part in parts:
            alike = None if self._numbers is None else distinct(self._numbers.rows[part])
            if alike is None:
                yield take(self.batch, part, self.widths, self._numbers)
                continue
            first, of_row = alike
            few = take(self.batch, part[first], self.widths, self._numbers)
            whole = take(self.batch, part, self.widths)
            yield replace(whole, distinct=Distinct(few, torch.from_numpy(of_row)))
        for _ in range(wanted - len(parts)):
            yield blank_batch(self.batch, self.unit)

    def put(self, name: str, micro: MicroBatch, values: Tensor) -> None:
        """Store ``[b, r]`` values of one pass; the tensor is made when it is not there."""
        if name not in self.known:
            self.batch[name] = torch.zeros(self.mask.shape, device=self.device)
            self.known[name] = torch.zeros(len(self.mask), dtype=torch.bool)
        if len(micro.rows):
            self.batch[name][micro.rows, : micro.response_width] = values
            self.known[name][micro.rows] = True

    @torch.no_grad()
    def score(self, rows: np.ndarray, scorer: Callable[[MicroBatch], dict[str, Tensor]]) -> None:
        """Fill the tensors that ``scorer`` names for ``rows``, without gradient."""
        for micro in self.passes(rows):
            for name, values in scorer(micro).items():
                self.put(name, micro, values)


def _check_pairs(batch: Batch) -> None:
    """Raise ValueError unless rows 2i and 2i+1 are the two answers to one prompt, chosen first."""
    group, run = batch["group"], batch["run"]
    whole = len(group) % 2 == 0
    if not whole or bool((group[0::2] != group[1::2]).any() or (run[0::2] >= run[1::2]).any()):
        raise ValueError(
            f"{len(group)} rows are not preference pairs: each chosen answer (run 0) must be "
            "followed by the rejected one (run 1) of the same task"
        )

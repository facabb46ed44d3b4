"""Sampling many answers to many prompts in one batch of a Hugging Face model.

Invariant: a request's answers follow the processed distribution (temperature, then top-k,
then top-p, renormalised), and each log-prob is that of the distribution the token was drawn
from; at temperature 0 the most likely token is taken and its log-prob is that at
temperature 1. Rows of the batch do not influence each other beyond float rounding.

Method: prompts are padded on the left and prefilled once each, then every prompt's cache
rows are repeated for its ``n`` answers; a token is drawn by inverting the cumulative
distribution at one uniform number per row (the Gumbel-max trick needs one per vocabulary
entry, which costs more than the model at small sizes); finished rows are dropped from the
batch once they are a quarter of it. All rows have the same length in the cache, because prompts
are padded on the left; memory for the longest possible answer is reserved once per batch.

That is for attention that is full in every layer. Any other model (windows, recurrent states, a
bias by distance) answers prompts of one length at a time, with its own cache and without padding,
so that nothing depends on how it treats a mask. A sampler is tried once against the plain model
before it is used (:meth:`BatchSampler.settle`).
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from trinity_dask.models.checks import FULL_ATTENTION, attention_kinds
from trinity_dask.models.protocol import (
    FINISH_LENGTH,
    FINISH_STOP,
    Completion,
    SamplingParams,
)

log = logging.getLogger("trinity_dask.engines")

LIVE_SHARE_TO_COMPACT = 0.75
NEG_INF = float("-inf")
TRIAL_LENGTHS = (5, 3)  # prompts of a sampler's trial, tokens
TRIAL_TOKENS = 3
# largest difference of a log-prob in the trial, nats
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


@dataclass
class SampleRequest:
    """One prompt and how to answer it; another thread may set ``cancelled`` meanwhile."""

    prompt: Sequence[int]
    sampling: SamplingParams
    request_id: str = ""
    cancelled: bool = False


class BatchSampler:
    """Samples from ``model``; ``eos_ids`` end every answer. Not thread-safe."""

    def __init__(self, model: Any, eos_ids: Sequence[int], seed: int) -> None:
        self.model = model
        self.config: Any = model.config.get_text_config()
        self.device = next(model.parameters()).device
        self.eos_ids = tuple(eos_ids)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.generated_tokens = 0
        self.steps = 1  # passes of the model
        names = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self._cache_name = "cache_params" if "cache_params" in names else "past_key_values"
        # whether prompts of unequal lengths may share a batch: a mask and positions say it all
        self.pads = (
            attention_kinds(self.config) == {FULL_ATTENTION}
            and {"position_ids", "past_key_values"} <= names.keys()
            and not getattr(self.config, "alibi", False)
            and getattr(self.config, "_attn_implementation", None) == "sdpa"
        )

    def settle(self) -> None:
        """Sample a few tokens and compare their log-probs with the plain model's. A model that
        gives others in padded batches gets none.

        Raises:
            ValueError: it gives others in batches of one length too.
        """
        allowed = TOLERANCE.get(next(self.model.parameters()).dtype, 0.0)
        gap = self._trial()
        if gap > allowed and self.pads:
            log.info("%s is sampled without padding", type(self.model).__name__)
            self.pads = False
            gap = self._trial()
        if not gap <= allowed:
            raise ValueError(
                f"{type(self.model).__name__} gives other log-probs with its cache than without "
                f"({gap:.2g} nats apart), so the torch engine cannot sample from it; use "
                "explorer.rollout_model.engine_type=vllm"
            )

    @torch.inference_mode()
    def _trial(self) -> float:
        """Largest difference of a log-prob, in nats."""
        sampling = SamplingParams(temperature=0.0, max_tokens=TRIAL_TOKENS, min_tokens=TRIAL_TOKENS)
        numbers = [[7 * k + 3 * n for k in range(n)] for n in TRIAL_LENGTHS]
        prompts = [[number % self.config.vocab_size for number in row] for row in numbers]
        sampled = self.sample([SampleRequest(prompt, sampling) for prompt in prompts], 0)
        self.generated_tokens, gaps = 0, []
        for prompt, (answer,) in zip(prompts, sampled, strict=True):
            ids = torch.tensor([*prompt, *answer.token_ids], device=self.device)
            output = self.model(input_ids=ids[None, :-1], use_cache=False)
            logits = output.logits[0, len(prompt) - 1 :].float()
            # the sampler knows that an answer cannot end yet
            logits[:TRIAL_TOKENS, [t for t in self.eos_ids if t < logits.shape[-1]]] = NEG_INF
            plain = logits.log_softmax(dim=-1).gather(1, ids[len(prompt) :, None])[:, 0]
            found = torch.from_numpy(answer.logprobs).to(plain)
            gaps.append(float((found - plain).abs().max()))
        return max(gaps)

    @torch.inference_mode()
    def sample(self, requests: Sequence[SampleRequest], version: int) -> list[list[Completion]]:
        """Answer all ``requests``; ``version`` is stamped on every token.

        The answers of a request that was cancelled meanwhile are cut short.
        """
        if self.pads:
            return self._sample_together(requests, version)
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            by_length[len(request.prompt)].append(index)
        answers: list[list[Completion]] = [[] for _ in requests]
        for indices in by_length.values():
            together = self._sample_together([requests[i] for i in indices], version)
            for index, answer in zip(indices, together, strict=True):
                answers[index] = answer
        return answers

    def _sample_together(
        self, requests: Sequence[SampleRequest], version: int
    ) -> list[list[Completion]]:
        batch = _Batch(requests, self.eos_ids, self.config.vocab_size, self.device)
        cache: Any = None  # the model makes its own
        if self.pads:
            n_layers = self.config.num_hidden_layers
            cache = ReservedCache(n_layers, batch.prompt_width + batch.max_tokens)
        logits, cache = self._forward(
            batch.prompt_ids, batch.prompt_positions, batch.prompt_mask, cache
        )
        rows = batch.prompt_of_row
        cache.reorder_cache(rows)
        logits = logits.index_select(0, rows)
        for step in range(batch.max_tokens):
            tokens = self._draw(batch, logits, step)
            n_before = batch.n_rows
            keep = batch.advance(tokens, step)
            if batch.n_rows == 0:
                break
            if keep is not None and batch.n_rows < n_before:
                cache.reorder_cache(keep)
                tokens = tokens.index_select(0, keep)
            positions = batch.prompt_lengths.index_select(0, batch.prompt_of_row) + step
            mask: torch.Tensor | None = None  # which cached columns a new token sees: all
            if batch.prompt_mask is not None:
                real = batch.real.index_select(0, batch.prompt_of_row)
                answer = torch.ones(len(real), step + 1, dtype=torch.bool, device=self.device)
                mask = torch.cat([real, answer], dim=1)[:, None, None]
            logits, cache = self._forward(tokens[:, None], positions[:, None], mask, cache)
        self.generated_tokens += int(batch.lengths.sum())
        return batch.completions(version)

    def _forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Logits after the last column, float32 ``[rows, vocab]``, and the cache."""
        self.steps += 1
        inputs = {self._cache_name: cache, **self._options}
        if self.pads:
            inputs |= {"attention_mask": mask, "position_ids": position_ids}
        output = self.model(input_ids=input_ids, use_cache=True, **inputs)
        if (kept := output.get(self._cache_name)) is None:
            raise ValueError(
                f"{type(self.model).__name__} returns no {self._cache_name}, so the torch engine "
                "cannot sample from it; use explorer.rollout_model.engine_type=vllm"
            )
        return output.logits[:, -1].float(), kept

    def _draw(self, batch: _Batch, logits: torch.Tensor, step: int) -> torch.Tensor:
        """Next token of every row, int64 ``[rows]``; its log-prob goes to the batch."""
        scaled = batch.processed(logits, step)
        top = scaled.amax(dim=-1, keepdim=True)
        cumulative = (scaled - top).exp_().cumsum(dim=-1)
        total = cumulative[:, -1:]
        if batch.all_greedy:
            tokens = scaled.argmax(dim=-1)
        else:
            # below 1, so that rounding the product cannot reach the total
            point = batch.uniform(self.generator).clamp_(max=1 - 2**-23)[:, None] * total
            tokens = torch.searchsorted(cumulative, point, right=True)[:, 0]
            if batch.any_greedy:
                tokens = torch.where(batch.greedy, scaled.argmax(dim=-1), tokens)
        chosen = scaled.gather(1, tokens[:, None]) - top - total.log()
        batch.tokens[step, batch.row] = tokens
        batch.logprobs[step, batch.row] = chosen[:, 0]
        return tokens


class _Batch:
    """The rows being sampled; row tensors shrink when finished rows are dropped."""

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        eos_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.requests = requests
        self.device = device
        self._pad_prompts()
        answers = [r.sampling.n for r in requests]
        self.first_rows = [0, *accumulate(answers)]
        counts = torch.tensor(answers, device=device)
        self.prompt_of_row = torch.arange(len(requests), device=device).repeat_interleave(counts)
        n_rows = len(self.prompt_of_row)
        self.max_tokens = max(r.sampling.max_tokens for r in requests)
        self.tokens = torch.zeros(self.max_tokens, n_rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(self.max_tokens, n_rows, device=device)
        self.lengths = torch.zeros(n_rows, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(n_rows, dtype=torch.bool, device=device)
        self.row = torch.arange(n_rows, device=device)  # output column of each live row
        self.alive = torch.ones(n_rows, dtype=torch.bool, device=device)
        self._stop_tables(eos_ids, vocab_size)
        self._generators = {
            i: torch.Generator(device).manual_seed(r.sampling.seed)
            for i, r in enumerate(requests)
            if r.sampling.seed is not None
        }
        self._load_row_parameters()

    # layout -----------------------------------------------------------------------------
    def _pad_prompts(self) -> None:
        lengths = [len(r.prompt) for r in self.requests]
        width = self.prompt_width = max(lengths)
        ids = np.zeros((len(lengths), width), dtype=np.int64)
        for i, request in enumerate(self.requests):
            ids[i, width - lengths[i] :] = request.prompt
        self.prompt_ids = torch.from_numpy(ids).to(self.device)
        self.prompt_lengths = torch.tensor(lengths, device=self.device)
        columns = torch.arange(width, device=self.device)
        padding = (width - self.prompt_lengths)[:, None]
        self.prompt_positions = (columns - padding).clamp(min=0)
        self.real = columns >= padding  # [prompts, width]
        self.prompt_mask: torch.Tensor | None = None
        if min(lengths) < width:
            causal = columns[None, :] <= columns[:, None]
            mask = causal[None] & self.real[:, None, :]
            # a padding query attends to itself, so that its softmax is defined
            mask |= torch.eye(width, dtype=torch.bool, device=self.device)
            self.prompt_mask = mask[:, None]

    # per-request parameters -------------------------------------------------------------
    def _stop_tables(self, eos_ids: Sequence[int], vocab_size: int) -> None:
        """``is_stop[kind, token]`` for each distinct set of extra stop ids."""
        kinds = {r.sampling.stop_token_ids: 0 for r in self.requests}
        self.is_stop = torch.zeros(len(kinds), vocab_size, dtype=torch.bool, device=self.device)
        for k, extra in enumerate(kinds):
            kinds[extra] = k
            self.is_stop[k, [*eos_ids, *(t for t in extra if t < vocab_size)]] = True
        self._kinds = torch.tensor(
            [kinds[r.sampling.stop_token_ids] for r in self.requests], device=self.device
        )

    def _column(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        by_prompt = torch.tensor(values, dtype=dtype, device=self.device)
        return by_prompt.index_select(0, self.prompt_of_row)

    def _load_row_parameters(self) -> None:
        """Row tensors of the sampling parameters, for the rows that are left."""
        params = [r.sampling for r in self.requests]
        self.kind = self._kinds.index_select(0, self.prompt_of_row)
        self.budget = self._column([p.max_tokens for p in params], torch.int64)
        self.min_tokens = self._column([p.min_tokens for p in params], torch.int64)
        self.greedy = self._column([p.temperature == 0 for p in params], torch.bool)
        heat = [p.temperature or 1.0 for p in params]
        self.heat = self._column(heat, torch.float32)[:, None]
        self.top_p = self._column([p.top_p for p in params], torch.float32)[:, None]
        self.top_k = self._column([max(p.top_k, 0) for p in params], torch.int64)[:, None]
        self._plain = all(h == 1.0 for h in heat)
        self._filtered = any(p.top_p < 1.0 or p.top_k > 0 for p in params)
        self._max_min_tokens = max(p.min_tokens for p in params)
        self.any_greedy = any(p.temperature == 0 for p in params)
        self.all_greedy = all(p.temperature == 0 for p in params)

    # one step ---------------------------------------------------------------------------
    @property
    def n_rows(self) -> int:
        return len(self.row)

    def processed(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """Logits of the distribution that is sampled, ``[rows, vocab]``."""
        if step < self._max_min_tokens:
            early = (step < self.min_tokens)[:, None] & self.is_stop[self.kind]
            logits = logits.masked_fill(early, NEG_INF)
        if not self._plain:
            logits = logits / self.heat
        if self._filtered:
            logits = filter_top(logits, self.top_k, self.top_p)
        return logits

    def uniform(self, generator: torch.Generator) -> torch.Tensor:
        """One number in [0, 1) per row, float32; a seeded request draws its own."""
        draws = torch.rand(self.n_rows, generator=generator, device=self.device)
        for i, own in self._generators.items():
            # all n are drawn, so that a row's numbers do not depend on the other rows
            numbers = torch.rand(self.requests[i].sampling.n, generator=own, device=self.device)
            mine = (self.prompt_of_row == i).nonzero()[:, 0]
            draws[mine] = numbers[self.row[mine] - self.first_rows[i]]
        return draws

    def advance(self, tokens: torch.Tensor, step: int) -> torch.Tensor | None:
        """Note which rows ended with ``tokens``.

        Returns the index of the rows that stay when finished ones are dropped, else None.
        """
        stop = self.is_stop[self.kind, tokens] & self.alive
        ended = (stop | (step + 1 >= self.budget)) & self.alive
        cancelled = [r.cancelled for r in self.requests]
        if any(cancelled):
            ended |= self._column(cancelled, torch.bool) & self.alive
        if not ended.any():
            return None
        finished = self.row[ended]
        self.lengths[finished] = step + 1
        self.stopped[finished] = stop[ended]
        self.alive &= ~ended
        n_alive = int(self.alive.sum())
        if n_alive > LIVE_SHARE_TO_COMPACT * self.n_rows:
            return None
        keep = self.alive.nonzero()[:, 0]
        self.row = self.row[keep]
        self.prompt_of_row = self.prompt_of_row[keep]
        self.alive = self.alive[keep]
        if n_alive:
            self._load_row_parameters()
        return keep

    # results ----------------------------------------------------------------------------
    def completions(self, version: int) -> list[list[Completion]]:
        tokens = self.tokens.T.to("cpu", torch.int32).contiguous().numpy()
        logprobs = self.logprobs.T.cpu().contiguous().numpy()
        versions = np.full(self.max_tokens, version, dtype=np.int32)
        lengths, stopped = self.lengths.tolist(), self.stopped.tolist()
        answers: list[list[Completion]] = []
        for first, end in pairwise(self.first_rows):
            group = []
            for r in range(first, end):
                n = lengths[r]
                reason = FINISH_STOP if stopped[r] else FINISH_LENGTH
                group.append(Completion(tokens[r, :n], logprobs[r, :n], versions[:n], reason))
            answers.append(group)
        return answers


def filter_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what top-k and then top-p exclude.

    ``top_k`` int64 ``[rows, 1]`` (0: off) keeps the k largest logits; ``top_p`` float32
    ``[rows, 1]`` (1: off) keeps the smallest set of the most likely tokens, renormalised
    after top-k, whose probability reaches p. The most likely token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)[None]
    k = torch.where(top_k > 0, top_k, logits.shape[-1])
    ordered = ordered.masked_fill(rank >= k, NEG_INF)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill((before >= top_p) & (rank > 0) & (top_p < 1.0), NEG_INF)
    return torch.empty_like(logits).scatter_(1, order, ordered)


class ReservedLayer(CacheLayerMixin):
    """Keys and values of one layer: ``[rows, heads, capacity, head_dim]``."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, head_dim = key_states.shape
        self.keys = key_states.new_empty(rows, heads, self.capacity, head_dim)
        self.values = value_states.new_empty(rows, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep, repeat or drop rows: row ``i`` becomes the old row ``beam_idx[i]``."""
        assert self.keys is not None
        assert self.values is not None
        for name, old in (("keys", self.keys), ("values", self.values)):
            new = old.new_empty(len(beam_idx), *old.shape[1:])
            # only what is filled is copied
            filled = new[:, :, : self.length]
            torch.index_select(old[:, :, : self.length], 0, beam_idx, out=filled)
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class ReservedCache(Cache):
    """One :class:`ReservedLayer` per decoder layer, ``capacity`` tokens per row."""

    def __init__(self, n_layers: int, capacity: int) -> None:
        super().__init__(layers=[ReservedLayer(capacity) for _ in range(n_layers)])

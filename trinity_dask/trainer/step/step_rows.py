"""One rank's rows of a train step, and the forward passes over them.

Invariant: for the same rows every rank makes the same number of passes (at least one), so
models whose passes are collective never wait for a peer; a pass that only keeps step is
blank: it has no valid token and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Optional

import numpy as np
import torch
from torch import Tensor

from trinity_dask.trainer.ranks.gradients import GradientGroup
from trinity_dask.trainer.step.batching import (
    Batch,
    Distinct,
    MicroBatch,
    UpdatePlan,
    Widths,
    blank_batch,
    micro_batches,
    take,
)
from trinity_dask.trainer.step.shared_prompts import Numbers, distinct, shared_prompts


@dataclass
class StepRows:
    """The collated rows of a rank, cut into forward passes of ``max_tokens`` padded tokens.

    ``batch`` gains tensors ``[B, R]`` phase by phase; ``unit`` rows are never separated.
    ``lockstep``: the models' passes are collective, so the ranks count them together.
    ``share_prompts``: equal prompts and equal rows of a pass are computed once; not in lockstep.
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
        self.widths = Widths.of(self.batch)
        self._numbers: Optional[Numbers] = None
        if self.share_prompts:
            ids, width = self.batch["input_ids"], int(self.batch["prompt_width"])
            self._numbers = Numbers.of(ids, self.widths.prompt, self.widths.response, width)
        self.known: dict[str, Tensor] = {}  # bool [B]: rows that a tensor was filled for
        self.batch = {name: self._placed(value) for name, value in self.batch.items()}

    def _placed(self, value: object) -> object:
        if not isinstance(value, Tensor) or value.device == self.device:
            return value
        return value.to(self.device, non_blocking=True)

    @property
    def every(self) -> np.ndarray:
        """Indices of all rows of this rank."""
        return np.arange(len(self.plan.rows))

    @property
    def mask(self) -> Tensor:
        return self.batch["action_mask"]

    def passes(self, rows: np.ndarray) -> Iterator[MicroBatch]:
        """Forward passes over ``rows``, then as many blank ones as the peers need."""
        parts = micro_batches(rows, self.widths, self.max_tokens, self.unit)
        wanted = max(len(parts), 1)
        if self.lockstep:
            counts = torch.tensor([wanted], device=self.group.device)
            wanted = int(self.group.max_(counts))
        for part in parts:
            yield self._pass(part)
        for _ in range(wanted - len(parts)):
            yield blank_batch(self.batch, self.unit)

    def _pass(self, rows: np.ndarray) -> MicroBatch:
        micro = take(self.batch, rows, self.widths)
        if self._numbers is None:
            return micro
        alike = distinct(self._numbers.rows[rows])
        if alike is None:
            return self._sharing(micro, rows)
        first, of_row = alike
        few = self._sharing(take(self.batch, rows[first], self.widths), rows[first])
        return replace(micro, distinct=Distinct(few, torch.from_numpy(of_row)))

    def _sharing(self, micro: MicroBatch, rows: np.ndarray) -> MicroBatch:
        assert self._numbers is not None
        prompts = self._numbers.prompts[rows]
        shared = shared_prompts(prompts, micro.prompt_width, micro.response_width)
        return replace(micro, shared=shared)

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

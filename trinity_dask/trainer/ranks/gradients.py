"""Sums over the trainer's ranks.

Invariant: gradients are *summed*: each rank's loss is already divided by counts of the
global mini-batch, so nothing is averaged and unequal shards weigh what they should.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Optional, TypeVar

import torch
from torch import Tensor

Number = TypeVar("Number", float, Tensor)

BUCKET_ELEMENTS = 16 << 20  # 64 MiB of float32 at a time bounds the copy


class GradientGroup:
    """All-reduce by sum over a bare process group; ``None`` is a single rank.

    A peer that is not there after ``timeout_s``, or that died, raises ``RuntimeError``.
    """

    def __init__(
        self, backend: Optional[Any] = None, device: str = "cpu", timeout_s: float = 1800.0
    ) -> None:
        self._backend = backend
        self.device = device
        self._timeout = timedelta(seconds=timeout_s)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by the sum over all ranks."""
        return self._reduce(tensor, torch.distributed.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by the largest values over all ranks."""
        return self._reduce(tensor, torch.distributed.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self._backend is not None:
            options = torch.distributed.AllreduceOptions()
            options.reduceOp = operation
            options.timeout = self._timeout
            self._backend.allreduce([tensor], options).wait()
        return tensor

    def sum_values(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Sum numbers by name; the names must be the same on all ranks."""
        if self._backend is None or not values:
            return {name: float(value) for name, value in values.items()}
        names = sorted(values)
        own = torch.tensor([float(values[n]) for n in names], dtype=torch.float64)
        return dict(zip(names, self.sum_(own.to(self.device)).tolist(), strict=True))

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum every ``.grad``, packed; a parameter without one counts as zeros."""
        if self._backend is None:
            return
        for bucket in _buckets(parameters):
            gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in bucket)
            flat = self.sum_(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterable[list[torch.nn.Parameter]]:
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if bucket and size + parameter.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        yield bucket


def add_into(totals: dict[str, Number], values: Mapping[str, Number]) -> None:
    """Add ``values`` to ``totals`` by name."""
    for name, value in values.items():
        totals[name] = totals[name] + value if name in totals else value

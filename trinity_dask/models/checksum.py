"""A checksum of named tensors that both sides of a weight transfer can compare.

Invariant: the value depends on every byte, its position inside its tensor, and the
tensor's name, dtype and shape; it does not depend on the order of the tensors, on how
they were packed into buckets, or on the device. It guards against wrong, stale and
misplaced tensors, not against an adversary.

Each tensor is read as 64-bit words in blocks of 32 rows of 4096 words (the last one may be
shorter). A block gives its column sums and its row sums, each weighted by fixed odd numbers
and added up: one word that moves changes a row sum or a column sum. Blocks combine as a
polynomial; all arithmetic is modulo 2^64. A block fits into a core's cache, so on a CPU
this runs at about the speed at which memory can be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

ROW_WORDS = 1 << 12
BLOCK_ROWS = 1 << 5
BLOCK_WORDS = ROW_WORDS * BLOCK_ROWS
_MASK_64 = (1 << 64) - 1
_MASK_63 = (1 << 63) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd: multiplication by it is a bijection modulo 2^64


class Digest:
    """Running checksum and byte count of the tensors given to :meth:`add`."""

    def __init__(self) -> None:
        self._sum = 0
        self.n_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Account one whole tensor under ``name``; any dtype, shape and device."""
        tensor = tensor.detach()
        label = f"{name}|{str(tensor.dtype).removeprefix('torch.')}|{tuple(tensor.shape)}"
        self._sum = (self._sum + _mix(_content(tensor) ^ _hash_label(label))) & _MASK_64
        self.n_bytes += tensor.numel() * tensor.element_size()

    @property
    def value(self) -> int:
        """The checksum so far: an integer in ``[0, 2^63)``."""
        return self._sum & _MASK_63


def checksum(named: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Checksum of ``(name, tensor)`` pairs: an integer in ``[0, 2^63)``."""
    digest = Digest()
    for name, tensor in named:
        digest.add(name, tensor)
    return digest.value


def _hash_label(label: str) -> int:
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")


def _mix(x: int) -> int:
    """A bijection of 64-bit integers in which every input bit moves many output bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


@lru_cache(maxsize=4)
def _weights(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd factors of the columns, int64 ``[ROW_WORDS]``, and of the rows ``[BLOCK_ROWS]``."""
    import torch

    words = np.random.Generator(np.random.PCG64(20240229)).integers(
        -(2**63), 2**63, size=ROW_WORDS + BLOCK_ROWS, dtype=np.int64
    )
    factors = torch.from_numpy(words | 1).to(device)
    return factors[:ROW_WORDS], factors[ROW_WORDS:]


def _content(tensor: torch.Tensor) -> int:
    import torch

    data = tensor.contiguous().view(-1).view(torch.uint8)
    n_whole = data.numel() // 8 * 8
    total = _fold(_as_words(data[:n_whole]))
    if n_whole < data.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: data.numel() - n_whole] = data[n_whole:]
        total = _join(total, [int(tail.view(torch.int64))])
    return total


def _as_words(data: torch.Tensor) -> torch.Tensor:
    import torch

    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()  # a 64-bit view needs an aligned start
    return data.view(torch.int64)


def _fold(words: torch.Tensor) -> int:
    """Polynomial over whole blocks, then over the rest's whole rows, then its last words."""
    n_blocks = words.numel() // BLOCK_WORDS
    end = n_blocks * BLOCK_WORDS
    total = _join(0, _block_values(words[:end].view(n_blocks, BLOCK_ROWS, ROW_WORDS)))
    rest = words[end:]
    n_rows = rest.numel() // ROW_WORDS
    if n_rows:
        total = _join(total, _block_values(rest[: n_rows * ROW_WORDS].view(1, -1, ROW_WORDS)))
    last = rest[n_rows * ROW_WORDS :]
    if last.numel():
        columns, _ = _weights(str(words.device))
        total = _join(total, [int((last * columns[: last.numel()]).sum())])
    return total


def _join(total: int, values: list[int]) -> int:
    for value in values:
        total = (total * _MULTIPLIER + value) & _MASK_64
    return total


def _block_values(blocks: torch.Tensor) -> list[int]:
    """One number for each block of ``[blocks, rows, ROW_WORDS]``."""
    import torch

    n_blocks, n_rows, _ = blocks.shape
    columns, rows = _weights(str(blocks.device))
    column_sums = blocks.new_empty(n_blocks, ROW_WORDS)
    row_sums = blocks.new_empty(n_blocks, n_rows)
    for k in range(n_blocks):
        # one block at a time: the second sum finds it in the cache
        torch.sum(blocks[k], dim=0, out=column_sums[k])
        torch.sum(blocks[k], dim=1, out=row_sums[k])
    values = (column_sums * columns).sum(dim=1) + (row_sums * rows[:n_rows]).sum(dim=1)
    return values.tolist()

"""A checksum of named tensors that both sides of a weight transfer can compare.

Invariant: the value depends on every byte, its position inside its tensor, and the
tensor's name, dtype and shape; it does not depend on the order of the tensors, on how
they were packed into buckets, or on the device. It guards against wrong, stale and
misplaced tensors, not against an adversary.

Each tensor is read as 64-bit words ``w`` (zero-padded) in blocks of 2^15. A block gives
``sum(w[i] * k[i])`` with fixed odd weights ``k``; blocks combine as a polynomial; all
arithmetic is modulo 2^64. On a CPU this runs faster than copying the tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

BLOCK_WORDS = 1 << 15
_BLOCKS_AT_ONCE = 256  # bounds the temporary of the path for accelerators
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
def _weights(device: str) -> torch.Tensor:
    import torch

    words = np.random.Generator(np.random.PCG64(20240229)).integers(
        -(2**63), 2**63, size=BLOCK_WORDS, dtype=np.int64
    )
    return torch.from_numpy(words | 1).to(device)


def _content(tensor: torch.Tensor) -> int:
    import torch

    data = tensor.contiguous().view(-1).view(torch.uint8)
    n_whole = data.numel() // 8 * 8
    words = _as_words(data[:n_whole])
    total = _fold(words)
    if n_whole < data.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: data.numel() - n_whole] = data[n_whole:]
        total = (total * _MULTIPLIER + int(tail.view(torch.int64))) & _MASK_64
    return total


def _as_words(data: torch.Tensor) -> torch.Tensor:
    import torch

    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()  # a 64-bit view needs an aligned start
    return data.view(torch.int64)


def _fold(words: torch.Tensor) -> int:
    """Polynomial over the weighted sums of the blocks; the last block may be short."""
    total = 0
    n_whole = words.numel() // BLOCK_WORDS * BLOCK_WORDS
    step = BLOCK_WORDS * _BLOCKS_AT_ONCE
    for start in range(0, n_whole, step):
        blocks = words[start : min(start + step, n_whole)].view(-1, BLOCK_WORDS)
        for block in _weighted_sums(blocks):
            total = (total * _MULTIPLIER + block) & _MASK_64
    if n_whole < words.numel():
        (last,) = _weighted_sums(words[n_whole:].view(1, -1))
        total = (total * _MULTIPLIER + last) & _MASK_64
    return total


def _weighted_sums(blocks: torch.Tensor) -> list[int]:
    weights = _weights(str(blocks.device))[: blocks.shape[1]]
    if blocks.device.type == "cpu":
        return blocks.mv(weights).tolist()
    return (blocks * weights).sum(dim=1).tolist()  # integer mv exists on CPU only

"""A checksum of named tensors that both sides of a weight transfer can compare.

Invariant: the value depends on every byte, its position inside its tensor, and the
tensor's name, dtype and shape; it does not depend on the order of the tensors, or on how
they were packed into buckets. It guards against wrong, stale and misplaced tensors, not
against an adversary.

The bytes of a tensor in a CPU's memory are hashed by XXH3. An accelerator would have to send
them there; so it hashes them where they are, with sums. Both sides of a transfer hash in the
same way: all members of a group have their tensors on the same kind of device, and files are
written and read by CPUs.

For the sums a tensor is read as 64-bit words in blocks of 32 rows of 4096 words (the last one
may be shorter). A block gives its column sums and its row sums, each weighted by fixed odd
numbers and added up: one word that moves changes a row sum or a column sum. Blocks combine as a
polynomial; all arithmetic is modulo 2^64.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

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
        data = _bytes_of(tensor)
        self._add(name, tensor, _content(data), data.numel())

    def add_copying(self, name: str, tensor: torch.Tensor, to: torch.Tensor) -> None:
        """As :meth:`add`, of a tensor in a CPU's memory, and copy its bytes to ``to`` (uint8,
        as many as it has): what was hashed is still in the cache when it is copied."""
        data = _bytes_of(tensor)
        if data.numel() <= COPY_BYTES:
            self._add(name, tensor, _content(data), data.numel())
            to.copy_(data)
            return
        content = xxhash.xxh3_64()
        for source, target in zip(data.split(COPY_BYTES), to.split(COPY_BYTES), strict=True):
            content.update(source.numpy())
            target.copy_(source)
        self._add(name, tensor, content.intdigest(), data.numel())

    def _add(self, name: str, tensor: torch.Tensor, content: int, n_bytes: int) -> None:
        # a bijection of 64-bit integers in which every input bit moves many output bits
        x = content ^ _hash_label(name, tensor.dtype, tensor.shape)
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
        self._sum = (self._sum + (x ^ (x >> 31))) & _MASK_64
        self.n_bytes += n_bytes

    def join(self, other: Digest) -> None:
        """Account what ``other`` did; the tensors of the two are different ones."""
        self._sum = (self._sum + other._sum) & _MASK_64
        self.n_bytes += other.n_bytes

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


def in_threads(work: Callable[[Digest, T], None], items: Sequence[T], sizes: list[int]) -> Digest:
    """``work(digest, item)`` for all ``items`` of ``sizes`` bytes; several threads share them.

    Neighbours stay together, and each thread has a few lots of about the same size: one call
    per tensor would cost more than small tensors do.
    """
    total = Digest()

    def one_lot(lot: Sequence[T]) -> Digest:
        digest = Digest()
        for item in lot:
            work(digest, item)
        return digest

    with ThreadPoolExecutor(N_THREADS, "weights") as pool:
        for digest in pool.map(one_lot, _lots(items, sizes)):
            total.join(digest)
    return total


def _lots(items: Sequence[T], sizes: list[int]) -> list[list[T]]:
    limit = sum(sizes) // (N_THREADS * LOTS_PER_THREAD) + 1
    lots: list[list[T]] = [[]]
    room = limit
    for item, size in zip(items, sizes, strict=True):
        if lots[-1] and size > room:
            lots.append([])
            room = limit
        lots[-1].append(item)
        room -= size
    return lots


_affinity = getattr(os, "sched_getaffinity", None)
_N_CORES = len(_affinity(0)) if _affinity else os.cpu_count() or 1
N_THREADS = min(4, _N_CORES)  # memory is no faster for more
LOTS_PER_THREAD = 6
COPY_BYTES = 1 << 22


@lru_cache(maxsize=1 << 16)  # a model's tensors are the same at each update
def _hash_label(name: str, dtype: torch.dtype, shape: torch.Size) -> int:
    label = f"{name}|{str(dtype).removeprefix('torch.')}|{tuple(shape)}"
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=4)
def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd factors of the columns, int64 ``[ROW_WORDS]``, and of the rows ``[BLOCK_ROWS]``."""
    import torch

    words = np.random.Generator(np.random.PCG64(20240229)).integers(
        -(2**63), 2**63, size=ROW_WORDS + BLOCK_ROWS, dtype=np.int64
    )
    factors = torch.from_numpy(words | 1).to(device)
    return factors[:ROW_WORDS], factors[ROW_WORDS:]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _content(data: torch.Tensor) -> int:
    import torch

    if _on_cpu(data):
        memory: Any = data.numpy()
        return xxhash.xxh3_64_intdigest(memory)
    n_whole = data.numel() // 8 * 8
    whole = data[:n_whole]
    if whole.storage_offset() % 8 or whole.data_ptr() % 8:
        whole = whole.clone()  # a 64-bit view needs an aligned start
    total = _fold(whole.view(torch.int64))
    if n_whole < data.numel():
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: data.numel() - n_whole] = data[n_whole:]
        total = _join(total, [int(tail.view(torch.int64))])
    return total


def _on_cpu(data: torch.Tensor) -> bool:
    return data.device.type == "cpu"


def _fold(words: torch.Tensor) -> int:
    """Polynomial over whole blocks, then over the rest's whole rows, then its last words."""
    n_blocks = len(words) // BLOCK_WORDS
    end = n_blocks * BLOCK_WORDS
    total = _join(0, _block_values(words[:end].view(n_blocks, BLOCK_ROWS, ROW_WORDS)))
    rest = words[end:]
    n_rows = len(rest) // ROW_WORDS
    if n_rows:
        total = _join(total, _block_values(rest[: n_rows * ROW_WORDS].view(1, -1, ROW_WORDS)))
    last = rest[n_rows * ROW_WORDS :]
    if len(last):
        columns, _ = _factors(words.device)
        total = _join(total, [int((last * columns[: len(last)]).sum())])
    return total


def _join(total: int, values: list[int]) -> int:
    for value in values:
        total = (total * _MULTIPLIER + value) & _MASK_64
    return total


def _block_values(blocks: torch.Tensor) -> list[int]:
    """One number for each block of ``[blocks, rows, ROW_WORDS]``."""
    columns, rows = _factors(blocks.device)
    by_column = (blocks.sum(dim=1) * columns).sum(dim=1)
    by_row = (blocks.sum(dim=2) * rows[: blocks.shape[1]]).sum(dim=1)
    return (by_column + by_row).tolist()

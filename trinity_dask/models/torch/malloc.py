"""How a process gets and keeps its memory.

Invariant: a change of speed only. glibc gives large freed blocks back to the kernel and
faults them in again page by page at the next allocation; a process that replaces all its
weights at every update spends more time on that than on copying them.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

HUGE_PAGE_BYTES = 1 << 21
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Have this process reuse what it frees, for the rest of its life.

    Returns False where the C library has no ``mallopt`` (musl, macOS); nothing changes then.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def large_buffer(n_bytes: int, device: Any = "cpu") -> torch.Tensor:
    """Uninitialised uint8 ``[n_bytes]``; in a CPU's memory on huge pages, where the system has
    some: copying between a socket and memory is faster with them.
    """
    import torch

    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if torch.device(device).type != "cpu" or advice is None or n_bytes < HUGE_PAGE_BYTES:
        return torch.empty(n_bytes, dtype=torch.uint8, device=device)
    pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without
        pages.madvise(advice)
    return torch.frombuffer(pages, dtype=torch.uint8)

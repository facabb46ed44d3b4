"""Keeping freed memory in the process.

Invariant: a change of speed only. glibc gives large freed blocks back to the kernel and
faults them in again page by page at the next allocation; a process that replaces all its
weights at every update spends more time on that than on copying them.
"""

from __future__ import annotations

import ctypes

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

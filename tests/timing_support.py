"""How long a piece of our own code takes, when other processes are busy too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def thread_seconds(call: Callable[[], object], enough_s: float) -> float:
    """The least processor time of this thread over three calls; one that stays below
    ``enough_s`` is not repeated.

    What the garbage collector does is not counted, since it looks at everything that a test
    process has ever made; the least of several, since a neighbour on the same core takes its
    share of the caches.
    """
    least = float("inf")
    for _ in range(3):
        gc.disable()
        try:
            started = time.thread_time()
            call()
            least = min(least, time.thread_time() - started)
        finally:
            gc.enable()
        if least < enough_s:
            break
    return least

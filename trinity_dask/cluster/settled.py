"""What a process has loaded is left alone by the garbage collector.

Invariant: a change of speed only. A worker with torch, transformers and Dask holds some
400 000 objects, and one full collection looks at all of them: a quarter of a second in which
nothing else runs in the process, in the middle of a step.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Collect what is garbage now, and never look at the rest again.

    For a worker of a run that has loaded what it needs. Objects made from here on are
    collected as ever.
    """
    gc.collect()
    gc.freeze()

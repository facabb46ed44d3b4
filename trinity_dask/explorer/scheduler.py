"""Trinity-RFT's path of the scheduler and its records.

Invariant: nothing is defined here, and nothing is loaded before it is used.
"""

from __future__ import annotations

from trinity_dask import lazy

_SOURCES = dict.fromkeys(
    (
        "CompletedTaskResult",
        "RunnerWrapper",
        "RunningTaskState",
        "Scheduler",
        "TaskWrapper",
        "sort_batch_id",
    ),
    "trinity_dask.compat.scheduler",
)
__all__ = list(_SOURCES)
__getattr__ = lazy.names(__name__, _SOURCES)

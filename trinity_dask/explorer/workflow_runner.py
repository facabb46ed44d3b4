"""Trinity-RFT's path of the workflow runner.

Invariant: nothing is defined here, and nothing is loaded before it is used.
"""

from __future__ import annotations

from trinity_dask import lazy

_SOURCES = dict.fromkeys(
    (
        "DebugWorkflowRunner",
        "Status",
        "WorkflowRunner",
    ),
    "trinity_dask.compat.workflow_runner",
)
__all__ = list(_SOURCES)
__getattr__ = lazy.names(__name__, _SOURCES)

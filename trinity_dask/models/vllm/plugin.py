"""What vLLM calls in every process it starts (entry point group ``vllm.general_plugins``).

Invariant: only vLLM's own child processes are watched, never the Dask worker or a user's
process: those do not belong to vLLM, and may outlive their parent on purpose.
"""

from __future__ import annotations

import multiprocessing

CHILD_PREFIXES = ("EngineCore", "VllmWorker")


def register() -> None:
    """Make vLLM's engine and worker processes end with the process that started them."""
    if multiprocessing.current_process().name.startswith(CHILD_PREFIXES):
        from trinity_dask.models.actor.parent_watch import watch_parent

        watch_parent()

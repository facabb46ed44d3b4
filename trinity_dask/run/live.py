"""The runs that this process has started and that have not ended.

Invariant: of two runs of this process that need the same lock of a job, the second is refused at
once: waiting for it, as for a dying process of somebody else, would be waiting for ourselves.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Optional

from trinity_dask.launcher.job_lock import SHARED, Claim, JobInUse, claims_of

if TYPE_CHECKING:
    from trinity_dask.run.session import Run

_lock = threading.Lock()
_live: dict[str, Run] = {}  # by run id, in the order of their starts


def enter(run: Run) -> None:
    """Count ``run`` among the live ones.

    Raises:
        JobInUse: one of them runs the same job.
    """
    mine = claims_of(run.stages)
    with _lock:
        for other in _live.values():
            if other.base_dir == run.base_dir and _meet(mine, claims_of(other.stages)):
                raise JobInUse(
                    f"{run.base_dir} is being run by this process already: {other!r}. "
                    f"Run.current() is that run: go on with it (run = Run.current(); run.wait()), "
                    "end it first (Run.current().stop()), or give this one another name=..."
                )
        _live[run.run_id] = run


def leave(run: Run) -> None:
    """``run`` has ended; it may never have entered."""
    with _lock:
        _live.pop(run.run_id, None)


def newest(name: Optional[str] = None) -> Run:
    """The live run that was started last (of those whose id or job name is ``name``).

    Raises:
        LookupError: there is none (lists those that are).
    """
    with _lock:
        runs = list(_live.values())
    found = [run for run in runs if name is None or name in (run.run_id, run.cfg.name)]
    if not found:
        known = ", ".join(run.run_id for run in runs) or "none"
        raise LookupError(
            f"this process has no live run {name or ''}".rstrip() + f" (live: {known}); "
            "Run.attach(<job directory or scheduler address>) finds one of another process"
        )
    return found[-1]


def _meet(mine: tuple[Claim, ...], theirs: tuple[Claim, ...]) -> bool:
    """Whether the two cannot hold their locks at the same time."""
    held = dict(theirs)
    return any(
        file in held and not (kind == SHARED and held[file] == SHARED) for file, kind in mine
    )

"""What a scheduler shows of its runners while it runs.

Invariant: looking changes nothing but the lag metric, which says each delay once.
"""

from __future__ import annotations

from typing import Any, Optional

from trinity_dask.explorer.schedule.scheduler import Scheduler

SHOWN = 16
LATE_S = 1.0


def live_status(scheduler: Optional[Scheduler]) -> dict[str, Any]:
    """``runners``: states of the busiest, the longest at work first; ``late_workers``: event
    loops that are more than a second behind, with the seconds."""
    if scheduler is None:
        return {}
    lags = scheduler.watch.lags() if scheduler.watch is not None else {}
    late = {name: round(lag, 1) for name, lag in lags.items() if lag > LATE_S}
    return {"runners": scheduler.runners.busy(SHOWN), "late_workers": late}


def lag_metrics(scheduler: Optional[Scheduler]) -> dict[str, float]:
    """``explorer/loop_lag_s``, the worst since the last call; empty when not measured yet."""
    if scheduler is None or scheduler.watch is None:
        return {}
    return scheduler.watch.take_lag()

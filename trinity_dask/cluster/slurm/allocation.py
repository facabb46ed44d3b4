"""The end of the job that this process is in, and when a run in it has to stop.

Invariant: a run is told to stop once, while there is still the lead and the time of a save left;
an end that is put off or brought forward counts from the next look. Where Slurm says no end, or
does not answer, nothing is stopped: the site's own signal still comes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trinity_dask.cluster.slurm.queue import SlurmError, ask

log = logging.getLogger(__name__)

LOOK_S = 60.0  # between two looks at the end, which an operator may move
#: names the file that is made when a run stops because its time is over
TIME_OVER = "TRINITY_DASK_TIME_OVER"


def in_allocation() -> bool:
    return "SLURM_JOB_ID" in os.environ


def end_time() -> float | None:
    """When the job of this process ends, in seconds since the epoch; None: at no known time.

    Raises:
        SlurmError: the controller does not answer.
    """
    told = ask("squeue", "-h", "-j", os.environ["SLURM_JOB_ID"], "-o", "%e").strip()
    try:
        return time.mktime(time.strptime(told, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # N/A, NONE
        return None


class TimeLimit:
    """Says when it is time to stop, of a job that is looked at every now and then.

    ``lead_s`` is kept at the end of the job, but at most a quarter of what it had at first; the
    time of the last save comes on top.
    """

    def __init__(self, lead_s: float) -> None:
        self._lead_s = lead_s
        self._first_left_s: float | None = None

    def stops_in(self, end: float, now: float, save_s: float) -> float:
        """Seconds from ``now`` until the run has to stop; negative: it should have."""
        if self._first_left_s is None:
            self._first_left_s = end - now
        lead_s = min(self._lead_s, self._first_left_s / 4)
        return end - now - lead_s - save_s


def watch(
    lead_s: float,
    save_s: Callable[[], float],
    stop: Callable[[str], object],
    over: threading.Event,
) -> None:
    """Call ``stop`` when it is time to, from a thread; ``over`` ends the watch."""

    def look() -> None:
        limit = TimeLimit(lead_s)
        while not over.is_set():
            wait_s = LOOK_S
            try:
                end = end_time()
            except SlurmError as error:
                log.info("the end of the job is not known: %s", error)
                end = None
            if end is not None:
                left_s = limit.stops_in(end, time.time(), save_s())
                if left_s <= 0:
                    _stop_for(end, stop)
                    return
                wait_s = min(LOOK_S, left_s)
            over.wait(wait_s)

    threading.Thread(target=look, name="time-limit", daemon=True).start()


def _stop_for(end: float, stop: Callable[[str], object]) -> None:
    told = os.environ.get(TIME_OVER)
    if told:  # first: the driver may be over before stop returns
        Path(told).touch()
    stop(f"the job ends at {time.strftime('%H:%M:%S', time.localtime(end))}")

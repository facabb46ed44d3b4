"""A small process that cancels what a run has in the queue once its driver is gone.

Invariant: however the driver ended (also by SIGKILL), no job of its run is left in the queue by
that run alone; jobs of others are never touched. A driver that was killed cannot do it itself.

Run as a script with the standard library only: ``reaper.py PID PREFIX``; PREFIX begins the names of
the run's jobs.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from contextlib import suppress

POLL_S = 1.0
PATIENCE_S = 600.0  # a controller may be busy for a while, or gone for good
TRY_AGAIN_S = 3.0
COMMAND_S = 10.0


def wait_for_end(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # no pidfd here
        with suppress(ProcessLookupError):
            while True:
                os.kill(pid, 0)
                time.sleep(POLL_S)
        return
    select.select([fd], [], [])


def jobs_named(prefix: str) -> list[str]:
    """Numbers of this user's jobs whose names begin so."""
    command = ["squeue", "-h", "--me", "-o", "%i|%j"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
    pairs = (line.partition("|") for line in done.stdout.splitlines())
    return [job for job, _, name in pairs if name.startswith(prefix)]


def main(argv: list[str]) -> None:
    pid, prefix = int(argv[0]), argv[1]
    wait_for_end(pid)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(OSError, subprocess.SubprocessError):
            jobs = jobs_named(prefix)
            if not jobs:
                return
            subprocess.run(["scancel", "--quiet", *jobs], timeout=COMMAND_S)
        time.sleep(TRY_AGAIN_S)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Find, name and end processes that a test run left behind.

    python3 scripts/leftovers.py NAME=VALUE

looks for processes that inherited this environment variable, waits a while for them to
end by themselves, then kills what is left. Exit status 1 says that something had to be
killed.

Invariant: only processes with the mark are touched, and never the caller or its parents.
Needs nothing but a Python and Linux's /proc.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

GRACE_S = 20.0


def parent(pid: int) -> int:
    """The parent's process id; 0 when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def ancestors(pid: int) -> set[int]:
    """``pid`` and everything above it."""
    found = set()
    while pid > 0:
        found.add(pid)
        pid = parent(pid)
    return found


def marked(mark: str) -> dict[int, str]:
    """Command lines of the living processes whose environment holds ``mark``."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(directory.name)] = command.decode(errors="replace").strip()[:200]
        except OSError:
            continue  # it ended, or belongs to someone else
    return found


def remaining(mark: str, own: set[int], deadline: float) -> dict[int, str]:
    """What is still there at ``deadline``, or nothing as soon as nothing is."""
    while True:
        left = {pid: text for pid, text in marked(mark).items() if pid not in own}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def main() -> int:
    if len(sys.argv) != 2 or "=" not in sys.argv[1]:
        print(__doc__, file=sys.stderr)
        return 2
    left = remaining(sys.argv[1], ancestors(os.getpid()), time.monotonic() + GRACE_S)
    for pid, command in left.items():
        print(f"LEFT BEHIND, now killed: {pid} {command}", file=sys.stderr)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())

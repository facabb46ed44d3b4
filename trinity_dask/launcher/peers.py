"""What one side of a job tells the other about its end.

Invariant: an end says in one line why, so that the other side can say it too.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class End:
    """How a side of a job ended: ``done``, ``interrupted`` or ``failed``, and why."""

    outcome: str
    message: str = ""


def end_of(error: Optional[BaseException], stopping: bool) -> End:
    """How a stage ended that was left with ``error`` (None: without)."""
    if error is None or isinstance(error, asyncio.CancelledError):
        return End("interrupted" if stopping or error is not None else "done")
    return End("failed", describe(error))


def describe(error: BaseException) -> str:
    """One line: the type, the message, and the root cause when it says more."""
    line = f"{type(error).__name__}: {error}"
    cause = error.__cause__
    if cause is not None and str(cause) not in line:
        line += f" (caused by {type(cause).__name__}: {cause})"
    return line

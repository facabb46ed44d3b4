"""Awaiting user code so that it ends when it should, and its end means what it should.

Invariant: a workflow that cancels itself is a failed workflow, not a cancelled caller; a
caller that is cancelled takes the workflow with it; one that blocks the event loop is
interrupted at its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Coroutine
from typing import Any, Optional

from trinity_dask.cluster.loop_watch import Interrupted, user_task
from trinity_dask.explorer.schedule.outcome import RunError

log = logging.getLogger("trinity_dask.explorer")

SETTLE_S = 1.0
TRACEBACK_CHARS = 2000
MESSAGE_CHARS = 2000


class RunCancelled(RuntimeError):
    """User code raised ``CancelledError`` although nobody had cancelled it."""


class LoopBlocked(TimeoutError):
    """Asynchronous user code that held the event loop until it was interrupted."""


async def bounded(work: Coroutine[Any, Any, Any], timeout_s: Optional[float], what: str) -> Any:
    """The result of ``work``, or what it raised.

    Raises:
        TimeoutError: not done after ``timeout_s``; ``work`` was cancelled.
        LoopBlocked: the same, and it had to be interrupted, because it did not await.
        RunCancelled: ``work`` cancelled itself.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    child = user_task(work, deadline, what)
    try:
        done, _ = await asyncio.wait({child}, timeout=timeout_s)
    except asyncio.CancelledError:
        await stop([child])
        raise
    if not done:
        await stop([child])
        raise TimeoutError(f"{what} did not return within {timeout_s:g} s")
    return outcome_of(child, what)


def outcome_of(child: asyncio.Future[Any], what: str) -> Any:
    """Result of a finished future, with a cancellation of its own as an error."""
    if child.cancelled():
        raise RunCancelled(f"{what} was cancelled from within")
    try:
        return child.result()
    except Interrupted:
        raise LoopBlocked(
            f"{what} held the event loop without an await and was interrupted at its deadline; "
            "blocking code belongs into a thread (asyncio.to_thread) or into a workflow that is "
            "not async"
        ) from None


async def stop(children: list[asyncio.Future[Any]]) -> None:
    """Cancel and give them a moment; what ignores that is left behind, with a warning."""
    for child in children:
        child.cancel()
    if not children:
        return
    _, alive = await asyncio.wait(children, timeout=SETTLE_S)
    if alive:
        log.warning("%d workflow(s) ignore their cancellation and go on unattended", len(alive))
    for child in set(children) - alive:
        if not child.cancelled():
            child.exception()  # marks it as seen: it was given up on purpose


def describe(error: BaseException) -> RunError:
    """The error as data: type, beginning of the message, end of the traceback."""
    text = "".join(traceback.format_exception(error))
    return RunError(type(error).__name__, _shortened(str(error)), text[-TRACEBACK_CHARS:])


def _shortened(message: str) -> str:
    """It travels with every failed run of a group, and into logs."""
    cut = len(message) - MESSAGE_CHARS
    return message if cut <= 0 else f"{message[:MESSAGE_CHARS]}... ({cut} more characters)"

"""Awaiting user code so that it ends when it should, and its end means what it should.

Invariant: a workflow that cancels itself is a failed workflow, not a cancelled caller; a
caller that is cancelled takes the workflow with it.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable
from typing import Any, Optional

from trinity_dask.explorer.status import RunError

log = logging.getLogger("trinity_dask.explorer")

SETTLE_S = 1.0
TRACEBACK_CHARS = 2000


class RunCancelled(RuntimeError):
    """User code raised ``CancelledError`` although nobody had cancelled it."""


async def bounded(work: Awaitable[Any], timeout_s: Optional[float], what: str) -> Any:
    """The result of ``work``, or what it raised.

    Raises:
        TimeoutError: not done after ``timeout_s``; ``work`` was cancelled.
        RunCancelled: ``work`` cancelled itself.
    """
    child = asyncio.ensure_future(work)
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
    return child.result()


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
    """The error as data: type, message, end of the traceback."""
    text = "".join(traceback.format_exception(error))
    return RunError(type(error).__name__, str(error), text[-TRACEBACK_CHARS:])

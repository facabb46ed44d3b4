"""Awaiting user code so that it ends when it should: with its caller, or when it is recalled.

Invariant: a caller that is cancelled takes the jobs it waits for with it. An attempt that is
asked to come back ends soon, with each of its unfinished runs as a failed run of type
``Recalled``; asking for one that is not here changes nothing. The engine is only ever called on
the worker's loop; a call from another loop is handed over and awaited there.

When a batch is cut off, a cancelled attempt would take its finished runs with it: so it is
recalled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Optional

from trinity_dask.explorer.schedule.tasks import RunError
from trinity_dask.workflows.threads import run_in_thread
from trinity_dask.workflows.workflow import Workflow

log = logging.getLogger("trinity_dask.explorer")

SETTLE_S = 1.0
TRACEBACK_CHARS = 2000
MESSAGE_CHARS = 2000

_here: dict[str, asyncio.Event] = {}  # the attempts of this worker, by Dask key
_since: dict[str, float] = {}  # when each of them began, time.monotonic()
_bell: ContextVar[Optional[asyncio.Event]] = ContextVar("trinity_recall", default=None)


class Recalled(RuntimeError):
    """A run was not finished when its batch was cut off."""

    def __init__(self) -> None:
        super().__init__("its batch was cut off before it was finished")


def recall(keys: Sequence[str]) -> None:
    """Ask attempts on this worker to come back. Runs on the worker's event loop."""
    for key in keys:
        bell = _here.get(key)
        if bell is not None:
            bell.set()


@contextmanager
def recallable(key: str) -> Iterator[None]:
    """While an attempt runs, it can be asked for by ``key``."""
    bell = _here[key] = asyncio.Event()
    token = _bell.set(bell)
    _since[key] = time.monotonic()
    try:
        yield
    finally:
        _bell.reset(token)
        del _here[key], _since[key]


def ran_s(keys: Sequence[str]) -> dict[str, Optional[float]]:
    """For how many seconds each attempt has run on this worker; None: it does not run here (it
    waits, or has ended). Runs on the worker's event loop."""
    now = time.monotonic()
    return {key: now - _since[key] if key in _since else None for key in keys}


def was_recalled() -> bool:
    """Whether the attempt of this context has been asked to come back."""
    bell = _bell.get()
    return bell is not None and bell.is_set()


async def until_recalled(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``work``.

    Raises:
        Recalled: it was cut short. Anything that ``work`` raised.
    """
    if was_recalled():
        work.close()
        raise Recalled
    job = asyncio.ensure_future(work)
    if await wait_recallable([job], None, asyncio.ALL_COMPLETED):
        await stop([job])
        raise Recalled
    return job.result()


async def wait_recallable(
    jobs: Sequence[asyncio.Future[Any]], timeout_s: Optional[float], return_when: str
) -> set[asyncio.Future[Any]]:
    """``asyncio.wait`` that also ends when the attempt is recalled; the jobs that are not done.

    When it is itself cancelled, the jobs are stopped first.
    """
    bell = _bell.get() or asyncio.Event()
    waiting = asyncio.ensure_future(asyncio.wait(jobs, timeout=timeout_s, return_when=return_when))
    ringing = asyncio.ensure_future(bell.wait())
    try:
        await asyncio.wait({waiting, ringing}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await stop(jobs)
        raise
    finally:
        waiting.cancel()
        ringing.cancel()
    return {job for job in jobs if not job.done()}


async def stop(jobs: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel and give them a moment; what ignores that is left behind, with a warning."""
    for job in jobs:
        job.cancel()
    if not jobs:
        return
    ended, alive = await asyncio.wait(jobs, timeout=SETTLE_S)
    if alive:
        log.warning("%d workflow(s) ignore their cancellation and go on unattended", len(alive))
    for job in ended:
        if not job.cancelled():
            job.exception()  # marks it as seen: it was given up on purpose


def as_run_error(error: BaseException, run: Optional[int] = None) -> RunError:
    """The error of run ``run`` as data: type, beginning of the message, end of the traceback.

    It travels with every failed run of a group, and into logs.
    """
    text, message = "".join(traceback.format_exception(error)), str(error)
    cut = len(message) - MESSAGE_CHARS
    if cut > 0:
        message = f"{message[:MESSAGE_CHARS]}... ({cut} more characters)"
    return RunError(type(error).__name__, message, text[-TRACEBACK_CHARS:], run)


class LoopBridge:
    """An engine or model wrapper usable from any event loop.

    Coroutine methods run on ``home``; everything else is passed through.
    """

    def __init__(self, target: Any, home: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._home = home

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not inspect.iscoroutinefunction(value):
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            if asyncio.get_running_loop() is self._home:
                return await value(*args, **kwargs)
            there = asyncio.run_coroutine_threadsafe(value(*args, **kwargs), self._home)
            return await asyncio.wrap_future(there)

        return call


async def run_async_in_thread(workflow: Workflow, timeout_s: Optional[float], name: str) -> Any:
    """``workflow.run_async()`` in a thread with its own loop; its model is bridged.

    Raises:
        TimeoutError: not done after ``timeout_s``.
    """
    model: Any = workflow.model
    bridged: Any = LoopBridge(model, asyncio.get_running_loop())
    workflow.model = bridged
    try:
        return await run_in_thread(
            lambda: asyncio.run(workflow.run_async()), timeout_s=timeout_s, name=name
        )
    finally:
        workflow.model = model

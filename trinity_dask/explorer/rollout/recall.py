"""Attempts that are asked to come back with the runs they have finished.

Invariant: an attempt that is asked ends soon, with each of its unfinished runs as a failed
run of type ``Recalled``; asking for one that is not here changes nothing.

When a batch is cut off, a cancelled attempt would take its finished runs with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Optional

from trinity_dask.explorer.rollout.running import stop

_here: dict[str, asyncio.Event] = {}  # the attempts of this worker, by Dask key
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
    try:
        yield
    finally:
        _bell.reset(token)
        del _here[key]


def was_recalled() -> bool:
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
    done, _ = await wait_recallable([job], None, asyncio.ALL_COMPLETED)
    if not done:
        await stop([job])
        raise Recalled
    return job.result()


async def wait_recallable(
    jobs: Sequence[asyncio.Future[Any]], timeout_s: Optional[float], return_when: str
) -> tuple[set[asyncio.Future[Any]], set[asyncio.Future[Any]]]:
    """``asyncio.wait`` that also ends when the attempt is recalled.

    When it is itself cancelled, the jobs are stopped first.
    """
    bell = _bell.get()
    waiting = asyncio.ensure_future(asyncio.wait(jobs, timeout=timeout_s, return_when=return_when))
    ringing = asyncio.ensure_future((bell or asyncio.Event()).wait())
    try:
        await asyncio.wait({waiting, ringing}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await stop(list(jobs))
        raise
    finally:
        waiting.cancel()
        ringing.cancel()
    done = {job for job in jobs if job.done()}
    return done, set(jobs) - done

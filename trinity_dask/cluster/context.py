"""Which Dask worker this code runs in, and the client that belongs to it.

Invariant: inside a worker process :func:`current_worker` finds the worker from everywhere
(task, actor method, asyncio task, plugin, helper thread), not only where Dask's context
variable happens to be set. Outside a worker it is ``None``.
"""

from __future__ import annotations

import gc

from distributed import Client, Worker, get_worker

_remembered: Worker | None = None


def remember_worker(worker: Worker) -> None:
    """Make ``worker`` the answer of :func:`current_worker` for this whole process."""
    global _remembered
    _remembered = worker


def forget_worker(worker: Worker) -> None:
    global _remembered
    if _remembered is worker:
        _remembered = None


def current_worker() -> Worker | None:
    """The worker of the calling code, or ``None`` outside of one.

    Dask's context variable decides where it is set, since several workers may share a
    process (``processes=False``); elsewhere the one that the process guard remembered.
    """
    try:
        return get_worker()
    except ValueError:
        return _remembered


async def worker_client() -> Client:
    """The running client of this worker, for use on the worker's event loop.

    Raises:
        RuntimeError: called outside of a Dask worker.
    """
    worker = current_worker()
    if worker is None:
        raise RuntimeError(
            "no Dask worker in this process; pass the client explicitly (client=...)"
        )
    client = worker._get_client()
    # created on the loop, the client is only connected after it has been awaited
    await client
    return client


def freeze_loaded() -> None:
    """Collect what is garbage now, and never look at the rest again.

    For a worker of a run that has loaded what it needs. With torch, transformers and Dask it
    holds some 400 000 objects, and one full collection looks at all of them: a quarter of a
    second in which nothing else runs, in the middle of a step. What is made from here on is
    collected as ever.
    """
    gc.collect()
    gc.freeze()

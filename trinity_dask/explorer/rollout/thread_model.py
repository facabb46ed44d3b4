"""Asynchronous workflows in threads, each on an event loop of its own.

Invariant: the engine is only ever called on the worker's loop; a call from another loop is
handed over and awaited there.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Optional

from trinity_dask.workflows.threads import run_in_thread
from trinity_dask.workflows.workflow import Workflow


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
        return self._bridged(value)

    def _bridged(self, method: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if asyncio.get_running_loop() is self._home:
                return await method(*args, **kwargs)
            there = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._home)
            return await asyncio.wrap_future(there)

        return call


async def run_async_in_thread(workflow: Workflow, timeout_s: Optional[float], name: str) -> Any:
    """``workflow.run_async()`` in a thread with its own loop; its model is bridged.

    Raises:
        TimeoutError: not done after ``timeout_s``.
    """
    home = asyncio.get_running_loop()
    model: Any = workflow.model
    bridged: Any = LoopBridge(model, home)
    workflow.model = bridged
    try:
        return await run_in_thread(
            lambda: asyncio.run(workflow.run_async()), timeout_s=timeout_s, name=name
        )
    finally:
        workflow.model = model

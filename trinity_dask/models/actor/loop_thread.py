"""An event loop of its own in a thread of its own.

Invariant: a coroutine handed over runs on this loop only, its caller may live on any loop,
and cancelling the caller cancels the coroutine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

JOIN_TIMEOUT_S = 5.0


class LoopThread:
    """Start it, hand coroutines over with :meth:`run`, close it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await ``coroutine``, which runs on this thread's loop."""
        if not self.loop.is_running():
            coroutine.close()
            raise RuntimeError(f"{self._thread.name} is closed")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    async def close(self) -> None:
        """Cancel what still runs and end the thread."""
        if self.loop.is_running():
            await self.run(_cancel_others())
            self.loop.call_soon_threadsafe(self.loop.stop)
        await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

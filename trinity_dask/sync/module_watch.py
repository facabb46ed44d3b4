"""Which modules of a run are alive: asked once a second, told when one is gone.

Invariant: a module whose worker is gone is reported dead exactly once, within about two
seconds; one that only does not answer in time counts as alive.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Optional

from trinity_dask.cluster.rpc import ActorHandle, ActorLost, rpc

log = logging.getLogger("trinity_dask.synchronizer")

PERIOD_S = 1.0
PING_TIMEOUT_S = 5.0


class ModuleWatch:
    """Explorers and trainers by name; ``on_dead(name)`` for each that dies, ``on_empty()``
    when the last one is gone."""

    def __init__(
        self,
        on_dead: Callable[[str], Awaitable[None]],
        on_empty: Callable[[], Awaitable[None]],
    ) -> None:
        self._on_dead, self._on_empty = on_dead, on_empty
        self._modules: dict[str, Any] = {}
        self._task: Optional[asyncio.Task[None]] = None

    @property
    def names(self) -> list[str]:
        return sorted(self._modules)

    def add(self, name: str, ref: Any) -> None:
        """Watch ``ref``: an :class:`ActorHandle`, or an object with ``is_alive()``."""
        self._modules[name] = ref
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def remove(self, name: str) -> None:
        """``name`` left in order; it is not reported."""
        self._modules.pop(name, None)

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while self._modules:
            await asyncio.sleep(PERIOD_S)  # the period of the heartbeat, not a wait for anyone
            alive = await asyncio.gather(*(_ping(ref) for ref in self._modules.values()))
            for name, lives in zip(list(self._modules), alive, strict=False):
                if not lives and self._modules.pop(name, None) is not None:
                    log.warning("module %s is gone", name)
                    await self._on_dead(name)
        await self._on_empty()


async def _ping(ref: Any) -> bool:
    try:
        if isinstance(ref, ActorHandle):
            return bool(await rpc(ref, "is_alive", timeout=PING_TIMEOUT_S))
        answer = ref.is_alive()
        async with asyncio.timeout(PING_TIMEOUT_S):
            return bool(await answer if inspect.isawaitable(answer) else answer)
    except ActorLost:
        return False
    except TimeoutError:
        return True

"""An explorer at a boundary: it waits for the trainer, and is told what to load.

Invariant: a wait that ends without something to load leaves the explorer RUNNING; one that
ends with it leads to the load with nothing awaited between. A version that was lent to an
explorer of another process stays in its file until that explorer says how it went.
"""

from __future__ import annotations

import logging
from typing import Optional

from trinity_dask.sync.shelf import Published
from trinity_dask.sync.sync_group import SyncGroup

log = logging.getLogger("trinity_dask.synchronizer")


class SyncBoundary(SyncGroup):
    """The waits of explorers, and what is lent to those of other processes."""

    async def _await_offer(self, name: str, step: int, final: bool) -> Optional[int]:
        """Wait at a boundary; the version to load, or None. Leaves ``name`` RUNNING without
        an offer, and REQUIRE_SYNC with one (the load follows at once)."""
        state = self.state
        state.explorer_waiting(name, max(step - self.cfg.sync_offset, 0), final)
        version = None
        try:
            await self._notify()
            await self._wait(
                lambda: state.answered(name),
                lambda: (
                    f"explorer {name!r} at step {step}: the trainer to finish batch "
                    f"{state.explorers[name].required}"
                ),
            )
            version = state.offer(name)
        except TimeoutError as error:
            self._late(error, strict=final)
        finally:
            if version is None:
                state.explorer_running(name)
        return version

    async def _passed(self, name: str, step: int) -> None:
        self.state.explorer_running(name, self.state.next_required(step))
        await self._notify()

    async def _await_newer(self, name: str, timeout_s: Optional[float]) -> Optional[int]:
        explorer = self.state.explorers[name]

        def ready() -> bool:
            free = explorer.loading is None and self.state.offer(name) is not None
            return free or not explorer.live

        try:
            await self._wait(ready, lambda: f"explorer {name!r}: a newer version", timeout_s)
        except TimeoutError:
            return None
        return self.state.offer(name) if explorer.live else None

    def _late(self, error: TimeoutError, strict: bool = False) -> None:
        """Style ``fixed`` promises a version at each boundary, so there a miss is an error."""
        if strict or self.cfg.sync_style == "fixed":
            raise error
        self.timeouts += 1
        log.warning("%s; going on without", error)

    # explorers of other processes -----------------------------------------------------
    async def explorer_acquire(
        self, name: str, step: int, final: bool = False
    ) -> Optional[Published]:
        """:meth:`explorer_sync` up to the load: what to load, or None for nothing newer.

        The file stays until :meth:`explorer_loaded`.
        """
        version = await self._await_offer(name, step, final)
        return None if version is None else await self._lend(name, version)

    async def watch_acquire(
        self, name: str, timeout_s: Optional[float] = None
    ) -> Optional[Published]:
        """:meth:`watch` up to the load."""
        version = await self._await_newer(name, timeout_s)
        return None if version is None else await self._lend(name, version)

    async def first_weights(self, name: str) -> Optional[Published]:
        """The newest version for an explorer that joins; None: the start model is it."""
        version = self.state.offer(name)
        return None if version is None else await self._lend(name, version)

    async def explorer_loaded(
        self, name: str, version: Optional[int], step: Optional[int] = None
    ) -> int:
        """What ``name`` was lent is loaded (``version``), or was not (None). ``step`` is that
        of the boundary it stood at; None: it was not at one."""
        if self.state.explorers[name].loading is not None:
            self.state.load_ended(name, version)
        self._carrier.sweep(self.state)
        if step is not None:
            await self._passed(name, step)
        await self._notify()
        return self.state.explorers[name].version

    async def _lend(self, name: str, version: int) -> Published:
        if self.cfg.sync_method == "nccl":
            raise ValueError(
                f"explorer {name!r} has its engines in another process, where "
                "synchronizer.sync_method=nccl cannot reach; use checkpoint or memory"
            )
        self.state.load_started(name, version)
        try:
            return await self._publish(version)
        except BaseException:
            self.state.load_ended(name, None)
            self.state.explorer_running(name)
            raise

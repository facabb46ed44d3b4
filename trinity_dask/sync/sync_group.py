"""The synchronizer's calls around a broadcast, by Trinity-RFT's names: hand-shake and group.

Invariant: who waits here for the other side leaves no ``REQUIRE_SYNC`` behind, however the wait
ends; a group that was formed is the transport's own, so the next transfer uses it.
"""

from __future__ import annotations

import asyncio
from typing import Optional

from trinity_dask.models.protocol import TensorMeta
from trinity_dask.sync.sync_calls import SyncCalls
from trinity_dask.sync.transport import WeightTransport


class SyncGroup(SyncCalls):
    """Both sides meet, and form the group in which they exchange weights."""

    async def ready_to_nccl_sync(
        self, module: str, trainer_step: Optional[int] = None
    ) -> Optional[int]:
        """``module`` (``trainer`` or ``explorer``) is ready for a broadcast; returns its
        version to both when both are, None when the other has stopped or does not come.

        Raises:
            ValueError: there is more than one explorer.
        """
        met = self._hands.met
        self._hands.arrive(module, trainer_step)
        try:
            await self._notify()
            await self._wait(
                lambda: self._hands.met > met or self._hands.peer_is_gone(module),
                lambda: f"{module} is ready for a broadcast: the other side",
            )
        except TimeoutError:
            self.timeouts += 1
        finally:
            self._hands.leave(module)
        return self.state.trainer_version if self._hands.met > met else None

    async def setup_weight_sync_group(
        self,
        master_address: str,
        master_port: int,
        state_dict_meta: Optional[list[tuple[str, str, tuple[int, ...]]]] = None,
    ) -> None:
        """Form the transfer group now, with trainer rank 0 serving its store there.

        Raises:
            RuntimeError: no explorer or no trainer rank is attached.
        """
        if state_dict_meta is not None:
            self._carrier.trainer.set_meta(tuple(TensorMeta(*m) for m in state_dict_meta))
        transport = self._the_transport
        await transport.form_group(transport.pool.slots(), master_address, master_port)

    async def coordinate_weight_sync_setup(self, timeout: Optional[float] = None) -> None:
        """Form the transfer group at an address and port of the trainer's own choice.

        Raises:
            RuntimeError: no explorer or no trainer rank is attached.
            TimeoutError: not within ``timeout`` seconds (None: ``sync_timeout_s``).
        """
        transport = self._the_transport
        async with asyncio.timeout(self.cfg.sync_timeout_s if timeout is None else timeout):
            await transport.form_group(transport.pool.slots())

    async def coordinate_weight_sync_teardown(self) -> None:
        """Both sides leave the group. Whoever is dead is passed over."""
        for name in self._carrier.names:
            await self._carrier.transport(name).teardown()

    @property
    def _the_transport(self) -> WeightTransport:
        names = self._carrier.names
        if not names:
            raise RuntimeError("no explorer is attached; call attach_explorer first")
        return self._carrier.transport(names[0])

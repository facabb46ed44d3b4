"""All trainer ranks of a stage: created on their slots, prepared together, rebuilt together.

Invariant: either every rank is prepared with the same generation, model and checkpoint, or
no step runs. Ranks are replicas, so the loss of one costs all their place: the lost ones
are created again and all of them load the same checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Optional

from trinity_dask.aio import all_or_first_error
from trinity_dask.cluster.actors import (
    ActorRef,
    create_actor,
    on_lost,
    recreate_actor,
    release_actor,
)
from trinity_dask.cluster.rpc import ActorHandle, ActorLost, rpc
from trinity_dask.cluster.slots import trainer_slot
from trinity_dask.config.schema import Config
from trinity_dask.trainer.ranks.rank import TrainerRank, all_or_loss

log = logging.getLogger("trinity_dask.trainer")

CALL_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 10.0


class RanksFailed(RuntimeError):
    """Trainer ranks died more often than ``trainer.max_rank_restarts`` allows."""


class RankPool:
    """One :class:`TrainerRank` per trainer worker; lives on the control worker's loop."""

    def __init__(self, cfg: Config, run_id: str) -> None:
        self.cfg = cfg
        self.run_id = run_id
        self.world_size = cfg.cluster.trainer.n_workers
        self.generation = 0
        self.restarts = 0
        self._refs: list[ActorRef] = []
        self._lost: dict[int, ActorHandle] = {}

    @property
    def handles(self) -> list[ActorHandle]:
        """Of all ranks, rank 0 first."""
        return [ref.handle for ref in self._refs]

    @property
    def lost(self) -> list[int]:
        """Ranks whose worker is known to be gone."""
        return sorted(self._lost)

    # life -------------------------------------------------------------------------------
    async def start(self, model_path: str, checkpoint: Optional[str]) -> dict[str, Any]:
        """Create and prepare all ranks; returns rank 0's facts.

        Raises:
            TimeoutError: a trainer slot has no worker, or a rank is not ready in time.
            Exception: what a rank raised.
        """
        ranks = range(self.world_size)
        self._refs = await all_or_first_error(*(self._create(rank) for rank in ranks))
        for rank in ranks:
            self._watch(rank)
        return await self._prepare(model_path, checkpoint)

    async def _create(self, rank: int) -> ActorRef:
        return await create_actor(
            TrainerRank,
            self.cfg,
            rank,
            self.world_size,
            slot=trainer_slot(rank),
            key=f"{self.run_id}-{trainer_slot(rank)}",
            timeout=self.cfg.cluster.start_timeout_s,
        )

    def _watch(self, rank: int) -> None:
        def lost(ref: ActorRef) -> None:
            self._lost[rank] = ref.handle
            log.warning("trainer rank %d was lost with its worker %s", rank, ref.handle.address)

        on_lost(self._refs[rank], lost)

    async def _prepare(self, model_path: str, checkpoint: Optional[str]) -> dict[str, Any]:
        self.generation += 1
        host = self.handles[0].address.split("://")[-1].rpartition(":")[0]
        port = await self.call(0, "free_port", timeout_s=CALL_TIMEOUT_S)
        peers = tuple(self.handles[1:])
        arguments = (f"{host}:{port}", self.generation, model_path, checkpoint, peers)
        timeout_s = self.cfg.trainer.step_timeout_s
        facts = await self.call_all("prepare", *arguments, timeout_s=timeout_s)
        return facts[0]

    async def rebuild(self, model_path: str, checkpoint: Optional[str], cause: Exception) -> None:
        """Create the lost ranks again and prepare all from ``checkpoint``.

        A rank that dies during the rebuild counts as the next loss.

        Raises:
            RanksFailed: there were ``max_rank_restarts`` losses already.
        """
        allowed = self.cfg.trainer.max_rank_restarts
        while True:
            if self.restarts >= allowed:
                raise RanksFailed(
                    f"trainer ranks were rebuilt {self.restarts} times and one is lost again "
                    f"({cause}); trainer.max_rank_restarts = {allowed}. The last complete "
                    "checkpoint is kept: run the same command to continue from it"
                ) from cause
            self.restarts += 1
            try:
                await self._recreate_lost(cause)
                await self._prepare(model_path, checkpoint)
                return
            except ActorLost as error:
                cause = error

    async def _recreate_lost(self, cause: Exception) -> None:
        if isinstance(cause, ActorLost):
            self._lost.update({r: h for r, h in enumerate(self.handles) if h == cause.handle})
        timeout_s = self.cfg.cluster.start_timeout_s
        for rank in self.lost:
            log.warning("creating trainer rank %d again", rank)
            self._refs[rank] = await recreate_actor(self._refs[rank], timeout_s)
            del self._lost[rank]
            self._watch(rank)

    async def close(self) -> None:
        """Close and release every rank; a rank that does not answer is left to its worker."""
        closing = (rpc(h, "close", timeout=CLOSE_TIMEOUT_S) for h in self.handles)
        for result in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(result, Exception):
                log.info("a trainer rank did not close cleanly: %s", result)
        for ref in self._refs:
            await release_actor(ref)
        self._refs = []

    # calls ------------------------------------------------------------------------------
    async def call(self, rank: int, method: str, *args: Any, timeout_s: float) -> Any:
        return await rpc(self._refs[rank].handle, method, *args, timeout=timeout_s)

    async def call_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call every rank at once; results in rank order, errors as of :func:`all_or_loss`."""
        calls = (rpc(handle, method, *args, timeout=timeout_s) for handle in self.handles)
        return await all_or_loss(*calls)

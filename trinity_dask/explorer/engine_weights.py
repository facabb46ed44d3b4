"""The engines of one explorer, as holders of weights: checkpoints, groups, single tensors.

Invariant: after :meth:`EngineWeights.load` every engine reported one and the same checksum, and
an engine that is reborn later loads the same checkpoint before it serves.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Optional

from trinity_dask.cluster.rpc import rpc
from trinity_dask.config.errors import hint
from trinity_dask.engines.pool import EnginePool
from trinity_dask.models.protocol import WeightGroupSpec, WeightUpdate
from trinity_dask.trainer.checkpoints.checkpoint import (
    ACTOR,
    ADAPTER,
    HF_EXPORT,
    WEIGHTS,
    latest_complete,
)
from trinity_dask.weights.files import read_safetensors

log = logging.getLogger("trinity_dask.explorer")

GROUP_TIMEOUT_S = 120.0


def checkpoint_weights(checkpoint: Path) -> Path:
    """What an engine loads of a checkpoint: the trainer's weights, else the export.

    Raises:
        FileNotFoundError: it has neither.
    """
    from trinity_dask.trainer.checkpoints.shards import assemble

    weights = assemble(checkpoint / ACTOR)  # a sharded trainer's, which engines do not read
    for path in (checkpoint / ADAPTER, weights, checkpoint / HF_EXPORT):
        if path.is_file() or list(path.glob("*.safetensors")):
            return path
    raise FileNotFoundError(
        f"{checkpoint} has neither {WEIGHTS} nor weights in {HF_EXPORT}/; it cannot be evaluated"
    )


class EngineWeights:
    """``pool``'s engines; ``timeout_s`` bounds one load."""

    def __init__(self, pool: EnginePool, job_dir: str, timeout_s: float, backend: str) -> None:
        self.pool = pool
        self.job_dir = Path(job_dir)
        self.timeout_s = timeout_s
        self._backend = backend
        self._generation = 0
        self._loaded: Optional[WeightUpdate] = None

    async def load(self, step: int, checkpoint: Path) -> None:
        """Have every engine serve the weights of ``checkpoint`` as version ``step``.

        Raises:
            FileNotFoundError: the checkpoint holds no weights.
            RuntimeError: two engines report different checksums.
        """
        path = checkpoint_weights(checkpoint)
        self._loaded = WeightUpdate(version=step, method="checkpoint", path=str(path))
        self.pool.on_reborn = self._reload
        await self.pool.wait_present(self.timeout_s)
        slots = self.pool.slots()
        receipts = await asyncio.gather(*(self._update(slot) for slot in slots))
        sums = {slot: receipt.checksum for slot, receipt in zip(slots, receipts, strict=True)}
        if len(set(sums.values())) > 1:
            raise RuntimeError(f"the engines differ after loading {path}: checksums {sums}")
        log.info("engines %s serve %s", ", ".join(slots), path)

    async def _update(self, slot: str) -> Any:
        handle = self.pool.handle(slot)
        return await rpc(handle, "update_weights", self._loaded, timeout=self.timeout_s)

    async def _reload(self, slot: str) -> None:
        loaded = None
        while loaded is not self._loaded:  # a load of all engines leaves this one out
            loaded = self._loaded
            await self._update(slot)

    # groups ---------------------------------------------------------------------------
    async def join_group(self, host: str, port: int) -> None:
        """Every engine joins the group that rank 0 (not an engine) serves at ``host:port``."""
        self._generation += 1
        members = self.pool.members()
        world_size = 1 + sum(member.ranks for member in members)
        offset, joins = 1, []
        for member in members:
            spec = WeightGroupSpec(
                host, port, world_size, offset, self._generation, self._backend, self.timeout_s
            )
            handle = self.pool.handle(member.slot)
            joins.append(rpc(handle, "init_weight_group", spec, timeout=GROUP_TIMEOUT_S))
            offset += member.ranks
        await asyncio.gather(*joins)

    async def leave_group(self) -> None:
        """Every engine leaves its group."""
        handles = [self.pool.handle(slot) for slot in self.pool.slots()]
        calls = (rpc(h, "teardown_weight_group", timeout=GROUP_TIMEOUT_S) for h in handles)
        await asyncio.gather(*calls)

    # single tensors -------------------------------------------------------------------
    async def get_weight(self, name: str) -> Any:
        """A tensor of the loaded checkpoint, or of the job's newest one.

        Raises:
            LookupError: there is no checkpoint, or it has no such tensor.
        """
        return await asyncio.to_thread(self._read, name)

    def _read(self, name: str) -> Any:
        path = self._loaded.path if self._loaded is not None else None
        if path is None:
            newest = latest_complete(self.job_dir)
            if newest is None:
                raise LookupError(f"{self.job_dir} holds no complete checkpoint")
            path = str(checkpoint_weights(newest))
        names = []
        for found, tensor in read_safetensors(path):
            if found == name:
                return tensor
            names.append(found)
        raise LookupError(f"{path} has no tensor {name!r}; {hint(name, names)}")

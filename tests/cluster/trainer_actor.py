"""The control worker's side of the trainer's cluster tests; workers import this module."""

from __future__ import annotations

import os
import signal
from typing import Any, Optional

from distributed import get_worker
from trainer_support import rows

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.cluster.context import worker_client
from trinity_dask.config.schema import Config
from trinity_dask.experience.schema import to_table
from trinity_dask.trainer.trainer import Trainer


class KillingMonitor:
    """Kills the worker of rank ``rank`` as soon as step ``step`` is logged."""

    def __init__(self, pids: dict[int, int], kill: Optional[tuple[int, int]]) -> None:
        self.pids, self.kill = pids, kill
        self.steps: dict[int, dict[str, float]] = {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.setdefault(step, {}).update(metrics)
        if self.kill is not None and step == self.kill[0]:
            os.kill(self.pids[self.kill[1]], signal.SIGKILL)
            self.kill = None


class TrainerHost:
    """An actor in the control slot that runs a trainer over committed batches."""

    async def train(
        self, cfg: Config, run_id: str, sizes: list[int], kill: Optional[tuple[int, int]] = None
    ) -> dict[str, Any]:
        buffer = None
        if cfg.buffer.trainer_input.experience_buffer.storage_type == "store":
            buffer = ExperienceBuffer(cfg.buffer.trainer_input.experience_buffer)
            await buffer.prepare(None)
            for batch_id, size in enumerate(sizes, 1):
                await buffer.commit(batch_id, to_table(rows(size, seed=batch_id)), {})
        trainer = Trainer(cfg, run_id, buffer)
        try:
            facts = await trainer.prepare()
            if buffer is not None:
                await buffer.close_writes()
            pids = await self._pids(trainer)
            monitor = KillingMonitor(pids, kill)
            trainer._monitor = monitor
            result = await trainer.train()
            again = await self._pids(trainer)
            return {
                "result": result,
                "facts": facts,
                "metrics": monitor.steps,
                "restarts": trainer.pool.restarts,
                "moved": [rank for rank, pid in pids.items() if again[rank] != pid],
                "host": get_worker().name,
            }
        finally:
            await trainer.close()

    async def _pids(self, trainer: Trainer) -> dict[int, int]:
        client = await worker_client()
        futures = [
            client.submit(os.getpid, workers=[handle.address], pure=False)
            for handle in trainer.pool.handles
        ]
        return dict(enumerate([await future for future in futures]))

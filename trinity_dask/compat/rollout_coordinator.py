"""Trinity-RFT's rollout coordinator: made from a configuration, with a buffer of its own.

Invariant: a batch is the real coordinator's, whose calls these are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Optional

from trinity_dask.buffer.experience_buffer import ExperienceBuffer
from trinity_dask.compat.remote import RemoteActor, control_actor, outside_client
from trinity_dask.compat.scheduler import Scheduler
from trinity_dask.config.schema import Config
from trinity_dask.explorer.batches import EVAL, TRAIN
from trinity_dask.explorer.coordinator import Coordinator
from trinity_dask.workflows import Task


class RolloutCoordinator:
    """``real`` is the coordinator that it stands for; None makes one in :meth:`prepare`, which
    commits to ``config.buffer.trainer_input.experience_buffer``."""

    def __init__(self, config: Config, real: Optional[Coordinator] = None) -> None:
        self.config = config
        self._real = real
        self.running = real is not None
        self.scheduler = None if real is None else Scheduler(config, real.scheduler)

    @classmethod
    def get_actor(cls, config: Config) -> RemoteActor:
        """A coordinator of its own on the control worker; it lives as long as the handle."""
        return control_actor(cls, config)

    @property
    def real(self) -> Coordinator:
        if self._real is None:
            raise RuntimeError("RolloutCoordinator.prepare() must be called first")
        return self._real

    async def prepare(self) -> None:
        """The pipeline and the buffer (not in mode ``bench``), then the scheduler. Idempotent."""
        if self._real is None:
            buffer = None
            if self.config.mode != "bench":
                buffer = ExperienceBuffer(self.config.buffer.trainer_input.experience_buffer)
                await buffer.prepare()
            self._real = Coordinator(self.config, buffer, client=outside_client())
        await self._real.prepare()
        if not self.running:
            self.scheduler, self.running = Scheduler(self.config, self._real.scheduler), True

    async def submit_batch(
        self,
        batch_id: int | str,
        tasks: Sequence[Task],
        batch_type: str,
        min_wait_num: Optional[int] = None,
    ) -> None:
        """See :meth:`Coordinator.submit_batch`. Raises ValueError for an active ``batch_id``."""
        await self.real.submit_batch(batch_id, tasks, batch_type, min_wait_num)

    async def finalize_train_batch(
        self, batch_id: int | str, timeout: Optional[float] = None
    ) -> dict[str, Any]:
        """See :meth:`Coordinator.finalize_batch`: KeyError, ValueError, TimeoutError."""
        return await self.real.finalize_batch(batch_id, TRAIN, timeout)

    async def finalize_eval_batch(
        self, batch_id: int | str, timeout: Optional[float] = None
    ) -> dict[str, Any]:
        """See :meth:`Coordinator.finalize_batch`."""
        return await self.real.finalize_batch(batch_id, EVAL, timeout)

    async def abort_batch(
        self, batch_id: int | str, reason: str, keep_partial_results: bool = False
    ) -> None:
        """See :meth:`Coordinator.abort_batch`."""
        await self.real.abort_batch(batch_id, reason, keep_partial_results)

    async def process_experiences(self, payloads: Sequence[bytes]) -> dict[str, float]:
        """Put payloads through the pipeline without a batch; its metrics. Nothing is committed.

        Raises:
            RuntimeError: there is no pipeline (mode ``bench``, or not prepared).
        """
        if not payloads:
            return {}
        return (await asyncio.to_thread(self.real.pipeline.process, payloads))[1]

    async def shutdown(self) -> None:
        """Stop the scheduler and close the pipeline. Idempotent."""
        self.running, self.scheduler = False, None
        if self._real is not None:
            await self._real.shutdown()

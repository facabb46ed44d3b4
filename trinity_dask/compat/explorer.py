"""Trinity-RFT's explorer: made from a configuration alone, with engines, buffer and monitor.

Invariant: the parts are those that a run of mode ``explore`` (or ``bench``) is made of, built
and taken down by the same stage; the loop is the real one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import uuid
from contextlib import AsyncExitStack
from typing import Any, Optional

from trinity_dask.compat.remote import RemoteActor, control_actor
from trinity_dask.compat.rollout_coordinator import RolloutCoordinator
from trinity_dask.compat.state_manager import StateManager
from trinity_dask.compat.synchronizer import Synchronizer
from trinity_dask.config.schema import Config
from trinity_dask.explorer.engine_weights import EngineWeights
from trinity_dask.explorer.loop import ExploreLoop
from trinity_dask.launcher.stages import STAGES, StageRunner
from trinity_dask.launcher.status import StatusBoard


def _forwarded(method: Any) -> Any:
    """``method`` of the real loop as one of the adapter's."""
    if not inspect.iscoroutinefunction(method):
        return functools.wraps(method)(lambda self, *args: method(self.real, *args))

    @functools.wraps(method)
    async def call(self: Explorer, *args: Any) -> Any:
        return await method(self.real, *args)

    return call


class Explorer:
    """Use it on the control worker: inside an actor there, or as :meth:`get_actor`.

    ``config`` is a validated one. With ``synchronizer.peer_timeout_s`` it meets the trainer of
    its job; without, it explores alone, and its batches are stored for a later trainer.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.state = StateManager(str(config.job_dir), config=config)
        self.use_nccl_sync = config.synchronizer.sync_method == "nccl"
        self.enable_lora = config.model.lora.rank > 0
        self.model_type = config.explorer.rollout_model.engine_type
        self.detailed_stats = config.monitor.detailed_stats
        self.sync_offset = config.synchronizer.sync_offset
        self.sync_interval = config.synchronizer.sync_interval
        self.sync_method = config.synchronizer.sync_method
        self.sync_style = config.synchronizer.sync_style
        self.rollout_coordinator: Optional[RolloutCoordinator] = None
        self.synchronizer: Optional[Synchronizer] = None  # without a trainer there is none
        self._stage: Optional[StageRunner] = None
        self._parts = AsyncExitStack()

    @classmethod
    def get_actor(cls, config: Config) -> RemoteActor:
        """An explorer of its own on the control worker; it lives as long as the handle."""
        return control_actor(cls, config)

    @property
    def real(self) -> ExploreLoop:
        if self._stage is None or self._stage.explorer is None:
            raise RuntimeError("Explorer.prepare() must be called first")
        return self._stage.explorer

    # what it holds --------------------------------------------------------------------
    @property
    def explore_step_num(self) -> int:
        """Batches submitted; before :meth:`prepare`, those of the last checkpoint."""
        if self._stage is None:
            return int(self.state.load_explorer().get("latest_iteration", 0))
        return self.real.step

    @property
    def last_monitored_step(self) -> int:
        """The newest batch whose metrics are logged."""
        return self.explore_step_num if self._stage is None else self.real.committed_step

    @property
    def taskset(self) -> Any:
        """Where the training tasks come from; ``None`` before :meth:`prepare`."""
        return None if self._stage is None else self.real.stream

    @property
    def monitor(self) -> Any:
        """What the metrics are logged with; ``None`` before :meth:`prepare`."""
        return None if self._stage is None else self.real.monitor

    @property
    def model_version(self) -> int:
        """Of the engines' weights; -1: the start model."""
        return -1 if self._stage is None else self.real.model_version

    @property
    def model_allocator(self) -> Any:
        """The pool of engines; ``None`` before :meth:`prepare`."""
        return None if self._stage is None else self._stage.pool

    @property
    def models(self) -> list[Any]:
        """The engines' handles, in order."""
        pool = self.model_allocator
        return [] if pool is None else [pool.handle(slot) for slot in pool.slots()]

    # life -----------------------------------------------------------------------------
    async def prepare(self) -> None:
        """Start the engines, the buffer and the coordinator. After an error nothing is left."""
        mode = "bench" if self.config.mode == "bench" else "explore"
        run_id = f"{self.config.name}-{uuid.uuid4().hex[:8]}"
        stage = self._stage = STAGES[mode](self.config, StatusBoard(), run_id)
        try:
            await stage.build(self._parts)
        except BaseException:
            await self.shutdown()
            raise
        self.rollout_coordinator = RolloutCoordinator(self.config, stage.coordinator)
        if stage.synchronizer is not None:
            self.synchronizer = Synchronizer(self.config, None, stage.synchronizer)

    async def shutdown(self) -> None:
        """Stop, and take everything down. Idempotent."""
        if self._stage is not None and self._stage.explorer is not None:
            await self._stage.explorer.stop()
        await self._parts.aclose()
        self._stage = self.rollout_coordinator = self.synchronizer = None

    async def is_alive(self) -> bool:
        return True

    # the loop -------------------------------------------------------------------------
    explore = _forwarded(ExploreLoop.explore)
    explore_step = _forwarded(ExploreLoop.explore_step)
    finish_current_steps = _forwarded(ExploreLoop.finish_current_steps)
    need_sync = _forwarded(ExploreLoop.need_sync)
    need_eval = _forwarded(ExploreLoop.need_eval)
    eval = _forwarded(ExploreLoop.eval)
    benchmark = _forwarded(ExploreLoop.benchmark)
    save_checkpoint = _forwarded(ExploreLoop.save_checkpoint)

    async def sync_weight(self) -> None:
        """Finish what was submitted, take the trainer's weights, save."""
        await self.real.sync_weight()
        await self.real.save_checkpoint()

    # weights --------------------------------------------------------------------------
    async def get_weight(self, name: str) -> Any:
        """The tensor ``name`` of the loaded or newest checkpoint. Raises LookupError."""
        return await self._engines.get_weight(name)

    async def setup_weight_sync_group(
        self,
        master_address: str,
        master_port: int,
        world_size: Optional[int] = None,
        group_name: Optional[str] = None,
        timeout: Optional[float] = None,
    ) -> None:
        """Have every engine join the group whose rank 0, a trainer, serves at this address.

        ``group_name`` has no meaning here: a group is known by its address.

        Raises:
            ValueError: ``world_size`` is not that of the trainer and all engines.
            TimeoutError: not within ``timeout`` seconds (None: ``sync_timeout_s``).
        """
        size = 1 + sum(member.ranks for member in self._engines.pool.members())
        if world_size not in (None, size):
            raise ValueError(f"world_size={world_size}, but the trainer and the engines are {size}")
        async with asyncio.timeout(timeout or self.config.synchronizer.sync_timeout_s):
            await self._engines.join_group(master_address, master_port)

    async def set_state_dict_meta(self, state_dict_meta: list[Any]) -> None:
        """Nothing to keep: what the tensors are travels with each transfer."""

    async def setup_model_level_weight_sync_group(self) -> None:
        """Nothing to form: with ``checkpoint`` and ``memory`` each engine reads for itself."""

    async def teardown_weight_sync_group(self) -> None:
        """Every engine leaves its group."""
        await self._engines.leave_group()

    @property
    def _engines(self) -> EngineWeights:
        assert self.real.weights is not None  # a stage makes its explorer with its engines
        return self.real.weights

"""What the tests of Trinity-RFT's names run on the control worker; workers import this module."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from sync_actors import ToyRank

from trinity_dask.cluster.actors import create_actor, release_actor
from trinity_dask.config.schema import Config
from trinity_dask.engines.pool import EnginePool
from trinity_dask.explorer.explorer import Explorer
from trinity_dask.manager.synchronizer import Synchronizer
from trinity_dask.models.protocol import EngineSpec
from trinity_dask.sync.synchronizer import Synchronizer as RealSynchronizer

WAIT_S = 120.0


class Control:
    """An actor in the control slot."""

    async def is_alive(self) -> bool:
        return True

    async def groups(self, cfg: Config, slot: str, port: int) -> dict[str, Any]:
        """Form the weight group of an engine and a trainer's rank, twice, and leave it."""
        async with contextlib.AsyncExitStack() as stack:
            rank = await create_actor(
                ToyRank, slot="trainer-0", key=f"{cfg.name}-rank", timeout=WAIT_S
            )
            stack.push_async_callback(release_actor, rank)
            pool = EnginePool([EngineSpec(slot, "fake", "", {})], f"{cfg.name}-pool", WAIT_S)
            stack.push_async_callback(pool.close)
            await pool.start()
            real = RealSynchronizer(cfg.synchronizer, cfg.job_dir, cfg.name)
            real.set_trainer_rank0(rank.handle)
            real.attach_explorer("explorer", pool)
            sync = Synchronizer(cfg, None, real)
            group, seen = real.transfers.group("explorer"), []
            await sync.coordinate_weight_sync_setup(timeout=WAIT_S)
            seen.append(group.formed)
            await sync.coordinate_weight_sync_teardown()
            seen.append(group.formed)
            await sync.setup_weight_sync_group("127.0.0.1", port, state_dict_meta=None)
            seen.append(group.formed)
            meta = await sync.get_state_dict_meta()
            await sync.coordinate_weight_sync_teardown()
            return {"formed": seen, "generation": group.generation, "meta": sorted(meta or [])}

    async def explorer_attributes(self, cfg: Config) -> dict[str, Any]:
        """Of an explorer before, while and after it is prepared."""
        explorer = Explorer(config=cfg)
        before = (explorer.explore_step_num, explorer.model_version, explorer.models)
        await explorer.prepare()
        try:
            assert explorer.rollout_coordinator is not None
            assert explorer.rollout_coordinator.running
            assert explorer.synchronizer is None  # it explores alone
            while await explorer.explore_step():
                await asyncio.sleep(0)
                assert explorer.last_monitored_step <= explorer.explore_step_num
            await explorer.finish_current_steps()
            assert explorer.last_monitored_step == explorer.explore_step_num
            assert explorer.taskset.skipped_rows == 0
            assert explorer.monitor is not None
            after = (explorer.explore_step_num, explorer.model_version, len(explorer.models))
            return {"before": before, "after": after, "engines": explorer.model_allocator.slots()}
        finally:
            await explorer.shutdown()

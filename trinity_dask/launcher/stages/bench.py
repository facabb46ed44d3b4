"""Mode ``bench``: engines and an evaluation of each checkpoint; no trainer, no buffer.

Invariant: the job is only read. What a benchmark writes is its own: ``benchmark_meta.json``,
``benchmark_config.yaml`` and metrics of the role ``benchmark``.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from trinity_dask.launcher.reporter import Reporter
from trinity_dask.launcher.stages.base import StageRunner, until_done

ROLE = "benchmark"


class BenchStage(StageRunner):
    """See the module."""

    async def build(self, stack: AsyncExitStack) -> None:
        await self.board.update(message="starting engines")
        self.cfg.explorer.name = ROLE
        pool = self._make_engines(stack)
        await pool.start()
        await pool.mark_ready(pool.slots())
        await self._make_explorer(stack, ROLE)
        await self.board.update(message="")

    async def _run_parts(self, reporter: Reporter) -> None:
        assert self.explorer is not None
        assert self.pool is not None
        guards = {
            asyncio.ensure_future(self.pool.wait_failed()),
            asyncio.ensure_future(reporter.wait_failed()),
        }
        await until_done({asyncio.ensure_future(self.explorer.benchmark())}, guards)

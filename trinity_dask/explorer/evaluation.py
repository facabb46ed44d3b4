"""Evaluations: every eval taskset as one batch on the weights that the engines hold.

Invariant: the results are logged at the step at which they were asked for, with the model
version that answered; an evaluation that failed whole says why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Optional

from trinity_dask.explorer.batches import EVAL
from trinity_dask.explorer.rollout_coordinator import RolloutCoordinator
from trinity_dask.explorer.tasks.taskset_reader import TasksetReader
from trinity_dask.monitor.monitor import Monitor

log = logging.getLogger("trinity_dask.explorer")

Point = tuple[int, int]  # step and model version
NEVER: Point = (-1, -1)


class Evaluations:
    """Those in flight, and the last finished one. ``verb`` names the metrics (eval, bench)."""

    def __init__(
        self,
        reader: TasksetReader,
        coordinator: RolloutCoordinator,
        monitor: Monitor,
        verb: str = "eval",
    ) -> None:
        self.verb = verb
        self.last: Point = NEVER
        self.scores: dict[str, float] = {}
        self.in_flight: list[asyncio.Task[dict[str, Any]]] = []
        self._reader = reader
        self._coordinator = coordinator
        self._monitor = monitor
        self._evaluating: Point = NEVER

    async def start(self, step: int, version: int) -> None:
        """Submit every eval taskset; they run beside whatever else does."""
        self._evaluating = (step, version)
        for name in self._reader.evals:
            tasks = await asyncio.to_thread(self._reader.read_eval, name)
            await self._coordinator.submit_batch(f"{step}/{name}", tasks, EVAL)
            finish = self._finish(step, name, version)
            self.in_flight.append(asyncio.ensure_future(finish))

    async def wait(self) -> list[dict[str, Any]]:
        """Results of those in flight, once all of them are logged."""
        if not self.in_flight:
            return []
        results = await asyncio.shield(asyncio.gather(*self.in_flight))
        self.in_flight.clear()
        self.last = self._evaluating
        return results

    async def _finish(self, step: int, name: str, version: int) -> dict[str, Any]:
        started = time.monotonic()
        result = await self._coordinator.finalize_eval_batch(f"{step}/{name}")
        metrics = dict(result["metrics"])
        score = headline(metrics, f"{self.verb}/{name}")
        if score is not None:
            self.scores = {**self.scores, name: score}
        if result["error"] is not None:
            log.warning("nothing of %s/%s succeeded: %s", self.verb, name, result["error"])
        metrics[f"{self.verb}/{name}/model_version"] = float(version)
        metrics[f"time/{self.verb}"] = time.monotonic() - started
        self._monitor.log(step, metrics)
        return {**result, "metrics": metrics}


def headline(metrics: dict[str, float], prefix: str) -> Optional[float]:
    """The one number of an evaluation: mean accuracy if there is one, else mean reward."""
    for metric in ("accuracy", "reward"):
        for key, value in metrics.items():
            if key.startswith(f"{prefix}/{metric}/mean@"):
                return value
    return None

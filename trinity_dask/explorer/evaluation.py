"""Evaluations of the weights that the engines hold, and of a job's checkpoints.

Invariant: the results are logged at the step at which they were asked for, with the model
version that answered; an evaluation that failed whole says why. A benchmark only reads the
job's own state. A checkpoint counts as done when its results are in ``benchmark_meta.json``,
which is written after each one; results of other settings (tasks, sampling, engine) do not
count. A checkpoint is held from the start of its evaluation to the end; one that a live run's
retention removed before is left out, and said so.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Optional

from trinity_dask.config.schema import Config
from trinity_dask.explorer.batches import EVAL
from trinity_dask.explorer.coordinator import BatchFailed, Coordinator
from trinity_dask.explorer.engine_weights import EngineWeights
from trinity_dask.explorer.task_stream import TasksetReader
from trinity_dask.files import read_json, write_json
from trinity_dask.monitor.monitor import Monitor
from trinity_dask.monitor.report import BENCHMARK_FILE
from trinity_dask.trainer.checkpoints.checkpoint import (
    complete_checkpoints,
    held,
    is_complete,
    step_of,
)

log = logging.getLogger("trinity_dask.explorer")

Point = tuple[int, int]  # step and model version
NEVER: Point = (-1, -1)
Target = tuple[int, Optional[Path]]  # step, checkpoint; None is the model the stage starts from


class Evaluations:
    """Those in flight, and the last finished one. ``verb`` names the metrics (eval, bench)."""

    def __init__(
        self,
        reader: TasksetReader,
        coordinator: Coordinator,
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
            meta = {"step": step, "model_version": version, "eval": name}
            await self._coordinator.submit_batch(
                f"{step}/{name}", tasks, EVAL, meta=partial(dict, meta)
            )
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
        result = await self._coordinator.finalize_batch(f"{step}/{name}", EVAL)
        metrics = dict(result["metrics"])
        # the one number of an evaluation: mean accuracy if there is one, else mean reward
        prefixes = [f"{self.verb}/{name}/{kind}/mean@" for kind in ("accuracy", "reward")]
        scores = [v for p in prefixes for key, v in metrics.items() if key.startswith(p)]
        if scores:
            self.scores = {**self.scores, name: scores[0]}
        if result["error"] is not None:
            log.warning("nothing of %s/%s succeeded: %s", self.verb, name, result["error"])
        metrics[f"{self.verb}/{name}/model_version"] = float(version)
        metrics[f"time/{self.verb}"] = time.monotonic() - started
        self._monitor.log(step, metrics)
        return {**result, "metrics": metrics}


class Benchmark:
    """All checkpoints in the order of their steps, the start model first (step 0), or the newest.

    ``explorer.bench_on_latest_checkpoint`` and ``explorer.eval_on_startup`` choose.
    """

    def __init__(self, cfg: Config, evals: Evaluations, weights: EngineWeights) -> None:
        self.cfg = cfg
        self._evals = evals
        self._weights = weights
        self._file = Path(str(cfg.job_dir)) / BENCHMARK_FILE

    async def run(self) -> AsyncIterator[int]:
        """Evaluate what is not done yet; yields each step when its results are saved.

        Raises:
            FileNotFoundError: there is nothing to evaluate.
            BatchFailed: no run of an eval taskset succeeded.
        """
        tried = set[Target]()
        while True:
            gone = False
            async for step in self._run_listed(tried):
                if step is None:
                    gone = True
                else:
                    yield step
            # what was listed is not there any more: the live run has newer ones
            if not gone:
                return

    async def _run_listed(self, tried: set[Target]) -> AsyncIterator[Optional[int]]:
        """One look at what there is; None for each checkpoint that vanished before its turn."""
        meta = await asyncio.to_thread(read_json, self._file) or {}
        settings, results = self._settings(), {}
        if self.cfg.continue_from_checkpoint and meta.get("settings") == settings:
            results = dict(meta["results"])
        targets = await asyncio.to_thread(self.targets)
        if not targets:
            raise FileNotFoundError(
                f"{self._file.parent} has no complete checkpoint to evaluate, and "
                "explorer.eval_on_startup=false leaves out the start model"
            )
        for step, checkpoint in targets:
            if (step, checkpoint) in tried:
                continue
            tried.add((step, checkpoint))
            if str(step) in results:
                log.info("step %d is benchmarked already: %s", step, self._file)
                continue
            try:
                with nullcontext() if checkpoint is None else held(checkpoint):
                    results[str(step)] = await self._evaluate(step, checkpoint)
            except FileNotFoundError as error:
                if checkpoint is None or is_complete(checkpoint):
                    raise
                log.warning("step %d is left out: %s", step, error)
                yield None
                continue
            meta = {"latest_iteration": step, "settings": settings, "results": results}
            await asyncio.to_thread(write_json, self._file, meta)
            yield step

    def targets(self) -> list[Target]:
        """What is to be evaluated, in order."""
        found = complete_checkpoints(self._file.parent)
        steps: list[Target] = [(step_of(path) or 0, path) for path in found]
        if self.cfg.explorer.bench_on_latest_checkpoint:
            return steps[-1:]
        start: list[Target] = [(0, None)] if self.cfg.explorer.eval_on_startup else []
        return start + [target for target in steps if target[0] > 0]

    async def _evaluate(self, step: int, checkpoint: Optional[Path]) -> dict[str, float]:
        if checkpoint is not None:
            await self._weights.load(step, checkpoint)
        await self._evals.start(step, step)
        metrics: dict[str, float] = {}
        for result in await self._evals.wait():
            if result["error"] is not None:
                raise BatchFailed(
                    f"no run of eval batch {result['batch_id']!r} succeeded; first error: "
                    f"{result['error']}"
                )
            metrics |= result["metrics"]
        return metrics

    def _settings(self) -> str:
        """A fingerprint of what the numbers depend on besides the checkpoint."""
        cfg = self.cfg
        parts = {
            "eval": [asdict(taskset) for taskset in cfg.buffer.explorer_input.eval_tasksets],
            "model": asdict(cfg.model),
            "engine": [cfg.explorer.rollout_model.engine_type, cfg.explorer.rollout_model.seed],
        }
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

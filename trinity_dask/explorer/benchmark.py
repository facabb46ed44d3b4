"""Evaluate the checkpoints of a job, one after the other.

Invariant: the job's own state is only read. A checkpoint counts as done when its results are
in ``benchmark_meta.json``, which is written after each one; results of other settings (tasks,
sampling, engine) do not count.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from trinity_dask.config.schema import Config
from trinity_dask.explorer.engine_weights import EngineWeights
from trinity_dask.explorer.evaluation import Evaluations
from trinity_dask.explorer.processing import BatchFailed
from trinity_dask.files import read_json, write_json
from trinity_dask.monitor.scores import BENCHMARK_FILE
from trinity_dask.trainer.checkpoints.checkpoint import complete_checkpoints

log = logging.getLogger("trinity_dask.explorer")

Target = tuple[int, Optional[Path]]  # step, checkpoint; None is the model the stage starts from


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
        results = await asyncio.to_thread(self._saved)
        targets = await asyncio.to_thread(self.targets)
        if not targets:
            raise FileNotFoundError(
                f"{self._file.parent} has no complete checkpoint to evaluate, and "
                "explorer.eval_on_startup=false leaves out the start model"
            )
        for step, checkpoint in targets:
            if str(step) in results:
                log.info("step %d is benchmarked already: %s", step, self._file)
                continue
            results[str(step)] = await self._evaluate(step, checkpoint)
            await asyncio.to_thread(self._save, step, results)
            yield step

    def targets(self) -> list[Target]:
        """What is to be evaluated, in order."""
        found = complete_checkpoints(self._file.parent)
        steps: list[Target] = [(_step_of(path), path) for path in found]
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

    # progress -------------------------------------------------------------------------
    def _saved(self) -> dict[str, Any]:
        """Results of earlier calls with these settings."""
        meta = read_json(self._file) or {}
        if not self.cfg.continue_from_checkpoint or meta.get("settings") != self._settings():
            return {}
        return dict(meta["results"])

    def _save(self, step: int, results: dict[str, Any]) -> None:
        meta = {"latest_iteration": step, "settings": self._settings(), "results": results}
        write_json(self._file, meta)

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


def _step_of(checkpoint: Path) -> int:
    found = re.search(r"global_step_(\d+)", checkpoint.name)
    assert found is not None
    return int(found[1])

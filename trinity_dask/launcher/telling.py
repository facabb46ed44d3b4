"""From the parts of a stage to the events that are told of it.

Invariant: the parts are only looked at, never asked over a wire; what has not changed is not told
again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trinity_dask.config import modes
from trinity_dask.config.compose import to_yaml
from trinity_dask.config.schema import Config
from trinity_dask.explorer.schedule.workers import ROLLOUT
from trinity_dask.monitor.events import RunEvents, past_events

if TYPE_CHECKING:
    from trinity_dask.launcher.stages import StageRunner

HISTORY = 2000  # points and events that a resumed stage begins with
WINDOW_S = 10.0  # over which an engine's share and speed are meant
EVERY_S = 1.0


class EngineWatch:
    """How busy the workers of a stage are, from looks at the scheduler's books."""

    def __init__(self) -> None:
        # worker -> (monotonic s, share of its lanes at work, tokens so far)
        self._looks: dict[str, deque[tuple[float, float, int]]] = {}
        self._told: dict[str, dict[str, Any]] = {}
        self._told_at = 0.0

    def look(self, stage: StageRunner) -> dict[str, dict[str, Any]]:
        """What has changed since it was last asked, by slot: what :meth:`EnginePool.states` says,
        ``busy`` (mean share of its lanes at work in the last ten seconds) and ``tokens_per_s``."""
        states, now = self.states(stage), time.monotonic()
        if now - self._told_at < EVERY_S:
            return {}
        news = {slot: s for slot, s in states.items() if self._told.get(slot) != s}
        gone = {slot: {"state": "gone"} for slot in self._told.keys() - states.keys()}
        self._told, self._told_at = states, now
        return {**news, **gone}

    def states(self, stage: StageRunner) -> dict[str, dict[str, Any]]:
        """Of every worker, as it is now."""
        now = time.monotonic()
        states = stage.pool.states() if stage.pool is not None else {}
        for worker in stage.coordinator.workers if stage.coordinator is not None else ():
            if not worker.up and worker.name not in states and worker.group == ROLLOUT:
                continue  # its engine has left
            looks = self._looks.setdefault(worker.name, deque())
            share = len(worker.running) / worker.capacity if worker.up else 0.0
            looks.append((now, share, worker.response_tokens))
            while now - looks[0][0] > WINDOW_S:
                looks.popleft()
            seconds, tokens = now - looks[0][0], worker.response_tokens - looks[0][2]
            state = states.setdefault(worker.name, {"state": "up" if worker.up else "lost"})
            state["busy"] = round(sum(look[1] for look in looks) / len(looks), 2)
            state["tokens_per_s"] = round(tokens / seconds, 1) if seconds > 1.0 else 0.0
        return states


def bound_of(cfg: Config) -> tuple[float | None, str]:
    """The largest age of a token that the configuration allows, and the key that says so."""
    if cfg.synchronizer.max_staleness is not None:
        return float(cfg.synchronizer.max_staleness), "synchronizer.max_staleness"
    args: Mapping[str, Any] = cfg.algorithm.sample_strategy_args or {}
    if cfg.algorithm.sample_strategy == "staleness_control" and "max_staleness" in args:
        return float(args["max_staleness"]), "algorithm.sample_strategy_args.max_staleness"
    return None, ""


async def begin(events: RunEvents, cfg: Config) -> None:
    """Tell that the stage of ``cfg`` begins, and what its earlier runs have told."""
    bound, key = bound_of(cfg)
    past = []
    if cfg.continue_from_checkpoint:
        past = await asyncio.to_thread(past_events, str(cfg.job_dir), HISTORY)
    began = min((e["time"] for e in past if e["time"] > 0.0), default=time.time())
    member = modes.member_of(cfg)  # a job's trainer and its explorers are runs of their own
    name = cfg.name if member is None else f"{cfg.name}: {member}"
    facts = {"began": began, "name": name, "mode": cfg.mode, "bound": bound, "bound_key": key}
    events.begin(cfg.stage_name or "", str(cfg.job_dir), to_yaml(cfg), **facts)
    events.earlier(past)

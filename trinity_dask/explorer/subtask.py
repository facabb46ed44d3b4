"""The Dask task of a sub-task: what runs on a rollout worker, beside its engine.

Invariant: :func:`run_subtask` returns a payload for everything that user code can do, and
raises only when it is cancelled or when this worker cannot run rollouts at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Optional

from trinity_dask.config.schema import Config
from trinity_dask.experience.payload import encode
from trinity_dask.explorer.running import describe
from trinity_dask.explorer.status import Outcome, Status
from trinity_dask.explorer.workflow_runner import WorkflowRunner
from trinity_dask.models.engine_actor import local_engine
from trinity_dask.models.tokenizer import load_tokenizer
from trinity_dask.models.wrapper import ModelWrapper
from trinity_dask.workflows import Task
from trinity_dask.workflows.loading import LoadError, load_plugins

ENGINE_WAIT_S = 120.0
ENGINE_POLL_S = 0.1


@dataclass(frozen=True)
class RunnerSettings:
    """What a worker needs to know once; the same for all sub-tasks of a run."""

    model: dict[str, Any]
    concurrent_mode: str
    plugin_dirs: tuple[str, ...]

    @classmethod
    def from_config(cls, cfg: Config) -> RunnerSettings:
        return cls(asdict(cfg.model), cfg.explorer.concurrent_mode, tuple(cfg.plugin_dirs))

    @cached_property
    def key(self) -> str:
        text = json.dumps([self.model, self.concurrent_mode, self.plugin_dirs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class SubTaskSpec:
    """One attempt: ``repeat_times`` runs of ``task`` from ``run_id_base`` on, in ``timeout_s``."""

    task: Task
    repeat_times: int
    run_id_base: int
    timeout_s: float
    collect_partial_runs: bool
    settings: RunnerSettings
    settings_key: str


async def run_subtask(spec: SubTaskSpec) -> bytes:
    """Payload of the runs (header: :class:`Outcome`). Runs on a rollout worker's event loop."""
    engine = await _engine(min(spec.timeout_s, ENGINE_WAIT_S))
    try:
        runner = await _runner(engine, spec)
    except (LoadError, ValueError) as error:  # a wrong plugin, reward or tokenizer path
        return _failed(spec, error)
    _, payload = await runner.run_task(
        spec.task,
        spec.task.batch_id,
        spec.repeat_times,
        spec.run_id_base,
        spec.collect_partial_runs,
        spec.timeout_s,
    )
    return payload


def _failed(spec: SubTaskSpec, error: Exception) -> bytes:
    described = describe(error)
    status = Status(0, spec.repeat_times, [], str(described))
    errors = (described,) * spec.repeat_times
    return encode([], Outcome(status, errors, 0.0, retryable=False).to_header())


# One runner per engine and settings. An engine that was re-created is a new object, so its
# runner is made anew and the old one is dropped with its engine.
_runners: dict[tuple[int, str], tuple[Any, asyncio.Future[WorkflowRunner]]] = {}


async def _engine(timeout_s: float) -> Any:
    """This worker's engine actor.

    A worker that was born again after a crash takes tasks at once, while its engine comes a
    moment later; without this wait those tasks would use up their attempts in between.

    Raises:
        RuntimeError: there is none after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return local_engine()
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(ENGINE_POLL_S)


async def _runner(engine: Any, spec: SubTaskSpec) -> WorkflowRunner:
    key = (id(engine), spec.settings_key)
    known = _runners.get(key)
    if known is None or known[0] is not engine:
        _forget_closed(engine)
        _runners[key] = known = (engine, asyncio.ensure_future(_build(engine, spec.settings)))
    try:
        # shielded: one cancelled sub-task must not cancel the set-up of its neighbours
        return await asyncio.shield(known[1])
    except Exception:
        _runners.pop(key, None)
        raise


def _forget_closed(engine: Any) -> None:
    """Drop runners of engines that this worker's new engine has replaced."""
    address = getattr(engine, "address", None)
    for key, (other, _) in list(_runners.items()):
        if other is not engine and getattr(other, "address", None) == address:
            del _runners[key]


async def _build(engine: Any, settings: RunnerSettings) -> WorkflowRunner:
    tokenizer = await asyncio.to_thread(_prepare, settings)

    def make_model(rollout_args: Optional[dict[str, Any]]) -> ModelWrapper:
        return ModelWrapper(engine, tokenizer, settings.model, rollout_args or {})

    return WorkflowRunner(make_model, settings.concurrent_mode)


def _prepare(settings: RunnerSettings) -> Any:
    load_plugins(settings.plugin_dirs)
    path = settings.model["model_path"]
    return load_tokenizer(path) if path else None

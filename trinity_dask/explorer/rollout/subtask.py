"""The Dask task of a sub-task: what runs on a rollout or a runner worker.

Invariant: :func:`run_subtask` returns a payload for everything that user code can do, and
raises only when it is cancelled or when this worker cannot run rollouts at all. The
workflow cannot tell which kind of worker it is on: beside its engine, or with it over RPC.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Optional

import numpy as np

from trinity_dask.cluster.context import current_worker, freeze_loaded
from trinity_dask.cluster.loop_watch import add_report
from trinity_dask.cluster.slots import ROLLOUT, RUNNER, own_engine_slots
from trinity_dask.config.schema import Config
from trinity_dask.experience import Experience
from trinity_dask.experience.schema import encode
from trinity_dask.explorer.rollout.user_code import as_run_error, recallable
from trinity_dask.explorer.rollout.workflow_runner import (
    WorkflowRunner,
    header_of,
    workflow_class,
)
from trinity_dask.explorer.schedule.tasks import AttemptOutcome
from trinity_dask.models.actor.actor import ready_engine
from trinity_dask.models.actor.remote import RemoteEngine, engine_slots
from trinity_dask.models.tokenizer import load_tokenizer
from trinity_dask.models.wrapper import ModelWrapper
from trinity_dask.registry import LoadError, load_plugins
from trinity_dask.workflows import Task

log = logging.getLogger("trinity_dask.explorer")

ENGINE_WAIT_S = 120.0
ENGINE_POLL_S = 0.1
REMOTE_GRACE_S = 30.0


@dataclass(frozen=True)
class RunnerSettings:
    """What a worker needs to know once; the same for all sub-tasks of a run."""

    model: dict[str, Any]
    concurrent_mode: str
    plugin_dirs: tuple[str, ...]
    enable_history: bool = False
    # of one call to an engine elsewhere: its own limit, and the time it may take to load
    call_timeout_s: float = 930.0
    request_seed: Optional[int] = None  # deterministic: what the seeds of requests are made from
    engine_slots: Optional[tuple[str, ...]] = None  # where other explorers have engines too
    run: str = ""  # launch of a run; engines of another one are not used

    @classmethod
    def from_config(cls, cfg: Config, run: str = "") -> RunnerSettings:
        engine = cfg.explorer.rollout_model
        return cls(
            asdict(cfg.model),
            cfg.explorer.concurrent_mode,
            tuple(cfg.plugin_dirs),
            engine.enable_history,
            engine.request_timeout_s + engine.prepare_timeout_s + REMOTE_GRACE_S,
            engine.seed if engine.deterministic else None,
            own_engine_slots(cfg.cluster),
            run,
        )

    @cached_property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class SubTaskSpec:
    """One attempt: ``repeat_times`` runs of ``task`` from ``run_id_base`` on, in ``timeout_s``.

    ``engine`` is the slot of the engine to use from a runner worker (None: any one); on a
    rollout worker its own engine is used. ``lane`` is the number of the one that the scheduler
    has given to the attempt (None: the worker counts its own). ``key`` is its Dask key, by which
    it can be recalled.
    """

    task: Task
    repeat_times: int
    run_id_base: int
    timeout_s: float
    collect_partial_runs: bool
    settings: RunnerSettings
    engine: Optional[str] = None
    lane: Optional[int] = None
    key: str = ""


def group_of(workflow: str, cfg: Config) -> str:
    """The kind of worker, ``rollout`` or ``runner``, that runs a workflow of this name.

    ``explorer.run_on=auto`` looks at the workflow: one that is not async may block, and runs
    on a runner worker if the cluster has any. Loads the user's code when it has to look; a
    workflow that cannot be loaded runs by an engine and reports that there.
    """
    run_on = cfg.explorer.run_on
    if run_on != "auto" or cfg.cluster.runner.n_workers < 1:
        return RUNNER if run_on == RUNNER else ROLLOUT
    try:
        load_plugins(cfg.plugin_dirs)
        return ROLLOUT if workflow_class(workflow).is_async else RUNNER
    except LoadError:
        return ROLLOUT


async def run_subtask(spec: SubTaskSpec) -> bytes:
    """Payload of the runs (header: :class:`AttemptOutcome`). Runs on the worker's event loop."""
    with recallable(spec.key):
        try:
            runner = await _runner_for(spec)
        except (LoadError, ValueError) as error:  # a wrong plugin, reward or tokenizer path
            told = as_run_error(error)
            lost = AttemptOutcome.all_failed(spec.repeat_times, told, retryable=False)
            return encode([], header_of(lost))
        _, payload = await runner.run_task(
            spec.task,
            spec.task.batch_id,
            spec.repeat_times,
            spec.run_id_base,
            spec.collect_partial_runs,
            spec.timeout_s,
            spec.lane,
        )
    return payload


async def warm_up(settings: RunnerSettings) -> None:
    """Load what this worker's first sub-task would have to load. Never raises for what cannot
    be loaded: the sub-task says that, as its outcome."""
    try:
        await asyncio.to_thread(_prepare, settings)
        # the first conversion has pyarrow import pandas: not on the event loop, then
        await asyncio.to_thread(encode, [Experience(np.arange(2))], {})
        freeze_loaded()
    except (LoadError, ValueError) as error:
        log.warning("%s cannot be made ready: %s", _worker_name(), error)


# One runner per engine and settings. An engine that was re-created is a new object, so its
# runner is made anew and the old one is dropped with its engine.
_runners: dict[tuple[Any, str], tuple[Any, asyncio.Future[WorkflowRunner]]] = {}
_remote: dict[tuple[str, str], RemoteEngine] = {}  # by slot and launch


async def _runner_for(spec: SubTaskSpec) -> WorkflowRunner:
    wait_s = min(spec.timeout_s, ENGINE_WAIT_S)
    worker = current_worker()
    if worker is None or not worker.state.total_resources.get(RUNNER, 0):
        engine = await ready_engine(wait_s, spec.settings.run)
        return await _runner(id(engine), engine, spec)
    slot = spec.engine or await _any_engine(spec, wait_s)
    key, settings = (slot, spec.settings.run), spec.settings
    remote = _remote.get(key)
    if remote is None:
        remote = _remote[key] = RemoteEngine(slot, settings.call_timeout_s, settings.run)
    return await _runner(slot, remote, spec)


async def _any_engine(spec: SubTaskSpec, timeout_s: float) -> str:
    """An engine for a sub-task that names none: tasks are spread over those there are.

    Raises:
        RuntimeError: there is none after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    own = spec.settings.engine_slots
    while not (found := sorted(s for s in await engine_slots() if own is None or s in own)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no worker carries an engine slot after {timeout_s:g} s")
        await asyncio.sleep(ENGINE_POLL_S)
    task = spec.task
    return found[zlib.crc32(f"{task.batch_id}/{task.task_id}".encode()) % len(found)]


async def _runner(name: Any, engine: Any, spec: SubTaskSpec) -> WorkflowRunner:
    key = (name, spec.settings.key)
    known = _runners.get(key)
    if known is None or known[0] is not engine:
        # drop runners of engines that this worker's new engine has replaced
        address = getattr(engine, "address", None)
        for other_key, (other, _) in list(_runners.items()):
            if other is not engine and address and getattr(other, "address", None) == address:
                del _runners[other_key]
        _runners[key] = known = (
            engine,
            asyncio.ensure_future(build_runner(engine, spec.settings)),
        )
    try:
        # shielded: one cancelled sub-task must not cancel the set-up of its neighbours
        return await asyncio.shield(known[1])
    except Exception:
        _runners.pop(key, None)
        raise


async def build_runner(engine: Any, settings: RunnerSettings) -> WorkflowRunner:
    """A runner of workflows beside ``engine``. Raises what a wrong configuration makes of it."""
    tokenizer = await asyncio.to_thread(_prepare, settings)

    def make_model(rollout_args: Optional[dict[str, Any]]) -> ModelWrapper:
        return ModelWrapper(
            engine,
            tokenizer,
            settings.model,
            rollout_args or {},
            enable_history=settings.enable_history,
            request_seed=settings.request_seed,
        )

    def states() -> list[dict[str, Any]]:
        """The state of every lane of this process."""
        ready = [f for _, f in _runners.values() if f.done() and not f.cancelled()]
        runners = [f.result() for f in ready if f.exception() is None]
        return [state for runner in runners for state in runner.get_runner_state()]

    add_report("runners", states)
    make_model({})  # a wrong configuration shows before the first task
    return WorkflowRunner(make_model, settings.concurrent_mode, name=_worker_name())


def _worker_name() -> str:
    worker = current_worker()
    return "" if worker is None else str(worker.name)


def _prepare(settings: RunnerSettings) -> Any:
    load_plugins(settings.plugin_dirs)
    path, trust = settings.model["model_path"], bool(settings.model.get("trust_remote_code"))
    return load_tokenizer(path, trust) if path else None

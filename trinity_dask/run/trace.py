"""One task through its workflow, turn by turn, with an engine in this process and nothing else.

Invariant: nothing is trained, committed or written. What a run would have seen of the task is in
the trace: the experiences with what the sampler knew of each token, or the error of each run with
the traceback of the user's own code.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.config import modes
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.schema import Config
from trinity_dask.experience import Experience
from trinity_dask.experience.task import Task
from trinity_dask.explorer.schedule.tasks import RunError, Status
from trinity_dask.registry import load_object, load_plugins

if TYPE_CHECKING:
    from trinity_dask.explorer.schedule.tasks import AttemptOutcome

NEWEST, START = "newest", "start"
MIN_TIME_S = 60.0  # for an engine's first requests, which a run does not time either


@dataclass(frozen=True)
class Turn:
    """Tokens that follow each other and come from one side: the model's (``sampled``), or others'
    (prompt, tool, user). ``logprobs`` float32 ``[n]`` of sampled ones."""

    sampled: bool
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Trace:
    """What came of the runs of one task.

    ``seconds`` are those of all runs together, without loading the model; ``weights`` says where
    they are from. Printed, or the last value of a notebook's cell, it shows itself turn by turn.
    """

    task: Task
    status: Status
    experiences: tuple[Experience, ...]
    errors: tuple[RunError, ...]
    seconds: float
    weights: str
    decoder: Any = field(repr=False, default=None)

    @property
    def ok(self) -> bool:
        return self.status.ok

    def text(self, token_ids: tuple[int, ...]) -> str:
        """Special tokens are written out, as the model sees them."""
        return self.decoder.decode(list(token_ids), skip_special_tokens=False)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = __str__


def turns(experience: Experience) -> Iterator[Turn]:
    """Prompt and answer of an experience, cut where the side that speaks changes."""
    ids, start = experience.tokens.tolist(), experience.prompt_length
    yield Turn(False, tuple(ids[:start]))
    mask, logprobs = experience.action_mask, experience.logprobs
    assert mask is not None
    begin = 0
    for stop in range(1, len(mask) + 1):
        if stop < len(mask) and mask[stop] == mask[begin]:
            continue
        own = bool(mask[begin])
        known = logprobs[begin:stop].tolist() if own and logprobs is not None else ()
        yield Turn(own, tuple(ids[start + begin : start + stop]), tuple(known))
        begin = stop


def stage_to_try(stages: Sequence[Config], wanted: Optional[str] = None) -> Config:
    """The stage of this name; without one the last that samples.

    Raises:
        ConfigError: there is none.
    """
    able = {stage.stage_name or stage.name: stage for stage in stages if modes.samples(stage.mode)}
    if wanted is None and able:
        return list(able.values())[-1]
    if wanted is None or wanted not in able:
        told = f"mode={stages[0].mode}" if wanted is None else f"stage={wanted}"
        raise ConfigError(f"{told}: no stage that samples; there are: {', '.join(able) or 'none'}")
    return able[wanted]


def trace(
    cfg: Config,
    task: int | Mapping[str, Any] = 0,
    *,
    checkpoint: int | str = NEWEST,
    runs: int = 1,
    taskset: Optional[str] = None,
) -> Trace:
    """Run one task ``runs`` times; blocks until they are done, also in a notebook's cell.

    Args:
        cfg: a resolved configuration without stages (one of ``Run.stages``).
        task: its number in the taskset, or a row in place of one.
        checkpoint: a directory, a step of the job, ``newest`` (the start model where the job has
            none yet) or ``start``.
        taskset: the name of an eval taskset; None is the first training taskset.

    Raises:
        ConfigError: there is no such task, taskset or checkpoint.
        DataError: the taskset cannot be read.
        RuntimeError: the engine does not start.
    """
    found: list[Trace] = []
    failed: list[BaseException] = []

    def work() -> None:  # a notebook's own loop is at work in this thread
        try:
            found.append(asyncio.run(_trace(cfg, task, checkpoint, runs, taskset)))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="trinity-trace", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


async def _trace(
    cfg: Config,
    wanted: int | Mapping[str, Any],
    checkpoint: int | str,
    runs: int,
    taskset: Optional[str],
) -> Trace:
    # of a notebook tqdm wants ipywidgets as soon as transformers imports it; no bar is shown here
    warnings.filterwarnings("ignore", message="IProgress not found")
    # torch and transformers, only when something is really run
    from trinity_dask.experience.schema import decode, from_table
    from trinity_dask.explorer.engine_weights import checkpoint_weights
    from trinity_dask.explorer.rollout.subtask import RunnerSettings, build_runner
    from trinity_dask.explorer.rollout.workflow_runner import outcome_of
    from trinity_dask.launcher.specs import engine_specs
    from trinity_dask.models import ENGINES
    from trinity_dask.models.protocol import WeightUpdate
    from trinity_dask.models.tokenizer import load_tokenizer

    load_plugins(cfg.plugin_dirs)
    if cfg.prepare:
        await asyncio.to_thread(load_object(cfg.prepare), cfg, **cfg.prepare_args)
    task = _task(cfg, wanted, taskset)
    path = _checkpoint(cfg, checkpoint)
    spec = engine_specs(cfg)[0]
    engine = ENGINES.get(spec.engine_type)(spec)
    limit_s = max(cfg.explorer.max_timeout_s, MIN_TIME_S)
    try:
        await asyncio.wait_for(engine.prepare(), cfg.explorer.rollout_model.prepare_timeout_s)
        if path is not None:
            weights = str(checkpoint_weights(path))
            step = int(path.name.rpartition("_")[2])
            await engine.update_weights(WeightUpdate(step, "checkpoint", path=weights))
        runner = await build_runner(engine, RunnerSettings.from_config(cfg))
        start = time.perf_counter()
        _, payload = await runner.run_task(task, "try", runs, timeout_s=limit_s)
        seconds = time.perf_counter() - start
    finally:
        await engine.close()
    outcome: AttemptOutcome = outcome_of(payload)
    return Trace(
        task,
        outcome.status,
        tuple(from_table(decode(payload)[0])),
        outcome.errors,
        seconds,
        cfg.model.model_path if path is None else str(path),
        load_tokenizer(cfg.model.model_path, cfg.model.trust_remote_code),
    )


def _task(cfg: Config, wanted: int | Mapping[str, Any], name: Optional[str]) -> Task:
    from trinity_dask.buffer.data.taskset import Taskset

    source = cfg.buffer.explorer_input
    evals = {str(each.name): each for each in source.eval_tasksets}
    if name is not None and name not in evals:
        raise ConfigError(f"no eval taskset {name!r}; there are: {', '.join(evals) or 'none'}")
    taskset = Taskset(
        source.train_tasksets[0] if name is None else evals[name],
        batch_size=1,
        is_eval=False,  # or its experiences would be left out
        default_workflow=source.default_workflow,
        default_reward_fn=source.default_reward_fn,
    )
    if not isinstance(wanted, int):
        return replace(taskset.task(0), raw_task=dict(wanted), index={}, source="the row given")
    if not 0 <= wanted < len(taskset):
        raise ConfigError(f"task={wanted}: the taskset has {len(taskset)} tasks, from 0 on")
    return replace(taskset.task(wanted), task_id=wanted)


def _checkpoint(cfg: Config, wanted: int | str) -> Optional[Path]:
    from trinity_dask.trainer.checkpoints.checkpoint import is_complete, latest_complete, step_dir

    if wanted == START:
        return None
    if wanted == NEWEST:
        return latest_complete(str(cfg.job_dir))
    number = str(wanted).isdigit()
    path = step_dir(str(cfg.job_dir), int(wanted)) if number else Path(str(wanted))
    if not is_complete(path):
        raise ConfigError(f"checkpoint={wanted}: {path} is no complete checkpoint")
    return path


# what is shown -------------------------------------------------------------------------
def _lines(found: Trace) -> Iterator[str]:
    """For people: every text as it is, with what moves or colours a terminal written out."""
    task = found.task
    yield f"task {task.source}, workflow {task.workflow}, reward {task.reward_fn or '-'}"
    yield f"weights {found.weights}"
    for experience in found.experiences:
        yield ""
        yield f"run {experience.eid.run}, step {experience.eid.step}"
        for number, turn in enumerate(turns(experience)):
            if turn.sampled:
                n = len(turn.token_ids)
                mean = f", mean log-prob {sum(turn.logprobs) / n:.3f}" if turn.logprobs else ""
                yield f"--- model, {n} tokens{mean}"
            else:
                side = "prompt" if number == 0 else "not the model's"
                yield f"--- {side}, {len(turn.token_ids)} tokens"
            yield visible(found.text(turn.token_ids))
        parts = ", ".join(f"{name} {value:g}" for name, value in experience.metrics.items())
        yield f"--- reward {experience.reward}" + (f" ({parts})" if parts else "")
        if experience.truncate_status:
            yield f"    {experience.truncate_status}"
    for error in found.errors:
        yield ""
        which = "a run" if error.run is None else f"run {error.run}"
        yield f"{which} failed: {visible(str(error))}"
        yield visible(error.traceback.rstrip())
    yield ""
    yield f"{found.status.completed_runs} of {found.status.total_runs} runs, {found.seconds:.2f} s"


def visible(text: str) -> str:
    """``text`` in which every character shows: those that move, colour or reorder what a terminal
    shows are written out (``\\x1b``); lines and tabs stay."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )

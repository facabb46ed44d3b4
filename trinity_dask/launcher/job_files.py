"""The files of a job: where its configuration is, which stage is reached, whether it is finished.

Invariant: a finished job is only taken for the wanted one when it was run with the wanted
configuration; one that is given more steps is not finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trinity_dask.config import Config, ConfigError, from_yaml
from trinity_dask.config.job_dir import is_finished, stage_file
from trinity_dask.config.secrets import shown

# may differ between two runs of the same job: where it runs, what it shows, where a stage
# takes its start model from
_FREE = ("cluster.", "monitor.", "continue_from_checkpoint", "rerun_finished", "model.model_path")

# how much a stage does: with more of it a finished job goes on
_AMOUNTS = ("buffer.total_steps", "buffer.total_epochs", "trainer.total_steps")


def config_file(cfg: Config) -> Path:
    """Where the resolved configuration of a run is kept: an explorer that joins a job, and a
    benchmark of it, do not write over the job's own."""
    directory = Path(str(cfg.job_dir))
    if cfg.mode == "bench":
        return directory / "benchmark_config.yaml"
    if cfg.mode == "explore":
        return directory / f"{cfg.explorer.name}_config.yaml"
    return directory / "config.yaml"


def finished_message(job_dir: str, stages: list[Config]) -> str | None:
    """What to tell the user when the job is finished already; None when it is not.

    Raises:
        ConfigError: it was finished with another configuration (names the keys).
    """
    first = stages[0]
    if first.mode == "bench":
        _require_checkpoints(job_dir, stages)
        return None
    finished = is_finished(job_dir, len(stages), stage_file(first))
    if not first.continue_from_checkpoint or not finished:
        return None
    changed = [dict(_changed(stage)) for stage in stages]
    if _is_more(changed):
        return None
    different = sorted({key for each in changed for key in each})
    if different:
        raise ConfigError(
            f"{job_dir} is finished, with another configuration (different: "
            f"{', '.join(different[:8])}); give this one another name=, or "
            "continue_from_checkpoint=false to start it beside the old one. Only with more "
            f"steps or epochs of its last stage ({', '.join(_AMOUNTS)}) it would go on"
        )
    return (
        f"{job_dir} is finished already; give another name, or continue_from_checkpoint=false, "
        "to run it again"
    )


def is_given_more(stages: list[Config]) -> bool:
    """Whether ``stages``, all finished, differ from those by more of the last one alone: then the
    job is not finished."""
    return _is_more([dict(_changed(stage)) for stage in stages])


def _is_more(changed: Sequence[dict[str, tuple[Any, Any]]]) -> bool:
    *before, last = changed
    grown = (
        key in _AMOUNTS and None not in pair and pair[0] < pair[1] for key, pair in last.items()
    )
    return bool(last) and not any(before) and all(grown)


def _require_checkpoints(job_dir: str, stages: list[Config]) -> None:
    """A benchmark of a job that left none, or of a name that was never run, is a mistake."""
    found = (path for stage in stages for path in Path(str(stage.job_dir)).glob("global_step_*"))
    if next(found, None) is None:
        raise ConfigError(
            f"mode=bench evaluates the checkpoints of a job, and {job_dir} holds none; run it "
            "first, or give the name= of one that was run (rerun_finished=true takes its newest "
            "run)"
        )


def _changed(stage: Config) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The keys that a finished stage had otherwise: their values then and now."""
    saved = config_file(stage)
    if not saved.is_file():
        return
    # as they are written: another value of the same variable is the same configuration
    before, now = (dict(_flat(shown(c))) for c in (from_yaml(saved, lenient=True), stage))
    for key in before.keys() | now.keys():
        if before.get(key) != now.get(key) and not key.startswith(_FREE):
            yield key, (before.get(key), now.get(key))


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, values

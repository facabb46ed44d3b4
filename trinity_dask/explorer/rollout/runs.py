"""What the runs of a sub-task came to, and how their experiences are labelled.

Invariant: a run is counted once, as completed or by its error: ``completed + len(errors)``
is the number of runs asked for. Every experience carries the number of its run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from trinity_dask.experience import Experience
from trinity_dask.explorer.metrics import TIME_RUN, reduce_metrics
from trinity_dask.explorer.rollout.lanes import Lane
from trinity_dask.explorer.schedule.outcome import Outcome, RunError, Status
from trinity_dask.workflows import Task

MISSING_RUN = "MissingRun"


@dataclass(frozen=True)
class Attempt:
    """``n`` runs of ``task`` from number ``base`` on, until ``deadline`` (monotonic clock).

    Without ``partial`` the first failed run ends the others.
    """

    task: Task
    n: int
    base: int
    partial: bool
    deadline: Optional[float]
    lane: Lane

    @property
    def left_s(self) -> Optional[float]:
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)


@dataclass
class Runs:
    """What several runs came to: a metrics dict per completed run, an error per failed one."""

    experiences: list[Experience] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    errors: list[RunError] = field(default_factory=list)
    retryable: bool = True

    def add(self, experiences: Sequence[Experience], seconds: float) -> None:
        """One successful run."""
        self.experiences += experiences
        reduced = reduce_metrics(e.metrics or {} for e in experiences)
        self.metrics.append({**reduced, TIME_RUN: seconds})

    def add_group(self, found: Sequence[Experience], n: int, base: int, seconds: float) -> None:
        """What one call returned for ``n`` runs; a run without experience is an error.

        Raises:
            ValueError: an experience carries a number that is not of these runs.
        """
        by_run = _by_run(found, n, base)
        for run in sorted(by_run):
            self.add(by_run[run], seconds)
        lost = n - len(by_run) - len(self.errors)
        if lost > 0:
            message = (
                f"{n} runs were asked for and {len(found)} experiences came back, with the run "
                f"numbers {sorted(by_run)}; a workflow with can_repeat returns experiences of "
                f"every run, with the numbers {base} to {base + n - 1} in eid.run"
            )
            self.errors += [RunError(MISSING_RUN, message)] * lost

    def outcome(self, n: int, seconds: float, runner: dict[str, Any]) -> Outcome:
        completed = n - len(self.errors)
        message = None
        if self.errors:
            message = f"{completed}/{n} runs completed successfully; first error: {self.errors[0]}"
        status = Status(completed, n, self.metrics, message)
        return Outcome(status, tuple(self.errors), seconds, self.retryable, runner)


def checked(value: Any, task: Task, allow_empty: bool = False) -> list[Experience]:
    """``value`` if it is what a workflow must return. Raises TypeError or ValueError."""
    if not isinstance(value, list) or not all(isinstance(e, Experience) for e in value):
        what = type(value).__name__
        raise TypeError(f"workflow {task.workflow!r} returned {what}, not a list of Experience")
    for experience in value:
        experience.check()
        _check_metric_names(experience, task)
    if not value and not allow_empty:
        raise ValueError(f"workflow {task.workflow!r} returned no experience")
    return value


def _check_metric_names(experience: Experience, task: Task) -> None:
    for name in experience.metrics or {}:
        if not isinstance(name, str):
            raise TypeError(
                f"workflow {task.workflow!r} returned a metric named {name!r}, of type "
                f"{type(name).__name__}; names of metrics are strings, for example {str(name)!r}"
            )


def _by_run(found: Sequence[Experience], n: int, base: int) -> dict[int, list[Experience]]:
    _number_unnumbered(found, n, base)
    by_run: dict[int, list[Experience]] = {}
    for experience in found:
        by_run.setdefault(experience.eid.run, []).append(experience)
    if not all(base <= run < base + n for run in by_run):
        raise ValueError(
            f"{len(found)} experiences carry run numbers {sorted(by_run)}; this group "
            f"has runs {base} to {base + n - 1} (see Workflow.set_repeat_times)"
        )
    return by_run


def _number_unnumbered(found: Sequence[Experience], n: int, base: int) -> None:
    """A workflow that left all run numbers at 0 gets them in order, one experience a run.

    Steps of one run stay together: they are told by their different ``eid.step``.
    """
    if {e.eid.run for e in found} != {0}:
        return
    if n == 1:
        for experience in found:
            experience.eid.run = base
    elif len(found) <= n and len({e.eid.step for e in found}) == 1:
        for index, experience in enumerate(found):
            experience.eid.run = base + index


def stamp(
    experience: Experience, task: Task, batch_id: int | str, versions: Optional[tuple[int, int]]
) -> None:
    """Write where an experience comes from.

    ``versions`` are the model's before and after the runs; they stand in for an experience
    that does not know the version of its tokens.
    """
    eid, info = experience.eid, experience.info
    eid.batch = batch_id
    if eid.task == "":
        eid.task = task.task_id
    if experience.metrics is None:
        experience.metrics = {}
    if experience.versions is not None:
        versions = int(experience.versions.min()), int(experience.versions.max())
    if versions is not None:
        info["model_version"], info["model_version_drift"] = versions[0], versions[1] - versions[0]
    info["use_count"] = 0
    info["task_index"] = task.index

"""The end of a task: its runs are counted, its result joins its batch.

Invariant: succeeded + failed + cancelled of a settled task are its runs; a settled task
holds no payload, its result owns them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

from trinity_dask.explorer.metrics import task_metrics
from trinity_dask.explorer.schedule.outcome import Status
from trinity_dask.explorer.schedule.tasks import (
    BatchState,
    CompletedTaskResult,
    Counts,
    TaskWrapper,
)

GROUP_DROPPED = "PartialGroupDropped"


def settle(batch: BatchState, wrapper: TaskWrapper, keep_partial: bool, keep_cut: bool) -> None:
    """Count the runs of a task whose last sub-task has ended, and emit its result.

    ``keep_partial``: the finished runs of a group in which others failed are of use;
    ``keep_cut``: so are those of a group that was cut off.
    """
    wrapper.emitted = True
    cut = wrapper.cancelled_runs > 0
    kept = wrapper.completed_runs
    if kept < wrapper.total_runs and not (keep_partial and (keep_cut or not cut)):
        kept = 0
    # finished runs of a cut group that is not wanted go the way of the rest of it
    dropped = wrapper.completed_runs - kept
    cancelled = wrapper.cancelled_runs + (dropped if cut else 0)
    failed = wrapper.total_runs - kept - cancelled
    batch.counts += Counts(succeeded=kept, failed=failed, cancelled=cancelled)
    _note_failures(batch, wrapper, failed)
    if kept or not cancelled:
        batch.results.append(_result(wrapper, kept))
        batch.completed_tasks += kept > 0
    _release(wrapper)
    batch.unfinished_tasks -= 1


def _note_failures(batch: BatchState, wrapper: TaskWrapper, failed: int) -> None:
    errors = wrapper.errors[:failed]
    batch.failures.update(error.type for error in errors)
    if failed > len(errors):  # successful runs of a group that was dropped as a whole
        batch.failures[GROUP_DROPPED] += failed - len(errors)
    if errors and batch.first_error is None:
        batch.first_error = errors[0]


def _result(wrapper: TaskWrapper, kept: int) -> CompletedTaskResult:
    runs = wrapper.metrics if kept else []
    metrics = task_metrics(runs, wrapper.seconds, wrapper.is_eval)
    status = Status(kept, wrapper.total_runs, [metrics], _message(wrapper, kept))
    payloads = wrapper.experience_payloads if kept else []
    return CompletedTaskResult(wrapper.batch_id, wrapper.task_id, status, payloads)


def _message(wrapper: TaskWrapper, kept: int) -> Optional[str]:
    if kept == wrapper.total_runs:
        return None
    summary = f"{wrapper.completed_runs}/{wrapper.total_runs} runs completed successfully"
    error = wrapper.first_error
    return f"{summary}; first error: {error}" if error else summary


def _release(wrapper: TaskWrapper) -> None:
    wrapper.task = None
    for sub_task in wrapper.sub_tasks:
        sub_task.payload = None
        if sub_task.outcome is not None:
            status = replace(sub_task.outcome.status, metrics=[])
            sub_task.outcome = replace(sub_task.outcome, status=status, errors=())

"""The contract between a workflow and whoever runs it.

Invariant: a workflow turns one task into experiences and raises when it cannot; it never
decides what a failure means.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

from trinity_dask.experience import Experience
from trinity_dask.experience.task import Task

if TYPE_CHECKING:
    from trinity_dask.models.wrapper import ModelWrapper


class PartialGroupError(Exception):
    """Some runs of a repeating workflow failed; the others are kept.

    ``experiences`` are those of the runs that succeeded, ``errors`` has one exception per
    failed run.
    """

    def __init__(self, experiences: Sequence[Experience], errors: Sequence[BaseException]) -> None:
        first = f"{type(errors[0]).__name__}: {errors[0]}" if errors else "none"
        super().__init__(f"{len(errors)} run(s) failed; first: {first}")
        self.experiences = list(experiences)
        self.errors = list(errors)


class Workflow:
    """Base class of workflows.

    Class flags: ``can_reset`` (an instance may serve another task after :meth:`reset`),
    ``can_repeat`` (one :meth:`run` makes all runs of a group, see
    :meth:`set_repeat_times`), ``is_async`` (:meth:`run_async` is used instead of
    :meth:`run`).

    ``run`` is called in its own thread; ``run_async`` on the worker's event loop, which it
    must not block. ``time_limit_s`` is the time the attempt has, in seconds (None = not
    limited); it is set before each run.
    """

    can_reset: bool = False
    can_repeat: bool = False
    is_async: bool = False
    time_limit_s: Optional[float] = None

    def __init__(
        self,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: Optional[Sequence[Any]] = None,
    ) -> None:
        self.task = task
        self.model = model
        self.auxiliary_models = list(auxiliary_models or [])
        self.repeat_times = task.repeat_times
        self.run_id_base = 0
        self.logger = logging.getLogger(f"trinity_dask.workflows.{type(self).__name__}")

    def reset(self, task: Task) -> None:
        """Forget the last task and serve ``task``. Needed when ``can_reset``."""
        raise NotImplementedError(f"{type(self).__name__} has can_reset but no reset()")

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """The next run makes runs ``run_id_base`` to ``run_id_base + repeat_times - 1``.

        Every experience carries the number of its run in ``eid.run``.
        """
        self.repeat_times = repeat_times
        self.run_id_base = run_id_base

    def run(self) -> list[Experience]:
        """Answer the task; the experiences of one run (or of the group, ``can_repeat``)."""
        raise NotImplementedError(f"{type(self).__name__} has no run()")

    async def run_async(self) -> list[Experience]:
        """The same, when ``is_async``."""
        raise NotImplementedError(f"{type(self).__name__} is is_async but has no run_async()")

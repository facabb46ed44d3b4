"""How the runs of a task, or of a part of it, ended.

Invariant: a status is data; it is made where the runs happened and travels unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from trinity_dask.experience.payload import peek_header


@dataclass(frozen=True)
class RunError:
    """Why a run failed: exception type, message, and the end of its traceback."""

    type: str
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True)
class Status:
    """Outcome of ``total_runs`` runs of one task.

    ``metrics`` holds one dict per run (or per experience, for repeating workflows) until
    the runs of a task are put together; after that exactly one. ``message`` is None when
    ``ok``.
    """

    completed_runs: int
    total_runs: int
    metrics: list[dict[str, float]] = field(default_factory=list)
    message: Optional[str] = None

    @property
    def ok(self) -> bool:
        return self.completed_runs == self.total_runs


@dataclass(frozen=True)
class Outcome:
    """What one attempt at a sub-task reported.

    ``errors`` has one entry per failed run. ``retryable`` is false when another attempt
    must fail in the same way (a workflow that does not exist). ``runner`` is the last state of
    the runner (see ``WorkflowRunner.get_runner_state``), with ``worker`` (its name),
    ``abandoned_threads`` (of its process: given up, and still running) and ``loop_lag_s`` (the
    longest delay of the worker's event loop meanwhile).
    """

    status: Status
    errors: tuple[RunError, ...] = ()
    seconds: float = 0.0
    retryable: bool = True
    runner: dict[str, Any] = field(default_factory=dict)

    @property
    def restart_runner(self) -> bool:
        """Whether user code is left running that only the end of its process can stop.

        A runner worker is restarted then; a rollout worker never, its engine is worth more.
        """
        return self.runner.get("abandoned_threads", 0) > 0

    def to_header(self) -> dict[str, Any]:
        """As JSON-able values, for a payload header."""
        return {
            "completed_runs": self.status.completed_runs,
            "total_runs": self.status.total_runs,
            "metrics": self.status.metrics,
            "message": self.status.message,
            "errors": [[e.type, e.message, e.traceback] for e in self.errors],
            "seconds": self.seconds,
            "retryable": self.retryable,
            "runner": self.runner,
        }

    @classmethod
    def from_header(cls, header: dict[str, Any]) -> Outcome:
        """The inverse of :meth:`to_header`. Raises KeyError for another kind of payload."""
        status = Status(
            header["completed_runs"], header["total_runs"], header["metrics"], header["message"]
        )
        errors = tuple(RunError(*error) for error in header["errors"])
        retryable, runner = header["retryable"], header.get("runner", {})
        return cls(status, errors, header["seconds"], retryable, runner)

    @classmethod
    def of_payload(cls, payload: bytes) -> Outcome:
        """The outcome in a payload's header; the rows are not touched.

        Raises:
            ValueError: ``payload`` is none, or not of an attempt.
        """
        header = peek_header(payload)
        try:
            return cls.from_header(header)
        except KeyError as error:
            raise ValueError(f"not the payload of a sub-task: {error!r}") from error

    @classmethod
    def lost(cls, total_runs: int, error: RunError) -> Outcome:
        """An attempt that came back with nothing."""
        return cls(Status(0, total_runs, [], str(error)), (error,) * total_runs)

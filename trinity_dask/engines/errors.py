"""What ends a run for the sake of its weights and engines."""

from __future__ import annotations


class WeightMismatch(RuntimeError):
    """An engine does not hold the trainer's weights. The run has to stop."""


class EngineFailed(RuntimeError):
    """No engine is left, or one could not be started."""


class EngineGone(RuntimeError):
    """An engine does not come back: its worker has left, or it dies again and again."""

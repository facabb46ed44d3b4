"""Base classes of Trinity-RFT that are plain callables here.

Invariant: they promise a signature and do nothing; what is called is the user's.
"""

from __future__ import annotations

import logging
from typing import Any, Optional

from trinity_dask.buffer.operators.operators import OPERATORS as EXPERIENCE_OPERATORS
from trinity_dask.experience import Experience

__all__ = ["EXPERIENCE_OPERATORS", "ExperienceOperator", "RewardFn", "get_logger"]


class RewardFn:
    """A reward: called with ``response`` and ``truth``, returns named numbers."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    def __call__(self, **kwargs: Any) -> dict[str, float]:
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


class ExperienceOperator:
    """What may happen to a batch before it is committed."""

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} has no process()")


def get_logger(name: Optional[str] = None, **_: Any) -> logging.Logger:
    """The logger of this name; where it writes is the process's own business."""
    return logging.getLogger(name or "trinity")

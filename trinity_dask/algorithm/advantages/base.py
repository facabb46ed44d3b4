"""The registry of advantage functions, and how the two kinds are told apart.

Invariant: a grouped function is called as ``fn(experiences) -> (experiences, metrics)`` in
the experience pipeline; an in-trainer function as ``fn(batch) -> (batch, metrics)`` with the
*global* batch of a step, the same on every rank, so that its statistics are global.

A batch is a dict of ``token_level_rewards`` float32 and ``action_mask`` bool ``[B, R]``,
``uid`` (task key of each row), ``run`` (run of each row), and optionally ``values``,
``old_logprobs``, ``ref_logprobs``, ``rollout_logprobs``, ``teacher_logprobs``, ``entropys``,
``necs`` ``[B, R]`` and ``reward_baselines`` ``[B]``. The function sets ``advantages`` and
``returns`` float32 ``[B, R]``, 0 at masked places, and names what it needs in ``needs``.
Metrics are plain floats; the caller prefixes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from trinity_dask.algorithm.calling import declared
from trinity_dask.registry import Registry

AdvantageFn = Callable[..., tuple[Any, dict[str, float]]]
Batch = dict[str, Any]
ADVANTAGE_FN: Registry[Callable[..., Any]] = Registry("advantage_fn")


def runs_in_trainer(function: AdvantageFn) -> bool:
    """Whether it works on a batch (a parameter ``batch``), not on a list of experiences."""
    return "batch" in declared(function)


def advantage_needs(function: Optional[AdvantageFn]) -> frozenset[str]:
    """Optional tensors of the batch that an in-trainer function reads; none for others."""
    target = getattr(function, "func", function)  # functools.partial of a user's function
    return frozenset(getattr(target, "needs", ()))


def require(batch: Batch, names: frozenset[str], who: str) -> None:
    """Raise ValueError when the batch lacks one of ``names``."""
    missing = sorted(name for name in names if batch.get(name) is None)
    if missing:
        raise ValueError(
            f"advantage_fn {who!r} needs {', '.join(missing)} for every row of the step, and the "
            f"batch has {', '.join(sorted(batch))}"
        )

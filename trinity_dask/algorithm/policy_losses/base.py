"""What policy losses share: their call, their ratios, their registry.

Invariant: a loss and each of its metrics are addends: summed over all micro-batches and
ranks of a mini-batch they give that mini-batch's value, however it was cut. What lies at a
masked place, NaN too, reaches neither a loss nor a gradient.

A loss is an object called with keywords: ``logprob`` float32 ``[B, R]``, ``action_mask``
bool ``[B, R]``, whatever else its ``__call__`` declares (``old_logprob``, ``advantages``,
``ref_logprob``, ``rollout_logprob`` float32 ``[B, R]``; ``expert_mask`` bool ``[B, R]``;
``step`` int, the train step), and optionally ``weights`` (detached importance weights
``[B, R]``), ``denominator`` and ``loss_agg_mode``. It returns ``(scalar loss, metrics)``.
Without a denominator it normalises over the rows that it is given; a user's loss that takes
none is read as a mean over the tokens that it was given (see :class:`AnyLoss`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from trinity_dask.algorithm.aggregate import (
    TOKEN_MEAN,
    Denominator,
    aggregate,
    check_mode,
    token_share,
)
from trinity_dask.algorithm.calling import declared, needs_of, pick, takes_weights
from trinity_dask.registry import Registry

# exp of more than this says nothing and overflows products; such a token has no gradient
MAX_LOG_RATIO = 20.0

Metrics = dict[str, Tensor]
LossResult = tuple[Tensor, Metrics]
POLICY_LOSS_FN: Registry[Callable[..., Any]] = Registry("policy_loss_fn")


class PolicyLoss:
    """Base of the losses: what they ask for, and how they are aggregated.

    ``loss_agg_mode`` overrides the loss's own mode (``default_agg_mode``); the value in a
    call overrides both.
    """

    default_agg_mode: ClassVar[str] = TOKEN_MEAN
    of_pairs: bool = False  # its rows are preference pairs: chosen, rejected, ...

    def __init__(self, loss_agg_mode: Optional[str] = None) -> None:
        self.agg_mode = check_mode(loss_agg_mode or self.default_agg_mode)

    @property
    def needs(self) -> frozenset[str]:
        """Inputs that the call requires besides ``logprob`` and ``action_mask``."""
        return needs_of(self.__call__)  # type: ignore[operator]

    @property
    def takes_weights(self) -> bool:
        """An importance correction can be applied to it."""
        return takes_weights(self.__call__)  # type: ignore[operator]

    @property
    def uses_old_logprob(self) -> bool:
        return "old_logprob" in self.needs

    @property
    def uses_advantages(self) -> bool:
        return "advantages" in self.needs

    def mode(self, loss_agg_mode: Optional[str]) -> str:
        return loss_agg_mode or self.agg_mode

    def total(
        self,
        losses: Tensor,
        mask: Tensor,
        denominator: Denominator,
        loss_agg_mode: Optional[str],
        weights: Optional[Tensor] = None,
    ) -> Tensor:
        """The aggregated loss of per-token ``losses`` after importance weighting."""
        weighted = losses if weights is None else losses * weights
        return aggregate(weighted, mask, self.mode(loss_agg_mode), denominator)


class AnyLoss(PolicyLoss):
    """A user's loss that is not a :class:`PolicyLoss`: a function, or an object of theirs.

    One that declares no ``denominator`` cannot know how many tokens the mini-batch has. Its
    loss and its metrics are taken as means over the valid tokens it was given, and weighed
    by the share of these in the mini-batch: so the sum over passes and ranks is that mean
    over the whole.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(getattr(function, "agg_mode", None))
        self.function = function
        self.of_pairs = getattr(function, "of_pairs", False)

    @property
    def needs(self) -> frozenset[str]:
        return needs_of(self.function)

    @property
    def takes_weights(self) -> bool:
        return takes_weights(self.function)

    def __call__(self, **inputs: Any) -> LossResult:
        # what the trainer always offers is passed only where it is declared
        given = pick(self.function, inputs)
        denominator = inputs.get("denominator")
        if denominator is None or "denominator" in declared(self.function):
            return self.function(**given)
        return self._share(given, inputs["logprob"], inputs["action_mask"], denominator)

    def _share(
        self, given: Mapping[str, Any], logprob: Tensor, mask: Tensor, denominator: Denominator
    ) -> LossResult:
        tokens = mask.sum()
        if not tokens:  # a pass without a valid token: the mean of nothing may well be NaN
            with torch.no_grad():
                _, metrics = self.function(**given)
            return logprob.sum() * 0.0, {name: torch.zeros(()) for name in metrics}
        share = tokens / max(denominator.tokens, 1.0)
        loss, metrics = self.function(**given)
        return loss * share, {name: value * share for name, value in metrics.items()}


def counted(denominator: Optional[Denominator], mask: Tensor) -> Denominator:
    """The given denominator, or that of these rows alone."""
    return Denominator.count(mask) if denominator is None else denominator


def log_ratio(logprob: Tensor, old_logprob: Tensor, mask: Tensor) -> Tensor:
    """log(π/π_old) clamped to ±20, 0 at masked places: float32 ``[B, R]``.

    Cut here, not only in the sum: 0 x NaN of a padded place would be a NaN gradient.
    """
    difference = torch.where(mask, logprob - old_logprob, 0.0)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_ranges(
    clip_range: float, low: Optional[float], high: Optional[float], usual: str = "0.2 and 0.2"
) -> tuple[float, float]:
    """(low, high) distances from 1; ``clip_range`` where one is not given.

    Raises:
        ValueError: not 0 <= low <= 1, or high < 0.
    """
    low = clip_range if low is None else low
    high = clip_range if high is None else high
    if not 0 <= low <= 1 or high < 0:
        raise ValueError(
            f"clip ranges must be 0 <= low <= 1 and high >= 0 (got low {low}, high {high}); they "
            f"are distances from 1, usually {usual} to 0.28"
        )
    return low, high


def shares(values: dict[str, Tensor], mask: Tensor, denominator: Denominator) -> Metrics:
    """Token means of several per-token values, as addends without gradient."""
    return {n: token_share(v.detach(), mask, denominator) for n, v in values.items()}

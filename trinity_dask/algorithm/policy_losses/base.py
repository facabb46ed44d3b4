"""What policy losses share: their inputs, their call, their registry.

Invariant: a loss and each of its metrics are addends: summed over all micro-batches and
ranks of a mini-batch they give that mini-batch's value, however it was cut. What lies at a
masked place, NaN too, reaches neither a loss nor a gradient.

A loss is called with keywords, those of :class:`LossInputs`, and returns ``(scalar loss,
metrics)``. Without a denominator it normalises over the rows that it is given; a user's loss
that takes none is read as a mean over the tokens that it was given (see :class:`AnyLoss`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Optional, TypeAlias

from trinity_dask.algorithm.aggregate import (
    TOKEN_MEAN,
    Denominator,
    aggregate,
    check_mode,
    row_mean,
    row_share,
    token_share,
)
from trinity_dask.algorithm.calling import declared, needs_of, pick
from trinity_dask.lazy import torch
from trinity_dask.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

# exp of more than this says nothing and overflows products; such a token has no gradient
MAX_LOG_RATIO = 20.0

Metrics: TypeAlias = "dict[str, Tensor]"
LossResult: TypeAlias = "tuple[Tensor, Metrics]"
POLICY_LOSS_FN: Registry[Callable[..., Any]] = Registry("policy_loss_fn")


@dataclass(frozen=True)
class LossInputs:
    """What a loss may read; all tensors but ``expert_mask`` are 0 at masked places.

    ``logprob``, ``old_logprob``, ``ref_logprob``, ``rollout_logprob``, ``teacher_logprob``,
    ``advantages`` and ``entropy``: float32 ``[B, R]``; ``action_mask`` bool ``[B, R]``;
    ``expert_mask`` bool ``[B]`` or ``[B, R]``; ``logits`` and ``teacher_logits`` float32
    ``[B, R, V]``, as they are; ``step``: the train step. ``weights``: importance weights
    ``[B, R]`` without gradient. What a loss does not name in ``reads`` may be missing.
    """

    logprob: Tensor
    action_mask: Tensor
    denominator: Denominator
    loss_agg_mode: str
    old_logprob: Tensor
    advantages: Tensor
    ref_logprob: Tensor
    rollout_logprob: Tensor
    teacher_logprob: Tensor
    entropy: Tensor
    expert_mask: Tensor
    logits: Tensor
    teacher_logits: Tensor
    weights: Optional[Tensor]
    step: int

    @classmethod
    def of(cls, inputs: dict[str, Any], agg_mode: str) -> LossInputs:
        """The keywords of a call; ``agg_mode`` where the call names no mode."""
        mask = inputs["action_mask"]
        given: dict[str, Any] = {name: inputs.get(name) for name in cls.__dataclass_fields__}
        for name in _AT_TOKENS:
            if given[name] is not None:
                # cut here, not only in the sum: 0 x NaN of a padded place is a NaN gradient
                given[name] = torch.where(mask, given[name], 0.0)
        given["loss_agg_mode"] = given["loss_agg_mode"] or agg_mode
        given["denominator"] = given["denominator"] or Denominator.count(mask, given["expert_mask"])
        return cls(**given)

    @property
    def log_ratio(self) -> Tensor:
        """log(π/π_old) clamped to ±20: ``[B, R]``."""
        return (self.logprob - self.old_logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def row_log_ratio(self) -> Tensor:
        """Mean log(π/π_old) of each row's valid tokens, without gradient: ``[B, 1]``."""
        return row_mean(self.log_ratio.detach(), self.action_mask)[:, None]


_AT_TOKENS = (
    "logprob",
    "old_logprob",
    "advantages",
    "ref_logprob",
    "rollout_logprob",
    "teacher_logprob",
    "entropy",
)


class PolicyLoss:
    """Base of the losses: a subclass gives the formula, :meth:`token_losses`.

    ``reads`` names the inputs that it cannot do without, besides ``logprob`` and
    ``action_mask``. One that reads ``old_logprob`` can be corrected by importance weights.
    ``loss_agg_mode`` overrides the loss's own mode (``default_agg_mode``); the value in a
    call overrides both. ``metric`` is the name of the loss's own value. A subclass may
    instead define ``__call__`` with the inputs it wants as keywords.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    metric: ClassVar[str] = "pg_loss"
    default_agg_mode: ClassVar[str] = TOKEN_MEAN
    of_pairs: bool = False  # its rows are preference pairs: chosen, rejected, ...

    def __init__(self, loss_agg_mode: Optional[str] = None) -> None:
        self.agg_mode = check_mode(loss_agg_mode or self.default_agg_mode)

    @property
    def needs(self) -> frozenset[str]:
        """Inputs that the call requires besides ``logprob`` and ``action_mask``."""
        return needs_of(self)

    @property
    def takes_weights(self) -> bool:
        """An importance correction can be applied to it."""
        return "weights" in declared(self)

    @classmethod
    def declares(cls) -> dict[str, bool]:
        """Inputs of the formula, and whether each must be given; none without a formula."""
        if not cls.reads and cls.token_losses is PolicyLoss.token_losses:
            return {}
        optional = ["denominator", "loss_agg_mode"]
        optional += ["weights"] if "old_logprob" in cls.reads else []
        required = ("logprob", "action_mask", *cls.reads)
        return dict.fromkeys(required, True) | dict.fromkeys(optional, False)

    def token_losses(self, x: LossInputs) -> tuple[Tensor, Metrics]:
        """Loss of each token ``[B, R]``, and values whose means are metrics: of tokens
        ``[B, R]`` or of rows ``[B]``. Masked places may hold anything finite."""
        raise TypeError(f"{type(self).__name__} defines neither token_losses nor __call__")

    def __call__(self, **inputs: Any) -> LossResult:
        """The aggregated loss after importance weighting, and its metrics."""
        x = LossInputs.of(inputs, self.agg_mode)
        losses, values = self.token_losses(x)
        if x.weights is not None and "old_logprob" in self.reads:
            losses = losses * x.weights
        loss = aggregate(losses, x.action_mask, x.loss_agg_mode, x.denominator)
        metrics = {self.metric: loss.detach()}
        for name, value in values.items():
            share = row_share if value.dim() == 1 else token_share
            metrics[name] = share(value.detach(), x.action_mask, x.denominator)
        return loss, metrics


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
        return "weights" in declared(self.function)

    def __call__(self, **inputs: Any) -> LossResult:
        # what the trainer always offers is passed only where it is declared
        given = pick(self.function, inputs)
        denominator, tokens = inputs.get("denominator"), inputs["action_mask"].sum()
        if denominator is None or "denominator" in declared(self.function):
            return self.function(**given)
        if not tokens:  # a pass without a valid token: the mean of nothing may well be NaN
            with torch.no_grad():
                _, metrics = self.function(**given)
            return inputs["logprob"].sum() * 0.0, {name: torch.zeros(()) for name in metrics}
        share = tokens / max(denominator.tokens, 1.0)
        loss, metrics = self.function(**given)
        return loss * share, {name: value * share for name, value in metrics.items()}


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

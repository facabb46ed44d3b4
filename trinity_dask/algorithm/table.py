"""From a config section to an algorithm that can be called.

Invariant: a ``None`` in the config takes the type's default, and ``*_args`` are *merged*
over the default arguments; an argument the function does not have is an error. Whether a
critic, a reference, a teacher or a greedy rollout is needed follows from what the chosen
functions ask for, so exchanging a function cannot leave one missing or run in vain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from trinity_dask.algorithm.advantages import (
    ADVANTAGE_FN,
    AdvantageFn,
    advantage_needs,
    runs_in_trainer,
)
from trinity_dask.algorithm.aggregate import check_mode
from trinity_dask.algorithm.calling import declared
from trinity_dask.algorithm.entropy import ENTROPY_LOSS_FN, EntropyLoss
from trinity_dask.algorithm.kl import KLLoss, KLPenalty
from trinity_dask.algorithm.policy_losses import POLICY_LOSS_FN, AnyLoss, PolicyLoss
from trinity_dask.algorithm.rollout_correction import RolloutCorrection
from trinity_dask.algorithm.sample_strategies import (
    SAMPLE_STRATEGY,
    SAMPLE_STRATEGY_ARGS,
    check_strategy,
)
from trinity_dask.algorithm.types import ALGORITHM
from trinity_dask.registry import Registry, build, build_callable, nearest

_FUNCTIONS = (
    "advantage_fn",
    "policy_loss_fn",
    "kl_penalty_fn",
    "kl_loss_fn",
    "entropy_loss_fn",
    "sample_strategy",
)


@dataclass(frozen=True)
class AlgorithmSpec:
    """An algorithm ready to use; ``resolved`` are its plain values, for the log.

    ``advantage_fn`` is grouped, ``fn(experiences) -> (experiences, metrics)`` in the
    experience pipeline, or with ``advantage_in_trainer`` ``fn(batch) -> (batch, metrics)``
    over the global batch of a step (see :mod:`.advantages`). ``advantage_needs``: the
    optional tensors of that batch which it reads (values, old_logprobs, ref_logprobs,
    rollout_logprobs, teacher_logprobs, entropys, necs, reward_baselines).
    ``kl_penalty`` (None: off) is applied to that batch before it.

    ``policy_loss``: ``fn(logprob=, action_mask=, **needs) -> (loss, metrics)``; its
    ``needs`` are the inputs to add (see :class:`.policy_losses.LossInputs`). Total loss = policy −
    entropy + kl, all normalised by one :class:`.aggregate.Denominator` of the global
    mini-batch with ``loss_agg_mode``.
    """

    algorithm_type: str
    schema: str
    repeat_times: int
    advantage_fn: Optional[AdvantageFn]
    policy_loss: PolicyLoss
    kl_loss: KLLoss
    entropy_loss: EntropyLoss
    loss_agg_mode: str
    bypass_old_logprobs: bool
    correction: RolloutCorrection
    resolved: dict[str, Any]
    kl_penalty: Optional[KLPenalty] = None
    advantage_in_trainer: bool = False
    advantage_needs: frozenset[str] = frozenset()
    sample_strategy: str = "default"
    sample_strategy_args: dict[str, Any] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """Inputs that the losses require besides log-probs, mask, reference and entropy."""
        found = self.policy_loss.needs | self.entropy_loss.needs
        return found if self.correction.dppo_delta is None else found | {"advantages"}

    @property
    def uses_old_logprobs(self) -> bool:
        return "old_logprob" in self.policy_loss.needs

    @property
    def uses_critic(self) -> bool:
        return "values" in self.advantage_needs

    @property
    def uses_reference(self) -> bool:
        wanted = "ref_logprob" in self.policy_loss.needs or "ref_logprobs" in self.advantage_needs
        return wanted or self.kl_loss.active or self.kl_penalty is not None

    @property
    def uses_teacher(self) -> bool:
        """A teacher's scores are needed, from the rows or from a teacher model."""
        return self.uses_teacher_logprobs or self.uses_teacher_logits

    @property
    def uses_teacher_logits(self) -> bool:
        """The teacher's whole distribution is needed, which only a teacher model gives."""
        return "teacher_logits" in self.policy_loss.needs

    @property
    def uses_teacher_logprobs(self) -> bool:
        """The teacher's log-probs of the sampled tokens are needed."""
        of_loss = "teacher_logprob" in self.policy_loss.needs
        return of_loss or "teacher_logprobs" in self.advantage_needs

    @property
    def needs_greedy_baseline(self) -> bool:
        """One more rollout per task at temperature 0, whose reward is the baseline."""
        return "reward_baselines" in self.advantage_needs

    @property
    def rows_per_unit(self) -> int:
        """Neighbouring rows that no shuffle, rank or micro-batch may separate."""
        return 2 if self.schema == "dpo" else 1


def resolve_algorithm(cfg: Mapping[str, Any]) -> AlgorithmSpec:
    """The algorithm that plain config values describe.

    Args:
        cfg: ``algorithm_type`` and any of ``repeat_times``, ``advantage_fn``,
            ``policy_loss_fn``, ``kl_penalty_fn``, ``kl_loss_fn``, ``entropy_loss_fn``,
            ``sample_strategy``, each with its ``*_args``, ``loss_agg_mode``,
            ``bypass_old_logprobs``, ``rollout_correction`` (fields of RolloutCorrection).

    Raises:
        ValueError: an unknown name, argument or impossible value; names the nearest.
    """
    kind = ALGORITHM.get(cfg["algorithm_type"])

    def chosen(key: str) -> Any:
        return getattr(kind, key) if cfg.get(key) is None else cfg[key]

    names: dict[str, str] = {key: chosen(key) for key in _FUNCTIONS}
    args: dict[str, dict[str, Any]] = {}
    for key, name in names.items():
        # the type's arguments are those of its own function
        defaults = kind.args.get(key, {}) if name == getattr(kind, key) else {}
        if key == "sample_strategy":
            defaults = {**SAMPLE_STRATEGY_ARGS.get(name, {}), **defaults}
        args[key] = {**defaults, **(cfg.get(f"{key}_args") or {})}

    def term(cls: type, key: str) -> Any:
        return build(f"{key} {names[key]!r}", cls, {"name": names[key], **args[key]})

    def function(registry: Registry[Any], key: str, *subject: str) -> Any:
        item = registry.get(names[key])
        return build_callable(f"{key} {names[key]!r}", item, args[key], subject)

    strategy = names["sample_strategy"]
    if strategy not in SAMPLE_STRATEGY.names() and ":" not in strategy and "." not in strategy:
        hint = nearest(strategy, SAMPLE_STRATEGY.names())
        raise ValueError(f"unknown sample_strategy {strategy!r}{hint}")
    check_strategy(strategy, args["sample_strategy"])
    loss = function(POLICY_LOSS_FN, "policy_loss_fn", "logprob")
    if not (isinstance(loss, PolicyLoss) and "denominator" in declared(loss)):
        loss = AnyLoss(loss)
    advantage = None
    if names["advantage_fn"] != "none":
        advantage = function(ADVANTAGE_FN, "advantage_fn", "experiences", "batch")
    penalty: KLPenalty = term(KLPenalty, "kl_penalty_fn")
    mode, of_loss = cfg.get("loss_agg_mode"), args["policy_loss_fn"].get("loss_agg_mode")
    if of_loss and mode and of_loss != mode:
        raise ValueError(
            f"loss_agg_mode is {mode!r} and policy_loss_fn_args.loss_agg_mode {of_loss!r}; "
            "set one of them"
        )
    # the user's mode, else the type's, else the policy loss's own
    mode = check_mode(of_loss or mode or kind.loss_agg_mode or loss.agg_mode)
    resolved = {**names, **{f"{key}_args": value for key, value in args.items()}}
    spec = AlgorithmSpec(
        algorithm_type=cfg["algorithm_type"],
        schema=kind.schema,
        repeat_times=int(chosen("repeat_times")),
        advantage_fn=advantage,
        policy_loss=loss,
        kl_loss=term(KLLoss, "kl_loss_fn"),
        entropy_loss=function(ENTROPY_LOSS_FN, "entropy_loss_fn"),
        loss_agg_mode=mode,
        bypass_old_logprobs=bool(cfg.get("bypass_old_logprobs", False)),
        correction=build(
            "rollout_correction", RolloutCorrection, cfg.get("rollout_correction") or {}
        ),
        resolved={**resolved, "loss_agg_mode": mode},
        kl_penalty=penalty if penalty.active else None,
        advantage_in_trainer=advantage is not None and runs_in_trainer(advantage),
        advantage_needs=advantage_needs(advantage),
        sample_strategy=strategy,
        sample_strategy_args=args["sample_strategy"],
    )
    _check_parts(spec)
    return spec


def _check_parts(spec: AlgorithmSpec) -> None:
    """Raise ValueError where functions that are right by themselves cannot act together."""
    names, correction = spec.resolved, spec.correction
    if spec.bypass_old_logprobs and correction.reweights:
        raise ValueError(
            "rollout_correction cannot act with bypass_old_logprobs=true: the ratio against "
            "the sampler's log-probs already contains that weight; set one of them off"
        )
    weighted = correction.active and spec.schema == "experience"
    if weighted and not spec.policy_loss.takes_weights:
        raise ValueError(
            f"rollout_correction cannot act on policy_loss_fn {names['policy_loss_fn']!r}, which "
            "takes no weights; set rollout_correction.mode=none, sequence_filter=none and "
            "dppo_delta=null"
        )
    if spec.kl_penalty is not None and not spec.advantage_in_trainer:
        raise ValueError(
            f"kl_penalty_fn {names['kl_penalty_fn']!r} changes rewards in the trainer, but "
            f"advantage_fn {names['advantage_fn']!r} has used them before; take kl_loss_fn, or an "
            "advantage_fn of the trainer (as reinforceplusplus or rloo)"
        )
    if spec.policy_loss.of_pairs and spec.schema != "dpo":
        raise ValueError(
            f"policy_loss_fn {names['policy_loss_fn']!r} compares preference pairs, and the rows "
            f"of algorithm_type {spec.algorithm_type!r} are none ({spec.schema}); set "
            "algorithm_type=dpo, or another policy_loss_fn"
        )

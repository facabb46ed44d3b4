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
from trinity_dask.algorithm.types import ALGORITHM, AlgorithmType
from trinity_dask.registry import build, build_callable, nearest

SCHEMAS = ("experience", "sft", "cpt", "dpo")
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
    def grouped_advantage_fn(self) -> Optional[AdvantageFn]:
        """The advantage function of the experience pipeline; None when there is none there."""
        return None if self.advantage_in_trainer else self.advantage_fn

    @property
    def needs(self) -> frozenset[str]:
        """Inputs that the losses require besides log-probs, mask, reference and entropy."""
        found = self.policy_loss.needs | self.entropy_loss.needs
        return found | {"advantages"} if self.correction.needs_advantages else found

    @property
    def uses_old_logprobs(self) -> bool:
        return self.policy_loss.uses_old_logprob

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
    parts = _Parts.of(cfg, kind)
    policy_loss = parts.policy_loss()
    mode = _mode(cfg, kind, parts.args["policy_loss_fn"].get("loss_agg_mode"), policy_loss)
    bypass = bool(cfg.get("bypass_old_logprobs", False))
    advantage_fn = parts.advantage()
    in_trainer = advantage_fn is not None and runs_in_trainer(advantage_fn)
    spec = AlgorithmSpec(
        algorithm_type=cfg["algorithm_type"],
        schema=kind.schema,
        repeat_times=int(_default(cfg, "repeat_times", kind)),
        advantage_fn=advantage_fn,
        policy_loss=policy_loss,
        kl_loss=parts.term(KLLoss, "kl_loss_fn"),
        entropy_loss=parts.entropy_loss(),
        loss_agg_mode=mode,
        bypass_old_logprobs=bypass,
        correction=build(
            "rollout_correction", RolloutCorrection, cfg.get("rollout_correction") or {}
        ),
        resolved={**parts.resolved(), "loss_agg_mode": mode},
        kl_penalty=parts.kl_penalty(),
        advantage_in_trainer=in_trainer,
        advantage_needs=advantage_needs(advantage_fn),
        sample_strategy=parts.names["sample_strategy"],
        sample_strategy_args=parts.args["sample_strategy"],
    )
    _check_correction(spec, parts.names["policy_loss_fn"])
    _check_penalty(spec, parts.names)
    _check_pairs(spec, parts.names["policy_loss_fn"])
    return spec


@dataclass
class _Parts:
    """Names and merged arguments of the functions of an algorithm."""

    names: dict[str, str]
    args: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, cfg: Mapping[str, Any], kind: AlgorithmType) -> _Parts:
        names = {key: _default(cfg, key, kind) for key in _FUNCTIONS}
        parts = cls(names, {key: _arguments(cfg, key, names[key], kind) for key in names})
        if names["sample_strategy"] not in SAMPLE_STRATEGY.names():
            _check_path("sample_strategy", names["sample_strategy"])
        check_strategy(names["sample_strategy"], parts.args["sample_strategy"])
        return parts

    def advantage(self) -> Optional[AdvantageFn]:
        name = self.names["advantage_fn"]
        if name == "none":
            return None
        item = ADVANTAGE_FN.get(name)
        subject = ("experiences", "batch")
        return build_callable(f"advantage_fn {name!r}", item, self.args["advantage_fn"], subject)

    def policy_loss(self) -> PolicyLoss:
        name = self.names["policy_loss_fn"]
        item = POLICY_LOSS_FN.get(name)
        args = self.args["policy_loss_fn"]
        loss = build_callable(f"policy_loss_fn {name!r}", item, args, ("logprob",))
        whole = isinstance(loss, PolicyLoss) and "denominator" in declared(loss)
        return loss if whole else AnyLoss(loss)

    def entropy_loss(self) -> EntropyLoss:
        name = self.names["entropy_loss_fn"]
        item, args = ENTROPY_LOSS_FN.get(name), self.args["entropy_loss_fn"]
        return build(f"entropy_loss_fn {name!r}", item, args)

    def kl_penalty(self) -> Optional[KLPenalty]:
        penalty = self.term(KLPenalty, "kl_penalty_fn")
        return penalty if penalty.active else None

    def term(self, cls: type, key: str) -> Any:
        return build(f"{key} {self.names[key]!r}", cls, {"name": self.names[key], **self.args[key]})

    def resolved(self) -> dict[str, Any]:
        args = {f"{key}_args": value for key, value in self.args.items()}
        return {**self.names, **args}


def _default(cfg: Mapping[str, Any], key: str, kind: AlgorithmType) -> Any:
    value = cfg.get(key)
    return getattr(kind, key) if value is None else value


def _arguments(cfg: Mapping[str, Any], key: str, name: str, kind: AlgorithmType) -> dict[str, Any]:
    """The user's arguments over the defaults, which are those of the type's own function."""
    defaults = kind.args.get(key, {}) if name == getattr(kind, key) else {}
    if key == "sample_strategy":
        defaults = {**SAMPLE_STRATEGY_ARGS.get(name, {}), **defaults}
    return {**defaults, **(cfg.get(f"{key}_args") or {})}


def _mode(
    cfg: Mapping[str, Any], kind: AlgorithmType, of_loss: Optional[str], loss: PolicyLoss
) -> str:
    """The user's mode, else the type's, else the policy loss's own."""
    given = cfg.get("loss_agg_mode")
    if of_loss and given and of_loss != given:
        raise ValueError(
            f"loss_agg_mode is {given!r} and policy_loss_fn_args.loss_agg_mode {of_loss!r}; "
            "set one of them"
        )
    return check_mode(of_loss or given or kind.loss_agg_mode or loss.agg_mode)


def _check_path(key: str, name: str) -> None:
    if ":" not in name and "." not in name:
        raise ValueError(f"unknown {key} {name!r}{nearest(name, SAMPLE_STRATEGY.names())}")


def _check_correction(spec: AlgorithmSpec, loss_name: str) -> None:
    if spec.bypass_old_logprobs and spec.correction.reweights:
        raise ValueError(
            "rollout_correction cannot act with bypass_old_logprobs=true: the ratio against "
            "the sampler's log-probs already contains that weight; set one of them off"
        )
    if (
        spec.correction.active
        and spec.schema == "experience"
        and not spec.policy_loss.takes_weights
    ):
        raise ValueError(
            f"rollout_correction cannot act on policy_loss_fn {loss_name!r}, which takes no "
            "weights; set rollout_correction.mode=none, sequence_filter=none and dppo_delta=null"
        )


def _check_penalty(spec: AlgorithmSpec, names: Mapping[str, str]) -> None:
    if spec.kl_penalty is not None and not spec.advantage_in_trainer:
        raise ValueError(
            f"kl_penalty_fn {names['kl_penalty_fn']!r} changes rewards in the trainer, but "
            f"advantage_fn {names['advantage_fn']!r} has used them before; take kl_loss_fn, or an "
            "advantage_fn of the trainer (as reinforceplusplus or rloo)"
        )


def _check_pairs(spec: AlgorithmSpec, loss_name: str) -> None:
    if spec.policy_loss.of_pairs and spec.schema != "dpo":
        raise ValueError(
            f"policy_loss_fn {loss_name!r} compares preference pairs, and the rows of "
            f"algorithm_type {spec.algorithm_type!r} are none ({spec.schema}); set "
            "algorithm_type=dpo, or another policy_loss_fn"
        )

"""The table of algorithms: what each type is made of, and how a config overrides it.

Invariant: a ``None`` in the config takes the type's default, and ``*_args`` are *merged*
over the default arguments; an argument the function does not have is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from trinity_dask.algorithm.advantages import ADVANTAGES, AdvantageFn
from trinity_dask.algorithm.aggregate import TOKEN_MEAN, check_mode
from trinity_dask.algorithm.entropy import EntropyLoss
from trinity_dask.algorithm.kl import KLLoss
from trinity_dask.algorithm.policy_losses import POLICY_LOSSES, PolicyLoss
from trinity_dask.algorithm.registry import Registry, build
from trinity_dask.algorithm.rollout_correction import RolloutCorrection


@dataclass(frozen=True)
class AlgorithmType:
    """Defaults of one algorithm type. ``schema`` is what a training row is."""

    schema: str  # experience | sft
    repeat_times: int
    policy_loss_fn: str
    advantage_fn: str = "none"
    kl_loss_fn: str = "none"
    entropy_loss_fn: str = "none"
    loss_agg_mode: str = TOKEN_MEAN
    args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


ALGORITHM: Registry[AlgorithmType] = Registry("algorithm_type")
ALGORITHM.register_module("sft")(AlgorithmType("sft", repeat_times=1, policy_loss_fn="sft"))
ALGORITHM.register_module("grpo")(
    AlgorithmType(
        "experience",
        repeat_times=2,
        policy_loss_fn="ppo",
        advantage_fn="grpo",
        kl_loss_fn="k2",
        entropy_loss_fn="default",
        args={"policy_loss_fn": {"clip_range": 0.2}, "kl_loss_fn": {"kl_coef": 0.001}},
    )
)


@dataclass(frozen=True)
class AlgorithmSpec:
    """An algorithm ready to use; ``resolved`` are its plain values, for the log."""

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

    @property
    def uses_old_logprobs(self) -> bool:
        return self.policy_loss.uses_old_logprob

    @property
    def uses_reference(self) -> bool:
        return self.kl_loss.active


def resolve_algorithm(cfg: Mapping[str, Any]) -> AlgorithmSpec:
    """The algorithm that plain config values describe.

    Args:
        cfg: ``algorithm_type`` and any of ``repeat_times``, ``advantage_fn(_args)``,
            ``policy_loss_fn(_args)``, ``kl_loss_fn(_args)``, ``entropy_loss_fn(_args)``,
            ``loss_agg_mode``, ``bypass_old_logprobs``, ``rollout_correction`` {mode, cap}.

    Raises:
        ValueError: an unknown name, argument or impossible value; names the nearest.
    """
    kind = ALGORITHM.get(cfg["algorithm_type"])
    names = {key: _default(cfg, key, kind) for key in _FUNCTIONS}
    args = {key: {**kind.args.get(key, {}), **(cfg.get(f"{key}_args") or {})} for key in names}
    bypass = bool(cfg.get("bypass_old_logprobs", False))
    correction = RolloutCorrection(**(cfg.get("rollout_correction") or {}))
    _check_single_correction(bypass, correction)
    mode = check_mode(_default(cfg, "loss_agg_mode", kind))
    repeat_times = int(_default(cfg, "repeat_times", kind))
    return AlgorithmSpec(
        algorithm_type=cfg["algorithm_type"],
        schema=kind.schema,
        repeat_times=repeat_times,
        advantage_fn=_advantage(names["advantage_fn"], args["advantage_fn"]),
        policy_loss=_named(POLICY_LOSSES, names, args, "policy_loss_fn"),
        kl_loss=_term(KLLoss, names, args, "kl_loss_fn"),
        entropy_loss=_term(EntropyLoss, names, args, "entropy_loss_fn"),
        loss_agg_mode=mode,
        bypass_old_logprobs=bypass,
        correction=correction,
        resolved={**names, **{f"{k}_args": v for k, v in args.items()}, "loss_agg_mode": mode},
    )


_FUNCTIONS = ("advantage_fn", "policy_loss_fn", "kl_loss_fn", "entropy_loss_fn")


def _default(cfg: Mapping[str, Any], key: str, kind: AlgorithmType) -> Any:
    value = cfg.get(key)
    return getattr(kind, key) if value is None else value


def _advantage(name: str, args: dict[str, Any]) -> Optional[AdvantageFn]:
    if name == "none":
        return None
    return build(f"advantage_fn {name!r}", ADVANTAGES.get(name), args)


def _named(registry: Registry, names: dict[str, str], args: dict[str, dict], key: str) -> Any:
    return build(f"{key} {names[key]!r}", registry.get(names[key]), args[key])


def _term(cls: type, names: dict[str, str], args: dict[str, dict], key: str) -> Any:
    return build(f"{key} {names[key]!r}", cls, {"name": names[key], **args[key]})


def _check_single_correction(bypass: bool, correction: RolloutCorrection) -> None:
    if bypass and correction.active:
        raise ValueError(
            "rollout_correction cannot act with bypass_old_logprobs=true: the ratio against "
            "the sampler's log-probs already contains that weight; set one of them off"
        )

"""The algorithm types: what each is made of, before any config.

Invariant: a type is data. What follows from its parts (critic, reference, teacher, where
the advantage is computed) is not written here but derived from them in :mod:`.table`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from trinity_dask.registry import Registry

Args = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class AlgorithmType:
    """Defaults of one algorithm type.

    ``schema`` is what a training row is: experience | sft | cpt | dpo. ``args`` are the
    arguments of the functions, by config key. ``loss_agg_mode`` None: the policy loss's own.
    ``about`` and ``paper`` (arXiv ids) are for the docs.
    """

    about: str
    paper: str = ""
    schema: str = "experience"
    repeat_times: int = 2
    advantage_fn: str = "none"
    policy_loss_fn: str = "ppo"
    kl_penalty_fn: str = "none"
    kl_loss_fn: str = "none"
    entropy_loss_fn: str = "none"
    sample_strategy: str = "default"
    loss_agg_mode: Optional[str] = None
    args: Args = field(default_factory=dict)


ALGORITHM: Registry[AlgorithmType] = Registry("algorithm_type")

_KL = {"kl_loss_fn": {"kl_coef": 0.001}}
_CLIP = {"policy_loss_fn": {"clip_range": 0.2}}


def _register(name: str, about: str, **parts: Any) -> None:
    ALGORITHM.register_module(name)(AlgorithmType(about=about, **parts))


def _rl(name: str, about: str, paper: str, advantage: str, loss: str = "ppo", **parts: Any) -> None:
    """A type with a k2 term (0.001) against the reference and the entropy as a metric."""
    defaults = {"kl_loss_fn": "k2", "entropy_loss_fn": "default"}
    args = {**(_KL if parts.get("kl_loss_fn", "k2") == "k2" else {}), **parts.pop("args", {})}
    parts = {"advantage_fn": advantage, "policy_loss_fn": loss, **defaults, **parts}
    _register(name, about, paper=paper, args=args, **parts)


# demonstrations ------------------------------------------------------------------------
_register(
    "sft", "maximum likelihood of answers", schema="sft", repeat_times=1, policy_loss_fn="sft"
)
_register(
    "cpt", "maximum likelihood of whole texts", schema="cpt", repeat_times=1, policy_loss_fn="sft"
)
_rl(
    "dpo",
    "preference pairs, no rollouts",
    "2305.18290",
    "none",
    "dpo",
    schema="dpo",
    repeat_times=2,
)
_register(
    "raft",
    "likelihood of the best answer of each group",
    paper="2304.06767",
    repeat_times=8,
    advantage_fn="raft",
    policy_loss_fn="sft",
)

# a group of answers to one task -----------------------------------------------------------
_rl("grpo", "advantage within the group", "2402.03300", "grpo", args=_CLIP)
_rl("grpo_verl", "grpo, computed in the trainer", "2402.03300", "grpo_verl", args=_CLIP)
_rl(
    "dr_grpo",
    "grpo without the two divisions that bias it",
    "2503.20783",
    "grpo",
    loss_agg_mode="dr-grpo",
    kl_loss_fn="none",
    args={**_CLIP, "advantage_fn": {"std_cal_level": "none"}},
)
_rl(
    "dapo",
    "clip-higher, dynamic sampling, token mean",
    "2503.14476",
    "grpo",
    repeat_times=16,
    kl_loss_fn="none",
    args={"policy_loss_fn": {"clip_range_low": 0.2, "clip_range_high": 0.28}},
)
_rl("rloo", "leave-one-out baseline", "2402.14740", "rloo", args=_CLIP)
_rl("reinforceplusplus", "whitened token returns", "2501.03262", "reinforceplusplus", args=_CLIP)
_rl(
    "reinforceplusplus_baseline",
    "minus the group's mean, whitened over the batch",
    "2501.03262",
    "reinforceplusplus_baseline",
    args=_CLIP,
)
_rl("remax", "minus the reward of the greedy answer", "2310.10505", "remax", args=_CLIP)
_rl("opmd", "policy mirror descent off policy", "2505.17826", "opmd", "opmd")
_register(
    "asymre",
    "REINFORCE off policy, baseline below the mean",
    paper="2506.20520",
    advantage_fn="asymre",
    policy_loss_fn="opmd",
)
_rl("topr", "tapered importance weights", "2503.14286", "reinforce", "topr")
_rl("cispo", "clipped weight, every token keeps its gradient", "2506.13585", "grpo", "cispo")
_rl("gspo", "ratio of the whole sequence", "2507.18071", "grpo", "gspo")
_rl("sapo", "soft gate in place of the clip", "2511.20347", "grpo", "sapo")
_register(
    "sppo",
    "log-ratio where the ratio is near 1",
    paper="2108.05828",
    advantage_fn="opmd",
    policy_loss_fn="sppo",
)
_rl("rec", "REINFORCE with clipping", "2509.24203", "rec", "rec")
_rl("clipb", "grpo, entropy guarded by batch statistics", "2602.03392", "clipb", args=_CLIP)
_rl("clipv", "grpo, entropy guarded by vocabulary statistics", "2602.03392", "clipv", args=_CLIP)

# a critic ---------------------------------------------------------------------------------
_rl("ppo", "GAE with a critic", "1707.06347", "ppo", repeat_times=1, args=_CLIP)

# several steps in a run -------------------------------------------------------------------
_rl(
    "multi_step_grpo",
    "the run's advantage on each of its steps",
    "2402.03300",
    "step_wise_grpo",
    repeat_times=8,
    args=_CLIP,
)
_rl(
    "gigpo",
    "episode advantage plus that among equal states",
    "2505.10978",
    "gigpo",
    repeat_times=8,
    args={
        "advantage_fn": {"omega": 1.0, "gamma": 1.0, "fnorm": "none", "epsilon": 1e-6},
        "policy_loss_fn": {"clip_range_low": 0.2, "clip_range_high": 0.2},
    },
)

# rollouts and demonstrations in one batch ---------------------------------------------------
_MIXED = {"repeat_times": 8, "entropy_loss_fn": "mix", "sample_strategy": "mix"}
_rl("mix", "grpo plus likelihood of demonstrations", "2505.17826", "grpo", "mix", **_MIXED)
_rl("mix_chord", "mix with a scheduled weight and φ", "2508.11408", "grpo", "mix_chord", **_MIXED)

# a teacher ----------------------------------------------------------------------------------
_register(
    "on_policy_distill",
    "reverse KL to a teacher on own samples",
    paper="2306.13649",
    repeat_times=8,
    advantage_fn="on_policy_distill",
    args={"advantage_fn": {"kl_coef": 1.0}, **_CLIP},
)
_register(
    "jsd",
    "generalised Jensen-Shannon divergence to a teacher",
    paper="2306.13649",
    repeat_times=8,
    advantage_fn="jsd",
    args={"advantage_fn": {"kl_coef": 1.0, "lambda_coef": 0.5}, **_CLIP},
)

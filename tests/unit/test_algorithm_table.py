"""The table: defaults, merges, refusals, and a user's own functions."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from trinity_dask.algorithm import ALGORITHM, Registry, resolve_algorithm
from trinity_dask.algorithm.policy_losses import PPOLoss, SFTLoss
from trinity_dask.config.schema import AlgorithmConfig


def test_grpo_defaults_take_effect():
    spec = resolve_algorithm({"algorithm_type": "grpo"})
    assert spec.repeat_times == 2
    assert isinstance(spec.policy_loss, PPOLoss)
    assert (spec.policy_loss.low, spec.policy_loss.high, spec.policy_loss.dual) == (0.2, 0.2, 3.0)
    assert spec.kl_loss.name == "k2"
    assert spec.kl_loss.coef == 0.001
    assert spec.uses_reference
    assert spec.advantage_fn is not None
    assert spec.loss_agg_mode == "token-mean"


def test_sft_needs_neither_old_logprobs_nor_a_reference():
    spec = resolve_algorithm(asdict(AlgorithmConfig(algorithm_type="sft")))
    assert isinstance(spec.policy_loss, SFTLoss)
    assert spec.schema == "sft"
    assert not spec.uses_old_logprobs
    assert not spec.uses_reference
    assert spec.advantage_fn is None


def test_arguments_merge_over_the_defaults():
    spec = resolve_algorithm(
        {
            "algorithm_type": "grpo",
            "policy_loss_fn_args": {"clip_range_high": 0.28},
            "advantage_fn_args": {"epsilon": 1e-4},
            "kl_loss_fn": "none",
        }
    )
    assert (spec.policy_loss.low, spec.policy_loss.high) == (0.2, 0.28)
    assert spec.advantage_fn.epsilon == 1e-4
    assert not spec.uses_reference
    assert spec.resolved["policy_loss_fn_args"] == {"clip_range": 0.2, "clip_range_high": 0.28}


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"algorithm_type": "grop"}, "did you mean 'grpo'"),
        ({"policy_loss_fn_args": {"clip_rnge": 0.1}}, "did you mean 'clip_range'"),
        ({"advantage_fn_args": {"eps": 1e-4}}, "did you mean 'epsilon'"),
        ({"advantage_fn": "grpoo"}, "did you mean 'grpo'"),
        ({"kl_loss_fn": "k4"}, "kl_loss_fn"),
        ({"kl_loss_fn_args": {"coef": 1}}, "did you mean 'kl_coef'"),
        ({"entropy_loss_fn": "defualt"}, "did you mean 'default'"),
        ({"loss_agg_mode": "token_mean"}, "did you mean 'token-mean'"),
        ({"rollout_correction": {"mode": "token-tis"}}, "did you mean 'token_tis'"),
        ({"rollout_correction": {"mode": "token_tis", "cap": 0}}, "cap must be > 0"),
        ({"policy_loss_fn": "no.such.module:thing"}, "no.such"),
    ],
)
def test_fault_40_mistakes_are_refused_with_the_nearest_name(cfg, message):
    with pytest.raises(ValueError, match=message):
        resolve_algorithm({"algorithm_type": "grpo", **cfg})


def test_the_sampler_weight_is_not_counted_twice():
    with pytest.raises(ValueError, match="bypass_old_logprobs"):
        resolve_algorithm(
            {
                "algorithm_type": "grpo",
                "bypass_old_logprobs": True,
                "rollout_correction": {"mode": "token_tis"},
            }
        )


class HalfLoss(SFTLoss):
    """A user's own loss."""

    def __call__(self, **inputs):
        loss, metrics = super().__call__(**inputs)
        return loss / 2, metrics


def test_a_users_own_loss_loads_by_path():
    for path in (f"{__name__}:HalfLoss", f"{__name__}.HalfLoss"):
        spec = resolve_algorithm({"algorithm_type": "sft", "policy_loss_fn": path})
        assert isinstance(spec.policy_loss, SFTLoss)
        assert type(spec.policy_loss).__name__ == "HalfLoss"


def test_a_name_belongs_to_one_object():
    registry: Registry[int] = Registry("number")
    registry.register_module("one")(1)
    registry.register_module("one")(1)
    with pytest.raises(ValueError, match="already registered"):
        registry.register_module("one")(2)
    assert registry.names() == ["one"]


def test_every_type_resolves():
    for name in ALGORITHM.names():
        spec = resolve_algorithm({"algorithm_type": name})
        assert spec.algorithm_type == name
        assert isinstance(spec.resolved, dict)
    assert torch.is_grad_enabled()

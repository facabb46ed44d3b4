"""The table: defaults, merges, refusals, and a user's own functions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from trinity_dask.algorithm import (
    ALGORITHM,
    POLICY_LOSS_FN,
    SAMPLE_STRATEGY,
    resolve_algorithm,
)
from trinity_dask.algorithm.aggregate import ALL_MODES, Denominator
from trinity_dask.algorithm.policy_losses import PolicyLoss, PPOLoss, SFTLoss
from trinity_dask.algorithm.rollout_correction import (
    CORRECTION_MODES,
    FILTERS,
    RolloutCorrection,
)
from trinity_dask.config import algorithms
from trinity_dask.config.compose import resolve_config
from trinity_dask.config.fields import choices_of
from trinity_dask.config.schema import AlgorithmConfig, Config, RolloutCorrectionConfig
from trinity_dask.registry import Registry, load_object

ROOT = Path(__file__).parents[2]


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


# what the documented table says: critic, reference, in the trainer, schema, repeat, functions
DOCUMENTED = """
sft   F F F sft 1 none sft none none default
cpt   F F F cpt 1 none sft none none default
dpo   F T F dpo 2 none dpo k2 default default
ppo   T T T experience 1 ppo ppo k2 default default
grpo  F T F experience 2 grpo ppo k2 default default
grpo_verl F T T experience 2 grpo_verl ppo k2 default default
dapo  F F F experience 16 grpo ppo none default default
reinforceplusplus F T T experience 2 reinforceplusplus ppo k2 default default
rloo  F T T experience 2 rloo ppo k2 default default
opmd  F T F experience 2 opmd opmd k2 default default
asymre F F F experience 2 asymre opmd none none default
topr  F T F experience 2 reinforce topr k2 default default
cispo F T F experience 2 grpo cispo k2 default default
gspo  F T F experience 2 grpo gspo k2 default default
sapo  F T F experience 2 grpo sapo k2 default default
sppo  F F F experience 2 opmd sppo none none default
rec   F T F experience 2 rec rec k2 default default
raft  F F F experience 8 raft sft none none default
mix   F T F experience 8 grpo mix k2 mix mix
mix_chord F T F experience 8 grpo mix_chord k2 mix mix
multi_step_grpo F T F experience 8 step_wise_grpo ppo k2 default default
gigpo F T F experience 8 gigpo ppo k2 default default
on_policy_distill F F T experience 8 on_policy_distill ppo none none default
jsd   F F T experience 8 jsd ppo none none default
"""


@pytest.mark.parametrize("line", DOCUMENTED.strip().splitlines(), ids=lambda s: s.split()[0])
def test_the_types_are_the_documented_ones(line):
    name, *rest = line.split()
    spec = resolve_algorithm({"algorithm_type": name})
    found = [
        "FT"[spec.uses_critic],
        "FT"[spec.uses_reference],
        "FT"[spec.advantage_in_trainer],
        spec.schema,
        str(spec.repeat_times),
        *(
            spec.resolved[key]
            for key in (
                "advantage_fn",
                "policy_loss_fn",
                "kl_loss_fn",
                "entropy_loss_fn",
                "sample_strategy",
            )
        ),
    ]
    assert found == rest


def test_what_is_needed_follows_from_the_functions():
    def spec(**cfg):
        return resolve_algorithm({"algorithm_type": "grpo", **cfg})

    assert not spec(kl_loss_fn="none").uses_reference
    assert spec(advantage_fn="ppo").uses_critic
    assert spec(advantage_fn="ppo").advantage_in_trainer
    assert not spec().advantage_in_trainer
    assert spec().advantage_fn is not None
    assert spec(advantage_fn="remax").needs_greedy_baseline
    assert spec(advantage_fn="jsd").uses_teacher
    assert spec(policy_loss_fn="jsd").uses_teacher
    assert spec(algorithm_type="dpo", kl_loss_fn="none").uses_reference
    assert spec(rollout_correction={"dppo_delta": 0.2}).needs >= {"advantages"}
    assert spec(entropy_loss_fn="mix").needs >= {"expert_mask"}
    penalised = spec(advantage_fn="rloo", kl_loss_fn="none", kl_penalty_fn="k1")
    assert penalised.uses_reference
    assert penalised.kl_penalty is not None
    assert resolve_algorithm({"algorithm_type": "dpo"}).rows_per_unit == 2
    assert spec(advantage_fn="clipv").advantage_needs == {"old_logprobs", "entropys", "necs"}


def test_the_mode_is_the_users_then_the_types_then_the_losss():
    def mode(**cfg):
        return resolve_algorithm({"algorithm_type": "grpo", **cfg}).loss_agg_mode

    assert mode() == "token-mean"
    assert mode(policy_loss_fn="gspo") == "seq-mean-token-mean"
    assert mode(algorithm_type="gspo") == "seq-mean-token-mean"
    assert mode(algorithm_type="gspo", loss_agg_mode="token-mean") == "token-mean"
    assert mode(policy_loss_fn_args={"loss_agg_mode": "dr-grpo"}) == "dr-grpo"
    assert mode(algorithm_type="dr_grpo") == "dr-grpo"
    one_side = {"clip_mode": "gspo-one-side"}
    assert mode(algorithm_type="rec", policy_loss_fn_args=one_side) == "seq-mean-token-mean"
    with pytest.raises(ValueError, match="set one of them"):
        mode(loss_agg_mode="token-mean", policy_loss_fn_args={"loss_agg_mode": "dr-grpo"})


def test_arguments_of_another_function_do_not_stay():
    """A type's defaults belong to its own function."""
    spec = resolve_algorithm({"algorithm_type": "gigpo", "advantage_fn": "grpo"})
    assert spec.resolved["advantage_fn_args"] == {}
    mixed = resolve_algorithm(
        {"algorithm_type": "mix", "sample_strategy_args": {"expert_data_ratio": 0.2}}
    )
    assert mixed.sample_strategy_args == {
        "expert_data_ratio": 0.2,
        "sft_dataset_name": "sft_dataset",
    }


def test_a_correction_that_cannot_act_is_refused():
    with pytest.raises(ValueError, match="takes no weights"):
        resolve_algorithm({"algorithm_type": "opmd", "rollout_correction": {"mode": "token_tis"}})
    with pytest.raises(ValueError, match="used them before"):
        resolve_algorithm({"algorithm_type": "grpo", "kl_penalty_fn": "k1"})
    filtered = {"sequence_filter": "geometric"}
    spec = resolve_algorithm(
        {"algorithm_type": "grpo", "bypass_old_logprobs": True, "rollout_correction": filtered}
    )
    assert spec.correction.active


@pytest.mark.parametrize(
    ("key", "name", "typo"),
    [("policy_loss_fn", name, "loss_agg_mod") for name in POLICY_LOSS_FN.names() if name != "dpo"]
    + [("policy_loss_fn", "dpo", "bta"), ("entropy_loss_fn", "mix", "entropy_cof")]
    + [("kl_penalty_fn", "k1", "target_k"), ("advantage_fn", "ppo", "gama")]
    + [("advantage_fn", "gigpo", "omga"), ("advantage_fn", "clipv", "max_frc")],
)
def test_fault_40_a_misspelt_argument_of_any_function_is_refused(key, name, typo):
    with pytest.raises(ValueError, match=f"unknown argument '{typo}'.*did you mean"):
        resolve_algorithm({"algorithm_type": "grpo", key: name, f"{key}_args": {typo: 1}})


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"policy_loss_fn_args": {"clip_range": None}}, "clip_range=null of .*'ppo' must be a num"),
        ({"policy_loss_fn_args": {"clip_range": "big"}}, "clip_range='big' of"),
        ({"policy_loss_fn_args": {"clip_range_low": "a"}}, "must be a number or null"),
        ({"policy_loss_fn_args": {"clip_range_high": float("nan")}}, "clip_range_high=nan"),
        ({"policy_loss_fn": "jsd", "policy_loss_fn_args": {"chunk_size": 1.5}}, "a whole number"),
        ({"advantage_fn_args": {"epsilon": None}}, "epsilon=null of advantage_fn 'grpo'"),
        ({"kl_loss_fn_args": {"kl_coef": None}}, "kl_coef=null of kl_loss_fn 'k2'"),
        ({"entropy_loss_fn_args": {"entropy_coef": True}}, "entropy_coef=True"),
        ({"policy_loss_fn": "dpo"}, "'dpo' compares preference pairs.*algorithm_type=dpo"),
    ],
)
def test_fault_40_a_value_that_no_function_can_take_is_refused(cfg, message):
    with pytest.raises(ValueError, match=message):
        resolve_algorithm({"algorithm_type": "grpo", **cfg})


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("staleness_control", {"max_stalenes": 1}, "did you mean 'max_staleness'"),
        ("staleness_control", {"max_staleness": -1}, "must be >= 0"),
        ("staleness_control", {"max_staleness": "old"}, "a number or null"),
        ("mix", {"expert_data_ratio": 1.5}, "between 0 and 1"),
        ("mix", {"cfg": 1}, "unknown argument 'cfg'"),
        ("default", {"expert_data_ratio": 0.5}, "allowed: whole_groups"),
    ],
)
def test_fault_40_arguments_of_a_sample_strategy_are_checked(name, args, message):
    cfg = {"algorithm_type": "grpo", "sample_strategy": name, "sample_strategy_args": args}
    with pytest.raises(ValueError, match=message):
        resolve_algorithm(cfg)


def half(logprob, action_mask, advantages, scale=0.5):
    """A user's loss that is a plain function."""
    return -scale * (logprob * advantages * action_mask).sum(), {}


def flat_advantage(batch, level=1.0):
    """A user's in-trainer advantage that is a plain function."""
    batch["advantages"] = batch["returns"] = level * batch["action_mask"]
    return batch, {}


def doubled(experiences):
    """A user's grouped advantage that is a plain function."""
    return experiences, {}


def test_plain_functions_by_path():
    spec = resolve_algorithm(
        {
            "algorithm_type": "grpo",
            "policy_loss_fn": f"{__name__}:half",
            "policy_loss_fn_args": {"scale": 2.0},
            "advantage_fn": f"{__name__}:flat_advantage",
            "advantage_fn_args": {"level": 3.0},
        }
    )
    assert spec.policy_loss.needs == {"advantages"}
    assert spec.advantage_in_trainer
    one = torch.ones(1, 1)
    loss, _ = spec.policy_loss(
        logprob=one, action_mask=one > 0, advantages=one, old_logprob=one, step=3
    )
    assert loss == -2.0
    assert spec.advantage_fn({"action_mask": one > 0})[0]["advantages"] == 3.0
    grouped = resolve_algorithm({"algorithm_type": "grpo", "advantage_fn": f"{__name__}:doubled"})
    assert not grouped.advantage_in_trainer
    with pytest.raises(ValueError, match="advantages"):
        spec.policy_loss(logprob=one, action_mask=one > 0)


def masked_mean(logprob, old_logprob, action_mask, advantages):
    """A user's loss that knows nothing of the mini-batch."""
    losses = -advantages * torch.exp(logprob - old_logprob)
    loss = (losses * action_mask).sum() / action_mask.sum()
    return loss, {"mine": loss.detach(), "one": 1.0}


class MeanLoss(PolicyLoss):
    """The same as a class that forgot its denominator."""

    def __call__(self, *, logprob, old_logprob, action_mask, advantages, **_):
        return masked_mean(logprob, old_logprob, action_mask, advantages)


@pytest.mark.parametrize("name", ["masked_mean", "MeanLoss"])
def test_fault_31_a_loss_without_a_denominator_is_a_mean_over_the_mini_batch(name):
    loss_fn = resolve_algorithm(
        {"algorithm_type": "grpo", "policy_loss_fn": f"{__name__}:{name}"}
    ).policy_loss
    generator = torch.Generator().manual_seed(0)
    logprob, old, advantages = torch.randn(3, 6, 5, generator=generator)
    logprob.requires_grad_()
    mask = torch.rand(6, 5, generator=generator) > 0.4
    mask[4:] = False  # the last part has no token at all

    def part(rows):
        return loss_fn(
            logprob=logprob[rows],
            old_logprob=old[rows],
            action_mask=mask[rows],
            advantages=advantages[rows],
            denominator=Denominator.count(mask),
        )

    expected, _ = masked_mean(logprob, old, mask, advantages)
    parts = [part(rows) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    total = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(total, expected)
    (got,) = torch.autograd.grad(total, logprob, retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(expected, logprob)[0])
    assert sum(float(m["mine"]) for _, m in parts) == pytest.approx(float(expected.detach()))
    assert sum(float(m["one"]) for _, m in parts) == pytest.approx(1.0)


def test_a_function_in_a_file_is_loaded_once_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "mylib.py").write_text(
        "RUNS = []\n"
        "def fn(logprob, action_mask, scale=1.0):\n"
        "    return scale * (logprob * action_mask).sum(), {}\n"
        "def adv(experiences):\n"
        "    return experiences, {}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = Config()
    config.algorithm.policy_loss_fn = "mylib.py:fn"
    config.algorithm.advantage_fn = "./mylib.py:adv"
    config.algorithm.policy_loss_fn_args = {"scale": 3.0}
    algorithm = asdict(resolve_config(config).algorithm)
    assert algorithm["policy_loss_fn"] == f"{tmp_path}/mylib.py:fn"
    monkeypatch.chdir("/")  # a worker is elsewhere
    spec = resolve_algorithm(algorithm)
    one = torch.ones(1, 1)
    assert spec.policy_loss(logprob=one, action_mask=one > 0)[0] == 3.0
    again = POLICY_LOSS_FN.get(f"{tmp_path}/mylib.py:fn")
    assert again is POLICY_LOSS_FN.get(algorithm["policy_loss_fn"])
    assert load_object(algorithm["policy_loss_fn"]).__name__ == "fn"
    for path, message in (("mylib.py:f", "has no attribute 'f'"), ("no.py:f", "there is no file")):
        with pytest.raises(ValueError, match=message):
            POLICY_LOSS_FN.get(f"{tmp_path}/{path}")


def test_sample_strategies_load_from_the_buffer():
    assert SAMPLE_STRATEGY.get("mix").__name__ == "MixSampleStrategy"
    assert SAMPLE_STRATEGY.get("warmup") is SAMPLE_STRATEGY.get("default")
    with pytest.raises(ValueError, match="did you mean 'staleness_control'"):
        resolve_algorithm({"algorithm_type": "grpo", "sample_strategy": "stalenes_control"})


def test_the_configuration_knows_the_same_types():
    assert ALGORITHM.names() == list(algorithms.ALGORITHM_TYPES)
    specs = {name: resolve_algorithm({"algorithm_type": name}) for name in ALGORITHM.names()}
    assert {n: s.repeat_times for n, s in specs.items()} == algorithms.REPEAT_TIMES
    offline = {n for n, s in specs.items() if s.schema != "experience"}
    assert offline == set(algorithms.OFFLINE_TYPES)
    modes = choices_of(AlgorithmConfig, "loss_agg_mode")
    assert set(modes) == set(ALL_MODES)
    assert set(choices_of(RolloutCorrectionConfig, "mode")) == set(CORRECTION_MODES)
    assert set(choices_of(RolloutCorrectionConfig, "sequence_filter")) == set(FILTERS)
    ours, theirs = asdict(RolloutCorrection()), asdict(RolloutCorrectionConfig())
    assert ours == theirs


@pytest.mark.parametrize("name", ALGORITHM.names())
def test_every_type_has_a_preset(name):
    preset = yaml.safe_load((ROOT / "conf" / "algorithm" / f"{name}.yaml").read_text())
    assert preset.get("algorithm", preset)["algorithm_type"] == name

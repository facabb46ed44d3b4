"""A job of stages as one configuration per stage."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_dask.config import Config, ConfigError, resolve, split_stages, validate


def job(*stages: dict[str, Any]) -> Config:
    config = Config(name="job", checkpoint_root_dir="/tmp/root")
    config.model.model_path = "m"
    config.model.max_model_len = 32
    config.algorithm.repeat_times = 8
    config.algorithm.advantage_fn_args = {"epsilon": 1e-4}
    config.algorithm.optimizer.lr = 0.5
    config.buffer.explorer_input.taskset.path = "tasks.jsonl"
    config.stages = list(stages)
    return config


def test_a_stage_is_the_base_with_its_keys_merged_over_it():
    first, second = split_stages(
        job(
            {"stage_name": "a", "trainer": {"mini_batches": 4}, "model": {"temperature": 0.5}},
            {"stage_name": "b", "algorithm": {"advantage_fn_args": {"std_threshold": 0.1}}},
        )
    )
    assert (first.trainer.mini_batches, first.trainer.grad_clip) == (4, 1.0)
    assert first.buffer.explorer_input.taskset.rollout_args.temperature == 0.5
    assert second.trainer.mini_batches == 1
    assert second.algorithm.advantage_fn_args == {"epsilon": 1e-4, "std_threshold": 0.1}
    assert second.algorithm.optimizer.lr == 0.5
    assert [stage.job_dir for stage in (first, second)] == [
        "/tmp/root/trinity-dask/job/a",
        "/tmp/root/trinity-dask/job/b",
    ]
    assert [stage.stages for stage in (first, second)] == [[], []]


def test_derived_values_are_those_of_the_stage():
    slow, default = split_stages(
        job({"stage_name": "slow", "explorer": {"max_timeout_s": 3600.0}}, {"stage_name": "b"})
    )
    assert slow.explorer.batch_timeout_s == 3 * 3600 + 60
    assert default.explorer.batch_timeout_s == 3 * 1800 + 60
    assert slow.buffer.trainer_input.experience_buffer.path == f"{slow.job_dir}/buffer/experience"


def test_another_algorithm_does_not_inherit_functions_but_the_optimizer():
    (stage,) = split_stages(
        job({"stage_name": "a", "mode": "train", "algorithm": {"algorithm_type": "sft"}})
    )
    assert stage.algorithm.advantage_fn_args == {}
    assert stage.algorithm.repeat_times == 1
    assert stage.algorithm.optimizer.lr == 0.5


def test_lists_are_replaced():
    config = job({"stage_name": "a", "buffer": {"operators": [{"name": "reward_filter"}]}})
    config.buffer.operators = []
    (stage,) = split_stages(config)
    assert [operator.name for operator in stage.buffer.operators] == ["reward_filter"]
    assert stage.buffer.operators[0].args == {}


def test_a_stage_that_another_follows_exports_its_weights():
    never = {"trainer": {"save_hf_checkpoint": "never"}}
    first, last = split_stages(job({"stage_name": "a", **never}, {"stage_name": "b", **never}))
    assert (first.trainer.save_hf_checkpoint, last.trainer.save_hf_checkpoint) == ("last", "never")


def test_splitting_again_gives_the_same():
    config = resolve(job({"stage_name": "a"}, {"stage_name": "b"}))
    assert split_stages(config) == split_stages(resolve(config))
    assert [resolve(stage) for stage in split_stages(config)] == split_stages(config)


@pytest.mark.parametrize("name", [None, "", "a/b", "..", "-x", 3])
def test_a_stage_needs_a_name_that_can_be_a_directory(name):
    with pytest.raises(ConfigError, match="every stage needs a name"):
        validate(resolve(job({"stage_name": name})))


def test_a_name_is_given_once():
    with pytest.raises(ConfigError, match="already the name of an earlier stage"):
        validate(resolve(job({"stage_name": "a"}, {"stage_name": "a"})))


def test_a_wrong_type_in_a_stage_is_named_with_its_place():
    with pytest.raises(ConfigError) as caught:
        split_stages(job({"stage_name": "a"}, {"stage_name": "b", "seed": "x"}))
    assert str(caught.value) == "stages.1.seed=x: the value must be a whole number"


def test_a_problem_says_in_which_stage_it_is():
    with pytest.raises(ConfigError, match=r"^stage 'b': buffer.batch_size=0 is out of range"):
        validate(
            resolve(job({"stage_name": "a"}, {"stage_name": "b", "buffer": {"batch_size": 0}}))
        )

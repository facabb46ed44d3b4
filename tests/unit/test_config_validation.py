"""Values and combinations that cannot work, and what is derived."""

from __future__ import annotations

import json
import math
import re
import typing
from pathlib import Path

import pytest

from trinity_dask.config import Config, ConfigError, checks, resolve, split_stages, validate
from trinity_dask.config.fields import Range, all_keys, fields_of
from trinity_dask.config.schema import TasksetConfig

STORE = "buffer.trainer_input.experience_buffer"
TASKS = "buffer.explorer_input"


def grpo(**changes: object) -> Config:
    """A sound grpo configuration; ``a__b=value`` sets ``a.b``."""
    config = Config()
    config.model.model_path = "m"
    config.model.max_model_len = 32
    config.algorithm.repeat_times = 8
    config.buffer.explorer_input.taskset.path = "tasks.jsonl"
    config.buffer.explorer_input.taskset.reward_fn = "math_reward"
    return changed(config, changes)


def sft(**changes: object) -> Config:
    config = Config(mode="train")
    config.model.model_path = "m"
    config.algorithm.algorithm_type = "sft"
    config.buffer.train_batch_size = 8
    config.buffer.trainer_input.experience_buffer.storage_type = "file"
    config.buffer.trainer_input.experience_buffer.path = "rows.jsonl"
    return changed(config, changes)


def changed(config: Config, changes: dict[str, object]) -> Config:
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        node: typing.Any = config
        for name in parents:
            node = getattr(node, name)
        assert hasattr(node, leaf), key
        setattr(node, leaf, value)
    return config


def problems(config: Config) -> list[str]:
    try:
        validate(resolve(config))
    except ConfigError as error:
        return str(error).splitlines()
    return []


def test_the_sound_ones_are_sound():
    assert problems(grpo()) == []
    assert problems(sft()) == []
    assert problems(grpo(mode="explore")) == []


@pytest.mark.parametrize("key", ["trainer__grad_clip", "critic__grad_clip"])
def test_no_clipping_is_written_as_zero(key):
    assert problems(grpo(**{key: 0.0})) == []
    assert "must be >= 0" in problems(grpo(**{key: -1.0}))[0]


def test_every_number_has_a_range():
    sections = {type(Config())} | {k.section or k.item for _, k in all_keys(Config)} - {None}
    for section in sections:
        for name, kind in fields_of(section).items():
            text = str(kind.annotation)
            holds_value = kind.section is None and kind.item is None and not kind.is_open
            is_number = holds_value and ("int" in text or "float" in text) and "dict" not in text
            assert is_number == (kind.range is not None), f"{section.__name__}.{name}"


@pytest.mark.parametrize(
    ("limit", "inside", "outside"),
    [
        (Range(ge=1), [1, 10**12], [0, -1]),
        (Range(gt=0, le=1), [1e-9, 1], [0, 1.01, math.nan, math.inf]),
        (Range(ge=1, also=-1), [1, -1], [0, -2]),
        (Range(ge=0, lt=1), [0, 0.99], [1, -0.1]),
    ],
)
def test_a_range_is_what_it_says(limit, inside, outside):
    assert all(map(limit.contains, inside))
    assert not any(map(limit.contains, outside))


def test_a_range_is_written_as_a_reader_would():
    assert str(Range(gt=0, le=1)) == "> 0 and <= 1"
    assert str(Range(ge=1, also=-1)) == ">= 1, or -1"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("buffer__batch_size", 0, "buffer.batch_size=0 is out of range: it must be >= 1"),
        ("model__temperature", -0.1, "model.temperature=-0.1 is out of range"),
        ("model__top_k", 0, ">= 1, or -1"),
        ("algorithm__optimizer__betas", [0.9, 1.0], "algorithm.optimizer.betas=[0.9, 1.0]"),
        ("algorithm__optimizer__lr", math.nan, "algorithm.optimizer.lr=nan"),
        ("algorithm__algorithm_type", "grop", "did you mean 'grpo'?"),
        ("synchronizer__sync_style", "fully_synced", "did you mean 'fully_async'?"),
        ("cluster__scheduler_port", 70000, ">= 0 and <= 65535"),
        ("seed", -1, "seed=-1 is out of range"),
    ],
)
def test_a_value_out_of_its_range_or_choices_is_named_once(key, value, message):
    (line,) = problems(grpo(**{key: value}))
    assert message in line


def test_a_choice_may_be_written_in_any_case():
    config = resolve(grpo(mode="BOTH", algorithm__algorithm_type="GRPO"))
    assert (config.mode, config.algorithm.algorithm_type) == ("both", "grpo")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__model_path": ""}, "model.model_path is empty"),
        ({"algorithm__repeat_times": 1}, "set algorithm.repeat_times to 2 or more"),
        ({"mode": "train"}, None),
        ({"algorithm__algorithm_type": "sft"}, "set mode=train"),
        ({f"{STORE.replace('.', '__')}__storage_type": "file"}, "holds SFT rows"),
        ({f"{TASKS.replace('.', '__')}__taskset__path": ""}, "taskset.path is empty"),
        ({f"{TASKS.replace('.', '__')}__default_workflow": None}, "taskset.workflow is empty"),
        ({"explorer__rollout_model__tensor_parallel_size": 2}, "without GPUs an engine is one"),
        (
            {
                "explorer__rollout_model__tensor_parallel_size": 2,
                "explorer__rollout_model__engine_type": "torch",
            },
            "engine torch is one process",
        ),
        (
            {
                "explorer__rollout_model__tensor_parallel_size": 2,
                "cluster__rollout__gpus_per_worker": 1,
            },
            "gpus_per_worker=1 must equal",
        ),
        ({"cluster__rollout__n_workers": 0}, "needs at least one rollout worker"),
        ({"cluster__trainer__n_workers": 0}, "needs at least one trainer worker"),
        ({"cluster__control__n_workers": 2}, "exactly one control worker"),
        ({"cluster__type": "address"}, "cluster.address=tcp://host:8786"),
        ({"cluster__address": "tcp://a:1"}, "has no effect with cluster.type=local"),
        ({"cluster__rollout__memory_limit": "lots"}, "memory_limit='lots' is not a size"),
        ({"monitor__sinks": ["consle"]}, "did you mean 'console'?"),
        ({"monitor__sink_args": {"wandbb": {}}}, "did you mean 'wandb'?"),
        ({"name": "../x"}, "without '..'"),
        ({"name": " "}, "name is empty"),
        ({"checkpoint_root_dir": "s3://b/x"}, "must be a directory"),
        ({"prepare": "nothing"}, "is not a function"),
        ({"model__max_model_len": None}, "max_model_len is not set"),
        ({"model__max_prompt_tokens": 30, "model__max_response_tokens": 3}, "raise model.max"),
        ({"model__max_prompt_tokens": 32}, "model.max_response_tokens=0"),
        ({"model__min_response_tokens": 16}, "must be below model.max_response_tokens=16"),
        ({"explorer__batch_timeout_s": 1.0}, "is below explorer.max_timeout_s"),
        ({"buffer__train_batch_size": 2, "trainer__mini_batches": 4}, "is fewer than"),
        ({f"{STORE.replace('.', '__')}__path": "s3://"}, "s3://bucket/prefix"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_fix(changes, message):
    lines = problems(grpo(**changes))
    assert lines == [] if message is None else any(message in line for line in lines), lines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffer__train_batch_size": None}, "buffer.train_batch_size is not set"),
        ({f"{STORE.replace('.', '__')}__path": None}, "path is empty"),
        ({f"{STORE.replace('.', '__')}__storage_type": "store"}, "sft reads the rows of a file"),
        ({"mode": "both"}, "set mode=train"),
    ],
)
def test_sft_needs_rows(changes, message):
    assert any(message in line for line in problems(sft(**changes)))


def test_a_warm_up_that_outlasts_the_run_is_told_and_runs():
    config = grpo(trainer__total_steps=4, algorithm__optimizer__lr_warmup_steps=5)
    assert problems(config) == []
    (line,) = [w for w in checks.warnings(config) if "lr_warmup_steps" in w]
    assert "lr_warmup_steps=5 is more than the 4 steps" in line
    config.trainer.total_steps = 5
    assert not any("lr_warmup_steps" in w for w in checks.warnings(config))


def test_all_problems_are_told_at_once():
    assert len(problems(grpo(model__model_path="", algorithm__repeat_times=1))) == 2


def test_two_evaluations_cannot_have_one_name():
    config = grpo()
    config.buffer.explorer_input.eval_tasksets = [
        TasksetConfig(name="a", path="x"),
        TasksetConfig(name="a", path="y"),
    ]
    assert any("eval_tasksets.1.name='a' is taken" in line for line in problems(config))


def test_fault_20_sampler_and_trainer_have_one_temperature():
    config = grpo()
    config.buffer.explorer_input.taskset.rollout_args.temperature = 0.6
    assert any("set model.temperature only" in line for line in problems(config))
    assert problems(grpo(model__temperature=0.6)) == []
    assert any("is greedy" in line for line in problems(grpo(model__temperature=0.0)))


@pytest.mark.parametrize("setting", [{"model__top_p": 0.9}, {"model__top_k": 20}])
def test_fault_21_a_ratio_to_a_narrowed_sampler_is_refused_or_told(setting):
    ratio = {"algorithm__rollout_correction__mode": "token_tis"}
    assert any("importance ratio" in line for line in problems(grpo(**setting, **ratio)))
    bypass = {"algorithm__bypass_old_logprobs": True}
    assert any("importance ratio" in line for line in problems(grpo(**setting, **bypass)))
    warnings = validate(resolve(grpo(**setting)))
    assert any("narrower distribution" in line for line in warnings)
    assert validate(resolve(grpo())) == []


def test_fault_21_evaluation_may_narrow():
    config = grpo(algorithm__rollout_correction__mode="token_tis")
    taskset = TasksetConfig(path="x")
    taskset.rollout_args.top_p = 0.9
    config.buffer.explorer_input.eval_tasksets = [taskset]
    assert problems(config) == []


def test_the_sampler_is_corrected_for_once():
    config = grpo(
        algorithm__bypass_old_logprobs=True, algorithm__rollout_correction__mode="token_tis"
    )
    assert any("corrects twice" in line for line in problems(config))


def test_fault_41_no_length_is_assumed():
    assert any("cannot be derived" in line for line in problems(grpo(model__max_model_len=None)))


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        ((32, None, None), (32, 16, 16)),
        ((32, 20, None), (32, 20, 12)),
        ((32, None, 20), (32, 12, 20)),
        ((None, 20, 7), (27, 20, 7)),
        ((None, 20, None), (None, 20, None)),
        ((32, 10, 10), (32, 10, 10)),
    ],
)
def test_lengths_follow_from_each_other(given, derived):
    names = ("max_model_len", "max_prompt_tokens", "max_response_tokens")
    config = grpo(**{f"model__{name}": value for name, value in zip(names, given, strict=True)})
    model = resolve(config).model
    assert tuple(getattr(model, name) for name in names) == derived


def test_what_is_not_set_is_derived_and_what_is_set_stays():
    config = resolve(grpo(explorer__max_timeout_s=10.0, explorer__max_retry_times=1))
    assert config.explorer.batch_timeout_s == 80.0
    assert config.explorer.rollout_model.dtype == "float32"
    assert config.buffer.explorer_input.taskset.repeat_times == 8
    assert config.buffer.explorer_input.taskset.rollout_args.max_tokens == 16
    assert config.cluster.runner.nthreads == 1
    assert config.buffer.trainer_input.experience_buffer.path == (
        f"{config.job_dir}/buffer/experience"
    )
    assert resolve(grpo(explorer__batch_timeout_s=5000.0)).explorer.batch_timeout_s == 5000.0
    assert resolve(config) == config


def test_the_input_is_not_changed():
    config = grpo()
    resolve(config)
    assert config == grpo()


def test_a_job_that_must_not_continue_gets_a_new_directory(tmp_path):
    fresh = grpo(checkpoint_root_dir=str(tmp_path), continue_from_checkpoint=False)
    first = resolve(fresh)
    assert first.job_dir == f"{tmp_path}/trinity-dask/rft"
    assert resolve(fresh).job_dir == first.job_dir  # nothing there yet
    (tmp_path / "trinity-dask" / "rft" / "log").mkdir(parents=True)
    second = resolve(fresh)
    assert second.job_dir.startswith(f"{first.job_dir}_2")
    assert second.name in second.job_dir
    assert resolve(second) == second


def test_a_config_without_stages_is_its_only_stage():
    (only,) = split_stages(grpo())
    assert only == resolve(grpo())


def _finish(path: Path, latest: int, finished: bool) -> None:
    path.mkdir(parents=True, exist_ok=True)
    meta = {"latest_stage": latest, "finished": finished}
    (path / "stage_meta.json").write_text(json.dumps(meta))


def test_rerun_finished_goes_on_with_the_newest_run_until_it_is_finished(tmp_path: Path) -> None:
    def named(**values: object) -> str:
        return resolve(grpo(checkpoint_root_dir=str(tmp_path), name="job", **values)).name

    home = tmp_path / "trinity-dask"
    assert named(rerun_finished=True) == "job"
    _finish(home / "job", 0, finished=False)
    assert named(rerun_finished=True) == "job"
    _finish(home / "job", 0, finished=True)
    assert named() == "job"
    assert re.fullmatch(r"job_\d{14}", named(rerun_finished=True))
    _finish(home / "job_20260101000000", 0, finished=False)
    _finish(home / "job_other", 0, finished=False)
    assert named(rerun_finished=True) == "job_20260101000000"
    _finish(home / "job_20260101000000", 0, finished=True)
    assert named(rerun_finished=True) not in ("job", "job_20260101000000", "job_other")


def test_the_words_of_trinity_for_styles_and_methods_are_known():
    config = resolve(
        grpo(synchronizer__sync_style="Dynamic_by_explorer", synchronizer__sync_method="offline")
    )
    assert config.synchronizer.sync_style == "explorer_driven"
    assert config.synchronizer.sync_method == "checkpoint"


def test_an_update_gives_up_waiting_for_requests_before_its_peers_give_it_up():
    keys = {"synchronizer__in_flight": "wait", "synchronizer__in_flight_timeout_s": 600.0}
    (line,) = problems(grpo(**keys))
    assert "in_flight_timeout_s=600 must be below synchronizer.sync_timeout_s=600" in line
    assert problems(grpo(**{**keys, "synchronizer__in_flight": "abort"})) == []
    assert problems(grpo(**{**keys, "synchronizer__in_flight_timeout_s": 30.0})) == []


def test_a_buffer_too_small_for_the_distance_between_the_sides_is_refused():
    store = "buffer__trainer_input__experience_buffer__capacity_batches"
    keys = {store: 2, "synchronizer__sync_interval": 2, "synchronizer__sync_offset": 1}
    (line,) = problems(grpo(**keys))
    assert line.endswith("set it to 3 or more")
    assert problems(grpo(**{**keys, store: 3})) == []


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("nccl", "/scratch/weights", "set sync_method=checkpoint"),
        ("checkpoint", "carrier-pigeon://coop", "scheme whose fsspec package is installed"),
        ("checkpoint", "/scratch/weights", None),
        ("checkpoint", "memory://weights", None),
    ],
)
def test_weights_go_where_their_method_can_put_them(method, path, message):
    found = problems(grpo(synchronizer__sync_method=method, synchronizer__path=path))
    assert [message in line for line in found] == ([] if message is None else [True])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__optimizer__lr_scheduler_type": "wsd"}, "set trainer.total_steps"),
        ({"critic__optimizer__lr_scheduler_type": "cosine"}, "critic.optimizer.lr_scheduler_type"),
        ({"trainer__parallel__strategy": "fsdp2"}, "nothing to share"),
        ({"critic__strategy": "fsdp2"}, "critic.strategy=fsdp2 with"),
        ({"trainer__frozen_strategy": "fsdp2"}, "nothing to share"),
        ({"model__lora__path": "adapter"}, "set the adapter's rank"),
        ({"model__lora__rank": 8, "model__lora__target_modules": []}, "target_modules is empty"),
    ],
)
def test_trainer_options_that_do_not_go_together(changes, message):
    from trinity_dask.config.schema import Config

    cfg = Config()
    for key, value in changes.items():
        *path, last = key.split("__")
        section = cfg
        for name in path:
            section = getattr(section, name)
        setattr(section, last, value)
    rules = (checks.schedule, checks.parallel, checks.lora)
    assert message in "\n".join(text for check in rules for text in check(cfg))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("explorer", name) for name in ("", "a/b", "../../../esc", ".x", "a b", "a\n")),
        *(("explorer", name) for name in ("trainer", "benchmark", "synchronizer", "run", "stage")),
        ("trainer", "../x"),
        ("trainer", "benchmark"),
        ("buffer__trainer_input__experience_buffer", "../x"),
    ],
)
def test_a_name_that_becomes_a_file_is_one_component_and_nobody_elses(key, value):
    (line,) = problems(grpo(**{f"{key}__name": value}))
    assert f"{key.replace('__', '.')}.name={value!r}" in line
    assert "letters, digits, '_', '-' and '.'" in line


def test_explorer_and_trainer_write_files_of_their_own():
    (line,) = problems(grpo(explorer__name="x", trainer__name="x"))
    assert "explorer.name='x' is trainer.name too" in line
    assert problems(grpo(explorer__name="explorer-1.b_2", trainer__name="t")) == []


def test_waits_are_as_long_as_what_is_waited_for_may_take() -> None:
    config = resolve(grpo(explorer__max_timeout_s=4000.0, trainer__step_timeout_s=50_000.0))
    store = config.buffer.trainer_input.experience_buffer
    assert config.synchronizer.meet_timeout_s == 600 + 50_000
    assert store.max_read_timeout_s == 600 + 50_000
    assert not [line for line in validate(config) if "slow and well" in line]
    quick = resolve(grpo(explorer__max_timeout_s=10.0, trainer__step_timeout_s=20.0))
    assert quick.synchronizer.meet_timeout_s == 600 + 2 * quick.explorer.batch_timeout_s
    assert quick.buffer.trainer_input.experience_buffer.max_read_timeout_s == 1800


def test_a_wait_that_ends_healthy_runs_is_told() -> None:
    told = validate(resolve(grpo(synchronizer__meet_timeout_s=100.0)))
    assert [line for line in told if line.startswith("synchronizer.meet_timeout_s=100 is below")]

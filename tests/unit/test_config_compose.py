"""From presets and overrides to a typed configuration, its files and its import."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from trinity_dask.config import (
    Config,
    ConfigError,
    ConfigWarning,
    compose_tree,
    from_yaml,
    load_config,
    resolve,
    save,
    split_stages,
    to_yaml,
    validate,
)
from trinity_dask.config.paths import groups

ROOT = Path(__file__).parents[2]
DEMO = "+experiment=sort_digits"
TINY = "+experiment=sort_digits_tiny"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("buffer.operators=[]", "buffer.operators", []),
        (
            "algorithm.advantage_fn_args={epsilon: 0.5}",
            "algorithm.advantage_fn_args",
            {"epsilon": 0.5},
        ),
        (
            "cluster.trainer.env={A: '1,2', B: 'x=y'}",
            "cluster.trainer.env",
            {"A": "1,2", "B": "x=y"},
        ),
        ("cluster.rollout={env: {A: b}, n_workers: 3}", "cluster.rollout.env", {"A": "b"}),
        (
            "algorithm.optimizer={lr: 1e-4, weight_decay: 0.5}",
            "algorithm.optimizer.weight_decay",
            0.5,
        ),
        ("trainer={grad_clip: 0.25}", "trainer.grad_clip", 0.25),
    ],
)
def test_a_mapping_or_a_list_is_a_value_like_any_other(override, key, value):
    tree = compose_tree(["engine=fake", override])
    assert OmegaConf.to_object(tree)  # every node has its type
    found = OmegaConf.select(tree, key)
    assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value


def test_a_wrong_key_in_a_mapping_is_named_as_it_was_written():
    with pytest.raises(
        ConfigError, match=r"'algorithm\.optimizer\.lrr'; did you mean 'algorithm\.opt"
    ):
        compose_tree(["engine=fake", "algorithm.optimizer={lrr: 1e-5}"])


@pytest.mark.parametrize(
    ("experiment", "engine"),
    [("sort_digits", "vllm"), ("sort_digits_tiny", "torch"), ("sort_digits_tiny", "fake")],
)
def test_every_experiment_is_sound(experiment, engine):
    config = load_config(f"+experiment={experiment}", f"engine={engine}")
    assert config.explorer.rollout_model.engine_type == engine
    assert [stage.stage_name for stage in split_stages(config)] == ["sft", "grpo"]


@pytest.mark.parametrize(
    ("group", "option"),
    [(g, o) for g in groups() for o in groups()[g] if g not in ("experiment", "algorithm")],
)
def test_every_option_of_every_group_composes(group, option):
    compose_tree([f"{group}={option}"])


@pytest.fixture(scope="module")
def demo():
    return split_stages(load_config(DEMO, "seed=7"))


def test_the_demo_is_the_measured_recipe(demo):
    sft, grpo = demo
    assert (sft.mode, sft.trainer.total_steps, sft.buffer.train_batch_size) == ("train", 90, 128)
    assert sft.algorithm.optimizer.lr == 3e-3
    assert sft.algorithm.optimizer.lr_warmup_steps == 20
    assert sft.algorithm.optimizer.min_lr_ratio == 0.05
    assert (grpo.mode, grpo.buffer.total_steps) == ("both", 70)
    assert (grpo.buffer.batch_size, grpo.algorithm.repeat_times) == (64, 32)
    assert grpo.model.max_response_tokens == 7
    assert (grpo.trainer.mini_batches, grpo.trainer.min_mini_batch_rows) == (4, 256)
    assert grpo.algorithm.policy_loss_fn_args == {"clip_range_low": 0.2, "clip_range_high": 0.28}
    assert grpo.algorithm.rollout_correction.cap == 2.0
    for stage in (sft, grpo):
        assert stage.algorithm.optimizer.betas == [0.9, 0.95]
        assert stage.algorithm.optimizer.weight_decay == 0.0
        assert stage.trainer.grad_clip == 1.0
    assert grpo.buffer.explorer_input.eval_tasksets[0].rollout_args.temperature == 0.0


def test_the_seed_reaches_every_seed(demo):
    grpo = demo[1]
    assert grpo.explorer.rollout_model.seed == 7
    assert grpo.buffer.explorer_input.taskset.data_selector.seed == 7
    assert grpo.prepare_args["seed"] == 7
    assert grpo.name.endswith("seed7")


def test_a_config_written_and_read_again_is_equal(tmp_path, demo):
    for stage in (resolve(compose_tree([TINY])), *demo):
        path = save(stage, tmp_path / "deep" / "config.yaml")
        assert from_yaml(path) == stage
        assert path.read_text() == to_yaml(stage)
        assert [item.name for item in path.parent.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("buffer: {batch_sise: 3}", "did you mean 'buffer.batch_size'"),
        ("buffer: {batch_size: many}", "buffer.batch_size=many: the value must be a whole number"),
        ("model: {max_model_len: 1.5}", "must be a whole number or null"),
        ("- a list", "holds a list"),
        ("a: [", "is not a YAML configuration"),
        ("name: ${no.such}", "name an existing key"),
        ("prepare_args:\n  dir: ???", "prepare_args.dir must be set"),
    ],
)
def test_a_bad_file_is_told(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        from_yaml(path)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no configuration file .*gone.yaml"):
        from_yaml(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("buffer.batch_size=abc", "buffer.batch_size=abc: the value must be a whole number"),
        ("buffer.batch_size=1.5", "must be a whole number"),
        ("buffer.batch_size=null", "must be a whole number"),
        ("algorithm.optimizer.lr=fast", "must be a number"),
        ("explorer.eval_at_end=maybe", "must be true or false"),
        ("monitor.sinks=3", "must be a list"),
        ("model=3", "must be a section"),
        ("buffer.explorer_input.eval_tasksets=[{nam: x}]", "eval_tasksets.0.nam'; did you mean"),
        ("algorithm.kl_loss_fn_args.x=1", "write ++algorithm.kl_loss_fn_args.x=1"),
        ("~seed", "cannot be removed"),
        ("name=${nme}", "name an existing key"),
        ("seed=1,2", "add --multirun"),
        ("a b", "cannot read 'a b'"),
        ("model.temperature=[1", "cannot read"),
        ("experiment=sort_digits", "write +experiment=sort_digits"),
        ("+engine=torch", "write engine=torch"),
        ("hydra/launcher=joblb", "no option 'joblb' in group 'hydra/launcher'"),
        ("experimnt/a=b", "unknown group 'experimnt/a'"),
    ],
)
def test_a_bad_override_is_one_line_with_the_fix(override, message):
    with pytest.raises(ConfigError) as caught:
        resolve(compose_tree([override]))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_override_without_effect_is_refused_and_one_with_little_is_told():
    with pytest.raises(ConfigError, match=r"every stage sets .*0 is sft, 1 is grpo"):
        load_config(DEMO, "trainer.total_steps=5")
    with pytest.warns(ConfigWarning, match="does not apply to stage grpo"):
        load_config(DEMO, "trainer.mini_batches=2")
    tree = compose_tree([DEMO, "stages.0.trainer.total_steps=5"])
    first, second = split_stages(resolve(tree))
    assert (first.trainer.total_steps, second.trainer.total_steps) == (5, 70)


def test_presets_of_the_user_are_found_and_checked(tmp_path):
    (tmp_path / "experiment").mkdir()
    mine = tmp_path / "experiment" / "mine.yaml"
    mine.write_text("# @package _global_\ndefaults: [sort_digits_tiny]\nname: mine\n")
    tree = compose_tree(["+experiment=mine"], config_dir=str(tmp_path))
    assert resolve(tree).name == "mine"
    mine.write_text("# @package _global_\ntrainer: {save_intervall: 3}\n")
    with pytest.raises(ConfigError, match=r"preset experiment/mine: .* 'trainer.save_interval'"):
        compose_tree(["+experiment=mine"], config_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="no option 'mne' in group 'experiment'; did you mean"):
        compose_tree(["+experiment=mne"], config_dir=str(tmp_path))


def test_a_directory_of_presets_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="gone"):
        compose_tree([DEMO], config_dir=str(tmp_path / "gone"))


def test_sft_alone_is_one_preset():
    config = load_config(
        "algorithm=sft",
        "model.model_path=m",
        "buffer.trainer_input.experience_buffer.path=rows.jsonl",
        "buffer.train_batch_size=4",
    )
    assert (config.mode, config.algorithm.algorithm_type) == ("train", "sft")


def test_validating_changes_nothing(demo):
    before = copy.deepcopy(demo)
    for stage in demo:
        validate(stage)
    assert demo == before


def test_the_defaults_alone_are_a_config():
    assert isinstance(resolve(Config()), Config)


def test_config_imports_neither_torch_nor_dask():
    code = (
        f"import sys, trinity_dask.config as m; m.load_config({DEMO!r}); "
        "print([name for name in ('torch', 'dask', 'distributed') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_reading_values_needs_no_hydra():
    code = "import sys, trinity_dask.config; print('hydra' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.stdout.strip() == "False", done.stderr

"""The fields of the configuration page: every name, pure, with the limits of the configuration.

Invariant: what a field shows and what the command line refuses come from the same place.
"""

from __future__ import annotations

import copy
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example as example_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_dask.algorithm import ADVANTAGE_FN, ALGORITHM, ENTROPY_LOSS_FN, POLICY_LOSS_FN
from trinity_dask.algorithm.kl import KL_FN, KLTerm
from trinity_dask.algorithm.sample_strategies import SAMPLE_STRATEGY, SAMPLE_STRATEGY_ARGS
from trinity_dask.cli import main
from trinity_dask.config.algorithms import ALGORITHM_TYPES
from trinity_dask.config.compose import compose_tree
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.hints import kind_at
from trinity_dask.manager import config_registry
from trinity_dask.manager.config_manager import BEGINNER, ConfigManager
from trinity_dask.manager.config_registry import CONFIG_GENERATORS, Field, State, from_yaml
from trinity_dask.manager.config_registry.choices import ARGUMENTS, OWN
from trinity_dask.manager.config_registry.state import base, keys, word

TINY = "+experiment=sort_digits_tiny"
NAMES = json.loads((Path(__file__).parent / "studio_names.json").read_text())
SETTERS = [(m, name) for m, names in NAMES.items() for name in names if name.startswith("set_")]
SOUND = State((), {"model.model_path": "m", "buffer.explorer_input.taskset.path": "t.jsonl"})


def function(module, name):
    return getattr(getattr(config_registry, module), name)


def test_there_are_157_names():
    assert sum(map(len, NAMES.values())) == 157


@pytest.mark.parametrize(("module", "name"), SETTERS)
def test_a_setter_gives_a_field_of_the_state_and_changes_nothing(module, name):
    setter, before = function(module, name), copy.deepcopy(SOUND)
    field = setter(SOUND)
    assert isinstance(field, Field)
    assert before == SOUND
    assert setter.__name__ == name
    assert setter.__module__.endswith(module)
    if field.kind == "note":
        assert field.help
        return
    assert kind_at(field.key) is not None
    assert field.value == SOUND.get(field.key)
    # and it follows the state
    changed = SOUND.set(field.key, "changed")
    assert setter(changed).value == "changed"


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("train_batch_size", {"cluster.trainer.n_workers": 9}, "fewer than"),
        ("taskset_path", {"buffer.explorer_input.taskset.path": ""}, "taskset.path is empty"),
        ("experience_buffer_path", {"algorithm.algorithm_type": "sft"}, "buffer.path is empty"),
        ("tensor_parallel_size", {"cluster.rollout.gpus_per_worker": 2}, "needs 1 GPUs"),
        ("auxiliary_models", {"algorithm.policy_loss_fn": "jsd"}, "teacher_model_path is empty"),
        ("checkpoint_root_dir", {"checkpoint_root_dir": " "}, "is empty"),
        ("model_path", {"model.model_path": ""}, "model.model_path is empty"),
    ],
)
def test_a_check_says_what_is_wrong_and_nothing_when_it_is_right(name, values, problem):
    check = CONFIG_GENERATORS.checks[name]
    assert check(SOUND) is None
    state = State((), {**SOUND.values, **values})
    assert problem in check(state)
    (field,) = CONFIG_GENERATORS.get_configs(name, state=state)
    assert not field.visible or problem in field.problem


def test_the_other_functions_of_the_modules():
    buffer, trainer = config_registry.buffer_config_manager, config_registry.trainer_config_manager
    two = State((), {"cluster.trainer.n_workers": 2, "buffer.batch_size": 5})
    assert buffer.get_train_batch_size(two) == 10
    assert buffer.get_train_batch_size_per_gpu(two) == 5
    parsed = buffer.parse_priority_fn_args({"decay": "2.0", "use_count_limit": "3", "sigma": ""})
    assert parsed == {"decay": 2.0, "use_count_limit": 3}
    assert config_registry.explorer_config_manager.explorer_visible(two)
    assert not config_registry.explorer_config_manager.explorer_visible(two.set("mode", "train"))
    assert trainer.use_critic(two.set("algorithm.algorithm_type", "ppo"))
    assert not trainer.use_critic(two)
    assert trainer.check_resume_from_path(two) is None


def test_the_choices_are_those_of_the_registries():
    for slot, registry in (
        ("advantage_fn", ADVANTAGE_FN),
        ("policy_loss_fn", POLICY_LOSS_FN),
        ("entropy_loss_fn", ENTROPY_LOSS_FN),
    ):
        names = set(ARGUMENTS[slot]) - {"none"}
        assert names == set(registry.names()) - {"none"}
        for name in names:
            found = inspect.signature(registry.get(name)).parameters
            assert set(ARGUMENTS[slot][name]) == set(found) - {"loss_agg_mode"}, name
    of_kl = set(inspect.signature(KLTerm).parameters) - {"name"}
    for slot in ("kl_penalty_fn", "kl_loss_fn"):
        assert set(ARGUMENTS[slot]) == set(KL_FN.names()) | {"none"}
        for name, arguments in ARGUMENTS[slot].items():
            assert set(arguments) == (set() if name == "none" else of_kl), name
    assert set(ARGUMENTS["sample_strategy"]) == set(SAMPLE_STRATEGY.names())
    for name, arguments in ARGUMENTS["sample_strategy"].items():
        assert set(arguments) == set(SAMPLE_STRATEGY_ARGS.get(name, {})), name
    for kind in ALGORITHM_TYPES:
        assert OWN[kind] == tuple(getattr(ALGORITHM.get(kind), slot) for slot in ARGUMENTS)


def test_a_registry_of_ones_own():
    registry = config_registry.ConfigRegistry()

    @registry.register_config(default_value=3, other_configs={"seed": 3})
    def set_seed(state: State, **kwargs):
        return Field("seed", "whole", state.get("seed"))

    @registry.register_check()
    def check_seed(state: State):
        return "odd" if state.get("seed") % 2 else None

    (field,) = registry.get_configs("seed", columns_config=[1, 2], state=State((), {"seed": 5}))
    assert (field.value, field.problem) == (5, "odd")
    assert (registry.defaults["seed"], registry.others["seed"]) == (3, {"seed": 3})
    with pytest.raises(LookupError, match="no field 'sed'"):
        registry.get_configs("sed")


# dependencies ------------------------------------------------------------------------------
def test_another_algorithm_has_its_own_functions_mode_and_data():
    state = SOUND.set("algorithm.policy_loss_fn", "cispo").set("algorithm.repeat_times", 6)
    state = state.set("algorithm.policy_loss_fn_args.clip_range_high", 0.3)
    offline = state.set("algorithm.algorithm_type", "sft")
    assert offline.get("mode") == "train"
    assert offline.get("algorithm.policy_loss_fn") is None
    assert offline.get("algorithm.policy_loss_fn_args") in (None, {})
    assert offline.get("buffer.trainer_input.experience_buffer.storage_type") == "file"
    assert offline.get("algorithm.repeat_times") is None
    again = offline.set("algorithm.algorithm_type", "grpo")
    assert (again.get("mode"), again.get("algorithm.repeat_times")) == ("both", 6)


def test_another_function_forgets_the_arguments_of_the_last():
    state = SOUND.set("algorithm.advantage_fn", "opmd").set("algorithm.advantage_fn_args.tau", 2.0)
    assert state.get("algorithm.advantage_fn_args.tau") == 2.0
    assert (
        state.set("algorithm.advantage_fn", "grpo").get("algorithm.advantage_fn_args.tau") is None
    )


def test_gpus_follow_the_size_of_an_engine():
    state = SOUND.set("cluster.rollout.gpus_per_worker", 1)
    state = state.set("explorer.rollout_model.tensor_parallel_size", 2)
    assert state.get("cluster.rollout.gpus_per_worker") == 2


def test_arguments_are_shown_with_the_functions_that_have_them():
    (tau,) = CONFIG_GENERATORS.get_configs("tau_in_policy_loss_fn", state=SOUND)
    assert not tau.visible
    opmd = SOUND.set("algorithm.algorithm_type", "opmd")
    (tau,) = CONFIG_GENERATORS.get_configs("tau_in_policy_loss_fn", state=opmd)
    assert tau.visible


# every key -----------------------------------------------------------------------------------
def example(key):
    """A sound value of this key other than what it has."""
    kind, value = keys()[key], SOUND.get(key)
    if kind.choices:
        return next(choice for choice in kind.choices if choice != value)
    text = str(kind.annotation)
    if "bool" in text:
        return not value
    if "list" in text:
        return [0.5, 0.75] if "float" in text else [] if value else ["a"]
    if kind.is_open:
        return {"a": "b"}
    if "int" in text or "float" in text:
        number = int if "int" in text else float
        tries = [number(n) for n in (3, 1, 2, 0, 1.5, 1 << 21)] + [0.25]
        return next(
            n for n in tries if n != value and (kind.range is None or kind.range.contains(n))
        )
    return "a 'text', with: [signs] and \\ "


SETTABLE = [key for key, kind in keys().items() if kind.item is None and key != "stages"]


def test_what_is_set_is_read_back_from_the_yaml():
    for key in SETTABLE:
        value = example(key)
        assert from_yaml(State((), {key: value}).to_yaml()).get(key) == value, key


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12))
@example_of("a\\'b\\")
@example_of("'\\\\'\\\\")
@example_of('`id` $HOME "x" \\')
@settings(max_examples=60, deadline=None)
def test_any_text_is_read_back_from_the_command_line_through_a_shell(text):
    manager = ConfigManager()
    manager.set("project", text)
    script = manager.command().replace("trinity-dask run", "printf '%s\\0'", 1)
    printed = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout
    words = printed.decode().split("\0")[:-1]
    parsed = OverridesParser.create().parse_overrides([word for word in words if word])
    expected = [text] if "project" in manager.state.chosen() else []
    assert [each.value() for each in parsed if each.key_or_group == "project"] == expected


def test_a_secret_typed_into_a_field_is_in_no_file_and_no_command():
    manager = ConfigManager((TINY,))
    manager.set("monitor.sink_args", {"wandb": {"api_key": "abcdef012345"}})
    assert "abcdef" not in manager.state.to_yaml() + manager.command()
    with pytest.raises(ConfigError, match=r"sink_args.wandb.api_key is a secret .*oc\.env:NAME"):
        manager.generate_config()
    manager.set("monitor.sink_args", {"wandb": {"api_key": "${oc.env:WANDB_API_KEY}"}})
    assert "${oc.env:WANDB_API_KEY}" in manager.state.to_yaml()
    assert not manager.state.plain_secrets()


def test_what_is_set_is_read_back_from_the_command_line():
    values = {key: example(key) for key in SETTABLE}
    tree = compose_tree([f"{key}={word(value)}" for key, value in values.items()])
    for key, value in values.items():
        read = tree
        for part in key.split("."):
            read = read[part]
        read = {name: read[name] for name in value} if isinstance(value, dict) else read
        assert read == value, key


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("trainer.ppo_epochs", 0, "must be >= 1"),
        ("trainer.ppo_epochs", "x", "must be a whole number"),
        ("seed", None, "needs a value"),
        ("mode", "bth", "did you mean 'both'?"),
        ("algorithm.optimizer.lr", True, "must be a number"),
        ("explorer.eval_at_end", 3, "true or false"),
    ],
)
def test_a_value_that_cannot_be_is_told_at_its_field(key, value, sentence):
    manager = ConfigManager()
    manager.set(key, value)
    field = next(f for fs in manager.expert_mode().values() for f in fs if f.key == key)
    assert sentence in field.problem


# the manager -----------------------------------------------------------------------------------
def test_beginners_see_about_twenty_five_fields():
    fields = [f for fs in ConfigManager((TINY,)).beginner_mode().values() for f in fs]
    assert 20 <= len(fields) <= 26
    assert {f.kind for f in fields} <= {"text", "number", "whole", "choice", "list", "switch"}
    assert sum(map(len, BEGINNER.values())) >= len(fields)


def test_experts_see_every_key():
    fields = [f for fs in ConfigManager().expert_mode().values() for f in fs]
    assert {f.key for f in fields} == set(keys())
    assert [f.key for f in fields if not f.help] == []


def test_what_is_generated_passes_validation_and_means_the_state(tmp_path, capsys):
    manager = ConfigManager((TINY,))
    manager.set("seed", 7)
    manager.set("stages.1.trainer.total_steps", 2)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(manager.generate_config())
    assert main(["validate", "--config-dir", str(tmp_path), "+experiment=mine"]) == 0
    loaded = from_yaml(manager.generate_config())
    assert loaded.get("stages")[1]["trainer"]["total_steps"] == 2
    assert loaded.overrides() == manager.state.overrides()
    assert next(manager.differences((TINY,))) == "seed: 1 -> 7"
    assert "trainer:{total_steps:2," in manager.command()


def test_what_cannot_run_is_refused_with_the_command_lines_sentence():
    manager = ConfigManager()
    with pytest.raises(ConfigError, match=r"model\.model_path is empty: set model\.model_path"):
        manager.generate_config()
    manager.set("trainer.ppo_epochs", 0)
    assert any("trainer.ppo_epochs=0 is out of range" in line for line in manager.problems())


def test_a_change_can_be_undone_and_all_of_them_forgotten():
    manager = ConfigManager((TINY,))
    manager.set("seed", 5)
    manager.set("seed", 6)
    assert manager.undo().get("seed") == 5
    assert manager.reset_session_state().get("seed") == 1
    assert manager.undo().get("seed") == 5
    with pytest.raises(ConfigError, match="unknown key"):
        manager.set("sede", 1)


def test_a_jobs_saved_configuration_is_read(tmp_path):
    from trinity_dask.config import load_config, save

    path = save(load_config(TINY, "seed=9", f"checkpoint_root_dir={tmp_path}"), tmp_path / "c.yaml")
    state = from_yaml(path.read_text())
    assert state.get("seed") == 9
    assert state.get("stages")[0]["stage_name"] == "sft"
    with pytest.raises(ConfigError, match="unknown key 'colour'"):
        from_yaml("colour: 1")


def test_fields_need_neither_torch_nor_dask():
    code = (
        "import sys; from trinity_dask.manager.config_manager import ConfigManager; "
        "ConfigManager().expert_mode(); print({'torch', 'dask'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.fixture(autouse=True, scope="module")
def _forget():
    yield
    base.cache_clear()

"""Unknown keys, everywhere they can be: each is refused and the right one is named."""

from __future__ import annotations

from typing import Any

import pytest

from trinity_dask.config.compose import check_overrides, compose_tree, find_unknown, to_config
from trinity_dask.config.errors import ConfigError
from trinity_dask.config.fields import Kind, all_keys
from trinity_dask.config.hints import check_key, kind_at, split_path
from trinity_dask.config.paths import groups
from trinity_dask.config.schema import DERIVED, STAGE_KEYS, Config

KEYS = [key for key, _ in all_keys(Config)]
VALUE_KEYS = [(key, kind) for key, kind in all_keys(Config) if kind.section is None]


def slips(word: str) -> list[str]:
    """The word with one letter dropped, doubled, swapped with its neighbour, and changed."""
    i = len(word) // 2
    swapped = word[: i - 1] + word[i] + word[i - 1] + word[i + 1 :]
    return [
        word[:i] + word[i + 1 :],
        word[:i] + word[i] + word[i:],
        swapped if swapped != word else word + "x",
        word[:i] + "q" + word[i + 1 :],
    ]


def misspelt(key: str) -> list[str]:
    prefix, _, leaf = key.rpartition(".")
    return [f"{prefix}.{slip}".lstrip(".") for slip in slips(leaf)]


def test_fault_40_a_misspelt_key_fails_with_the_right_one_first():
    for key in KEYS:
        for wrong in misspelt(key):
            assert check_key(wrong) == f"unknown key '{wrong}'; did you mean '{key}'?"


@pytest.mark.parametrize("sign", ["", "+", "++", "~"])
@pytest.mark.parametrize("key", ["seed", "trainer.cluster", "model.top_p", "stages.0.trainer.name"])
def test_fault_40_no_sign_in_front_lets_an_unknown_key_through(sign, key):
    with pytest.raises(ConfigError, match=f"^unknown key '{key}z'"):
        check_overrides([f"{sign}{key}z=1", "seed=1"])


def test_fault_40_a_misspelt_key_of_a_stage_fails_with_the_right_one_first():
    for key in KEYS:
        if split_path(key)[0] not in STAGE_KEYS:
            continue
        nearest = f"stages.1.{key}" if "." in key else key
        for wrong in misspelt(key):
            wanted = f"unknown key 'stages.1.{wrong}'; did you mean '{nearest}'?"
            assert check_key(f"stages.1.{wrong}") == wanted


def nested(key: str) -> dict[str, Any]:
    """``a.0.b`` as {"a": [{"b": None}]}."""
    tree: Any = None
    for part in reversed(split_path(key)):
        tree = [tree] if part.isdigit() else {part: tree}
    return tree


def test_fault_40_a_misspelt_key_of_a_preset_is_found_in_the_composed_tree():
    for key in KEYS:
        wrong = misspelt(key)[0]
        assert list(find_unknown(nested(wrong))) == [
            f"unknown key '{wrong}'; did you mean '{key}'?"
        ]
        assert list(find_unknown(nested(key))) == []


@pytest.mark.parametrize(
    ("group", "option"), [(name, option) for name in groups() for option in groups()[name]]
)
def test_fault_40_a_misspelt_option_fails_with_the_right_one(group, option):
    sign = "+" if group == "experiment" else ""
    check_overrides([f"{sign}{group}={option}"])
    with pytest.raises(ConfigError, match=f"in group '{group}'; did you mean '{option}'"):
        check_overrides([f"{sign}{group}={slips(option)[1]}"])


def sample(key: str, kind: Kind) -> Any:
    """A valid value that is not the default where the type allows one."""
    if kind.choices:
        return kind.choices[-1]
    if kind.range is not None:
        value = next(v for v in (0.5, 1, 2, 1 << 20) if _fits(v, kind) and kind.range.contains(v))
        return [value] * 2 if "list" in str(kind.annotation) else value
    samples = {"bool": True, "str": "text", "int": 3, "float": 0.5}
    if kind.is_open or kind.item is not None:
        return {"open": "1"} if kind.is_open else []
    if "list" in str(kind.annotation):
        return [] if "dict" in str(kind.annotation) else ["text"]
    return next(value for name, value in samples.items() if name in str(kind.annotation))


def _fits(value: float, kind: Kind) -> bool:
    return "float" in str(kind.annotation) or value == int(value)


def test_fault_40_every_documented_key_can_be_set():
    keys = {key: sample(key, kind) for key, kind in VALUE_KEYS if key not in DERIVED}
    plain = {key: value for key, value in keys.items() if ".0." not in key}
    listed = {key: value for key, value in keys.items() if ".0." in key}
    overrides = [f"++{key}={_written(value)}" for key, value in plain.items() if value != []]
    for name in {key.split(".0.")[0] for key in listed}:
        entry: dict[str, Any] = {}
        for key, value in listed.items():
            if key.startswith(f"{name}.0."):
                _put(entry, key.removeprefix(f"{name}.0."), value)
        overrides.append(f"{name}=[{_written(entry)}]")
    config = to_config(compose_tree(overrides))
    for key, value in keys.items():
        if value != [] and value is not None and not key.endswith("checkpoint_root_dir"):
            assert _at(config, key) == value, key


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[leaf] = value


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


def _at(config: Config, key: str) -> Any:
    node: Any = config
    for part in split_path(key):
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trainer.lr", "algorithm.optimizer.lr"),
        ("explorer.max_timeout", "explorer.max_timeout_s"),
        ("explorer.runner_per_model", "cluster.rollout.nthreads"),
        ("monitor.monitor_type", "monitor.sinks"),
        ("engin", "+engine=..."),
        ("stages.0.buffer.lr", "stages.0.algorithm.optimizer.lr"),
        ("bufer.batch_sise", "buffer.batch_size"),
        ("batch_size", "buffer.batch_size"),
    ],
)
def test_a_key_in_the_wrong_place_or_with_its_old_name_is_told_the_right_one(wrong, right):
    assert f"'{right}'" in str(check_key(wrong))


def test_a_key_like_no_other_lists_what_its_section_has():
    assert "keys in 'buffer': batch_size, train_batch_size" in str(check_key("buffer.zzzzzz"))


def test_an_open_section_takes_any_key_and_a_closed_one_does_not():
    assert check_key("algorithm.policy_loss_fn_args.anything.below") is None
    assert check_key("stages.3.prepare_args") is not None
    assert kind_at("buffer.operators.0.args.threshold") is not None
    assert kind_at("buffer.operators.first.args") is None


@pytest.mark.parametrize("key", DERIVED)
def test_a_derived_key_is_not_to_be_set(key):
    with pytest.raises(ConfigError, match="is derived"):
        check_overrides([f"{key}=x"])


def test_a_stage_cannot_change_what_belongs_to_the_run():
    problems = list(
        find_unknown({"stages": [{"stage_name": "a", "cluster": {"type": "local"}}, 3]})
    )
    assert "belongs to the whole run" in problems[0]
    assert "is not a mapping" in problems[1]

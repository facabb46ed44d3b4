"""The example presets are sound, and what they are made of is what they say."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from trinity_dask.algorithm import resolve_algorithm
from trinity_dask.config import load_config, split_stages, validate
from trinity_dask.config.schema import Config
from trinity_dask.demo import sort_examples

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "sort_sft": "sft",
    "sort_dpo": "dpo",
    "sort_ppo": "ppo",
    "sort_grpo": "grpo",
    "sort_dapo": "dapo",
    "sort_mix_chord": "mix_chord",
    "sort_distill": "on_policy_distill",
    "sort_gigpo": "gigpo",
    "sort_agent": "grpo",
}


@pytest.mark.parametrize(("experiment", "kind"), EXAMPLES.items())
def test_an_example_ends_with_its_algorithm_and_has_a_command(experiment, kind):
    stages = split_stages(load_config(f"+experiment={experiment}"))
    for stage in stages:
        validate(stage)
        resolve_algorithm(asdict(stage.algorithm))
    assert stages[-1].algorithm.algorithm_type == kind
    page = (ROOT / "examples" / "README.md").read_text()
    assert f"+experiment={experiment}" in page
    assert f"\n| {experiment} | " in page, "no measured values"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("examples")
    size = {"n_digits": 3, "n_train": 200, "n_eval": 20}
    sort_examples.prepare(Config(), dir=str(root), teacher_steps=30, **size)
    return root


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pairs_differ_in_order_alone(made):
    for row in lines(made / "pairs.jsonl"):
        assert row["chosen"] == "".join(sorted(row["rejected"])) != row["rejected"]


def test_moves_of_the_game_pick_the_smallest_digit_that_is_left(made):
    rows = lines(made / "pick.jsonl")
    assert {len(row["prompt"]) for row in rows} == {len("pick =") + n for n in (1, 2, 3)}
    for row in rows:
        assert row["response"] == min(row["prompt"].removeprefix("pick ").removesuffix("="))


def test_the_teacher_is_trained_once_and_loads_with_the_same_tokenizer(made):
    from safetensors.torch import load_file

    teacher, start = made / "teacher", made / "model"
    own = load_file(teacher / "model.safetensors")
    given = load_file(start / "model.safetensors")
    assert own.keys() == given.keys()
    assert any(not own[name].equal(given[name]) for name in own)
    assert (teacher / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()
    written = (teacher / "model.safetensors").stat().st_mtime_ns
    size = {"n_digits": 3, "n_train": 200, "n_eval": 20}
    sort_examples.prepare(Config(), dir=str(made), teacher_steps=30, **size)
    assert (teacher / "model.safetensors").stat().st_mtime_ns == written
